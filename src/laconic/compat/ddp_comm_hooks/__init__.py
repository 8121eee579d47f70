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
    """The hooks by name; `DDPCommHookType.FP16_COMPRESS.value(model=model, state=process_group)` registers one."""

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
    """Register a hook with a DDP by its name; `state` is None or a process group.

    `register_ddp_comm_hook(DDPCommHookType.POWER_SGD_RANK2, model)`
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        near = get_close_matches(str(comm_hook_type).upper(), DDPCommHookType.__members__, 1, 0)
        raise TypeError(f"comm_hook_type must be a DDPCommHookType such as DDPCommHookType.{near[0]}, got {comm_hook_type!r}")
    comm_hook_type.value(model=model, state=state)


def as_hook(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A partial, a lambda or a callable object as a hook: DDP takes functions with the right names alone.

    `ddp.register_comm_hook(None, as_hook(partial(quantization_perchannel_hook, bucket_size=128)))`
    """
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable with (state, bucket), got {hook!r}")

    def given_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    return given_hook
