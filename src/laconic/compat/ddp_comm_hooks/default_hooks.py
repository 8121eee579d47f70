"""Plain averaging, and 16 bits on the wire.

What differs from torch:
- bf16 works on gloo, and is summed in fp32, as fp16 is: two roundings whatever the world's size
  (tests/compat/test_default_hooks.py::test_sixteen_bits_are_summed_in_32).
- No state means the DDP's own process group, not all ranks of the job
  (tests/compat/test_default_hooks.py::test_a_ddp_of_some_ranks_needs_no_state).
- A wrapper's result has the gradients' dtype, whatever the hook inside returns
  (tests/compat/test_default_hooks.py::test_wrappers_give_the_dtype_back).
- The futures of 16-bit hooks are done together, when a backward's last bucket has arrived: don't wait for one inside a hook.
  That of `allreduce_hook` is done when its bucket is (tests/compat/test_edges.py::test_waiting_and_mixing).
"""

# DDP refuses hooks whose annotations are strings: no `from __future__ import annotations` here.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from laconic.compat._hooks import average
from laconic.reducers.cast import Cast
from laconic.reducers.exact import Exact

__all__ = ["allreduce_hook", "bf16_compress_hook", "bf16_compress_wrapper", "fp16_compress_hook", "fp16_compress_wrapper"]


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP does without a hook, to the bit.

    Bytes: 2(N-1)/N * n * itemsize.

    Memory: none between steps.

    Arguments:
      `process_group`: the ranks to average over; None: the DDP's own.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import allreduce_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, allreduce_hook)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return average(process_group, bucket, Exact())


def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send gradients as fp16, sum them in fp32.

    Bytes: 2(N-1)/N * 2n.

    Memory: none between steps.

    Not: for tiny gradients without a GradScaler: what is too small for fp16 becomes zero. bf16 has the range of fp32.

    Arguments:
      `process_group`: the ranks to average over; None: the DDP's own.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import fp16_compress_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, fp16_compress_hook)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return average(process_group, bucket, Cast("fp16"))


def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send gradients as bf16, sum them in fp32.

    Bytes: 2(N-1)/N * 2n.

    Memory: none between steps.

    Arguments:
      `process_group`: the ranks to average over; None: the DDP's own.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import bf16_compress_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, bf16_compress_hook)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return average(process_group, bucket, Cast("bf16"))


def fp16_compress_wrapper(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Hand `hook` the bucket as fp16, and give what it returns back in the gradients' own dtype.

    Bytes: those of `hook`, on numbers of 16 bits.

    Memory: that of `hook`, and a copy of each bucket in 16 bits during backward.

    Arguments:
      `hook`: any communication hook, ours or your own. What is returned is registered with the state of `hook`.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import (
    ...     allreduce_hook,
    ...     fp16_compress_wrapper,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, fp16_compress_wrapper(allreduce_hook))
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return _in_dtype(torch.float16, hook)


def bf16_compress_wrapper(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Hand `hook` the bucket as bf16, and give what it returns back in the gradients' own dtype.

    Bytes: those of `hook`, on numbers of 16 bits.

    Memory: that of `hook`, and a copy of each bucket in 16 bits during backward.

    Arguments:
      `hook`: any communication hook, ours or your own. What is returned is registered with the state of `hook`.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import (
    ...     allreduce_hook,
    ...     bf16_compress_wrapper,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, bf16_compress_wrapper(allreduce_hook))
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return _in_dtype(torch.bfloat16, hook)


def _in_dtype(
    dtype: torch.dtype, hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    def compressed_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        bucket.set_buffer(whole.to(dtype))

        def restore(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            bucket.set_buffer(whole.copy_(future.value()))
            return whole

        return hook(state, bucket).then(restore)

    return compressed_hook


# DDP refuses a hook with the name of torch's unless NCCL is there. Pickle goes by `__qualname__`, which stays.
bf16_compress_hook.__name__ = "bf16_hook"
