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
    """Eight bits a number, one scale for each parameter.  Bytes: 2(N-1)/N * n, and 4 for each parameter.

    `ddp.register_comm_hook(None, quantization_pertensor_hook)`
    """
    return average(process_group, bucket, Quantized(bits=8, block=sys.maxsize))


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Eight bits a number, one scale for every `bucket_size` numbers.  Bytes: 2(N-1)/N * n * (1 + 4/bucket_size).

    `ddp.register_comm_hook(None, quantization_perchannel_hook)`; for another size,
    `ddp.register_comm_hook(None, as_hook(partial(quantization_perchannel_hook, bucket_size=128)))`.
    """
    return average(process_group, bucket, Quantized(bits=8, block=bucket_size))
