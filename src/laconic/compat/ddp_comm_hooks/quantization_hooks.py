"""Eight bits on the wire.

What differs from torch:
- They work on gloo as on any backend (tests/compat/test_quantization_hooks.py::test_the_error_is_within_two_roundings).
- A quantized all-reduce, all-to-all and then all-gather, instead of gathering everybody's gradients: the bytes stop growing
  with the world (::test_bytes_do_not_grow_with_the_world), and values are rounded twice instead of once.
- Codes are symmetric, -127 to 127 with one scale, where torch has 0 to 255 with a scale and a zero point.
- "Per tensor" means one scale for each parameter, where torch has one for the whole bucket: no large layer
  drowns a small one (::test_a_small_layer_is_not_drowned).
"""

import sys

import torch
import torch.distributed as dist

from laconic.compat._hooks import average
from laconic.reducers.quantized import Quantized

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send gradients in eight bits a number, with one scale for each parameter.

    Maths: codes from -127 to 127 times max|x| / 127 of the parameter; the sum in fp32, rounded once more.

    Bytes: 2(N-1)/N * n, and 4 for each parameter.

    Memory: none between steps.

    Not: no error feedback; `laconic.int4()` and `laconic.ErrorFeedback` have it.

    Arguments:
      `process_group`: the ranks to average over; None: the DDP's own.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.quantization_hooks import (
    ...     quantization_pertensor_hook,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, quantization_pertensor_hook)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return average(process_group, bucket, Quantized(bits=8, block=sys.maxsize))


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Send gradients in eight bits a number, with one scale for every `bucket_size` numbers.

    Maths: codes from -127 to 127 times max|x| / 127 of the block; the sum in fp32, rounded once more.

    Bytes: 2(N-1)/N * n * (1 + 4/bucket_size).

    Memory: none between steps.

    Not: no error feedback; `laconic.int4()` and `laconic.ErrorFeedback` have it.

    Arguments:
      `process_group`: the ranks to average over; None: the DDP's own.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.
      `bucket_size`: numbers that share a scale, at least 8; blocks don't cross parameters. For another size, register
        `as_hook(partial(quantization_perchannel_hook, bucket_size=128))`. Default 512.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.quantization_hooks import (
    ...     quantization_perchannel_hook,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> from functools import partial
    >>> from laconic.compat.ddp_comm_hooks import as_hook
    >>> ddp.register_comm_hook(
    ...     None, as_hook(partial(quantization_perchannel_hook, bucket_size=128))
    ... )
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    >>> torch.distributed.destroy_process_group()
    """
    return average(process_group, bucket, Quantized(bits=8, block=bucket_size))
