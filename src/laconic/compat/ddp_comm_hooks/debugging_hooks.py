"""No communication at all, to see how much of a step it takes. Nothing differs from torch."""

from typing import Any

import torch
import torch.distributed as dist

from laconic.compat._hooks import completed

__all__ = ["noop_hook"]


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank with its own gradients: the step time that no way of communicating can beat.

    Bytes: none.

    Not: for training. Replicas drift apart; `laconic.silent()` is the same as a strategy, and averages at the end.

    Arguments:
      `_`: the hook's state, which is not used.
      `bucket`: DDP hands it over. The future that is returned has its own numbers already.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.debugging_hooks import noop_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, noop_hook)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return completed(bucket.buffer())
