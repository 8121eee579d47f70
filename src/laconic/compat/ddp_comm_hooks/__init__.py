"""torch's communication hooks by name.

What differs from torch:
- Partials, lambdas and callable objects become hooks by `as_hook` (tests/compat/test_registration.py::test_as_hook).
- What is no `DDPCommHookType` is refused with the nearest name (::test_an_unknown_type_is_refused).
"""

from collections.abc import Callable
from difflib import get_close_matches
from enum import Enum, member
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from laconic.compat.ddp_comm_hooks import ddp_zero_hook, mixed_precision_hooks, post_localSGD_hook
from laconic.compat.ddp_comm_hooks import debugging_hooks as debugging
from laconic.compat.ddp_comm_hooks import default_hooks as default
from laconic.compat.ddp_comm_hooks import optimizer_overlap_hooks as optimizer_overlap
from laconic.compat.ddp_comm_hooks import powerSGD_hook as powerSGD  # torch's name
from laconic.compat.ddp_comm_hooks import quantization_hooks as quantization

__all__ = [
    "DDPCommHookType",
    "as_hook",
    "ddp_zero_hook",
    "debugging",
    "default",
    "mixed_precision_hooks",
    "optimizer_overlap",
    "post_localSGD_hook",
    "powerSGD",
    "quantization",
    "register_ddp_comm_hook",
]


def _plain(comm_hook: Callable[..., Any], model: DistributedDataParallel, state: object) -> None:
    model.register_comm_hook(state, comm_hook)


def _power(
    comm_hook: Callable[..., Any],
    model: DistributedDataParallel,
    state: dist.ProcessGroup | None,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int = 1_000,  # noqa: N803  # torch's name
) -> None:
    settings = powerSGD.PowerSGDState(state, matrix_approximation_rank, start_powerSGD_iter)
    model.register_comm_hook(settings, comm_hook)


class DDPCommHookType(Enum):
    """The hooks by name, for `register_ddp_comm_hook`.

    ALLREDUCE, FP16_COMPRESS, BF16_COMPRESS, QUANTIZE_PER_TENSOR, QUANTIZE_PER_CHANNEL, POWER_SGD and POWER_SGD_RANK2,
    BATCHED_POWER_SGD and BATCHED_POWER_SGD_RANK2, NOOP. The value of each registers its hook when it is called with `model`,
    `state` and, of those by PowerSGD, `start_powerSGD_iter`.

    >>> from laconic.compat.ddp_comm_hooks import DDPCommHookType
    >>> [kind.name for kind in DDPCommHookType][:3]
    ['ALLREDUCE', 'FP16_COMPRESS', 'BF16_COMPRESS']
    """

    ALLREDUCE = member(partial(_plain, default.allreduce_hook))
    FP16_COMPRESS = member(partial(_plain, default.fp16_compress_hook))
    BF16_COMPRESS = member(partial(_plain, default.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_plain, quantization.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(partial(_plain, quantization.quantization_perchannel_hook))
    POWER_SGD = member(partial(_power, powerSGD.powerSGD_hook, matrix_approximation_rank=1))
    POWER_SGD_RANK2 = member(partial(_power, powerSGD.powerSGD_hook, matrix_approximation_rank=2))
    BATCHED_POWER_SGD = member(partial(_power, powerSGD.batched_powerSGD_hook, matrix_approximation_rank=1))
    BATCHED_POWER_SGD_RANK2 = member(partial(_power, powerSGD.batched_powerSGD_hook, matrix_approximation_rank=2))
    NOOP = member(partial(_plain, debugging.noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: DistributedDataParallel, state: Any = None) -> None:
    """Register a hook with a DDP by its name.

    Bytes: those of the hook.

    Not: DDP takes one hook for ever. To change the way later, use `laconic.attach` and `run.swap`.

    Arguments:
      `comm_hook_type`: one of `DDPCommHookType`.
      `model`: the DDP that has no hook yet.
      `state`: the process group to average over. Default None: the DDP's own.

    What is no `DDPCommHookType` is a TypeError with the nearest name.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> register_ddp_comm_hook(DDPCommHookType.POWER_SGD_RANK2, ddp)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> torch.distributed.destroy_process_group()
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        near = get_close_matches(str(comm_hook_type).upper(), DDPCommHookType.__members__, 1, 0)
        raise TypeError(f"comm_hook_type must be a DDPCommHookType such as DDPCommHookType.{near[0]}, got {comm_hook_type!r}")
    comm_hook_type.value(model=model, state=state)


def as_hook(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A partial, a lambda or a callable object as a hook: DDP takes functions with the right names alone.

    Arguments:
      `hook`: what is called with (state, bucket) and returns a future of the mean. What can't be called is a TypeError.

    >>> import torch
    >>> from functools import partial
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks import as_hook
    >>> from laconic.compat.ddp_comm_hooks.quantization_hooks import (
    ...     quantization_perchannel_hook,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(
    ...     None, as_hook(partial(quantization_perchannel_hook, bucket_size=128))
    ... )
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> torch.distributed.destroy_process_group()
    """
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable with (state, bucket), got {hook!r}")

    def given_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    return given_hook
