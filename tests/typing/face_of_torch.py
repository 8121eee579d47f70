"""A user's script that uses every public name of `laconic.compat`: torch's hooks and averagers under their own names.

It is never run: see `face.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.compat import ddp_comm_hooks, model_averaging
from laconic.compat.ddp_comm_hooks import (
    DDPCommHookType,
    as_hook,
    ddp_zero_hook,
    debugging,
    default,
    mixed_precision_hooks,
    optimizer_overlap,
    post_localSGD_hook,
    powerSGD,
    quantization,
    register_ddp_comm_hook,
)
from laconic.compat.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from laconic.compat.ddp_comm_hooks.debugging_hooks import noop_hook
from laconic.compat.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from laconic.compat.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from laconic.compat.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from laconic.compat.ddp_comm_hooks.quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from laconic.compat.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from laconic.compat.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from laconic.compat.model_averaging.utils import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from laconic.compat.optim import PostLocalSGDOptimizer

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def hooks(ddp: DistributedDataParallel, untyped: Any, group: dist.ProcessGroup, zero: ZeroRedundancyOptimizer) -> None:
    stateless: list[Hook] = [
        allreduce_hook,
        noop_hook,
        fp16_compress_hook,
        bf16_compress_hook,
        quantization_pertensor_hook,
        fp16_compress_wrapper(allreduce_hook),
        bf16_compress_wrapper(allreduce_hook),
        as_hook(partial(quantization_perchannel_hook, bucket_size=128)),
        hook_with_zero_step(allreduce_hook, ddp, zero),
        hook_with_zero_step_interleaved(allreduce_hook, ddp, zero, shard_buckets=True),
    ]
    for hook in stateless:
        untyped.register_comm_hook(group, hook)  # the same DDP: torch has no types for it
    register_ddp_comm_hook(DDPCommHookType.POWER_SGD_RANK2, model=ddp, state=group)
    modules = [
        ddp_zero_hook,
        debugging,
        default,
        mixed_precision_hooks,
        optimizer_overlap,
        post_localSGD_hook,
        powerSGD,
        quantization,
    ]
    print(modules, ddp_comm_hooks.DDPCommHookType.NOOP, laconic.compat.ddp_comm_hooks.default.allreduce_hook)


def states(ddp: Any) -> dict[str, Any]:
    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10, use_error_feedback=True)
    ddp.register_comm_hook(state, powerSGD_hook)
    ddp.register_comm_hook(state, batched_powerSGD_hook)
    rate, before, after = state.compression_stats()
    residuals: list[Tensor] = [*state.error_dict.values(), *state.q_memory_dict.values(), *state.p_memory_dict.values()]
    print(rate, before, after, residuals)
    local = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    ddp.register_comm_hook(local, laconic.compat.ddp_comm_hooks.post_localSGD_hook.post_localSGD_hook)
    saved: dict[str, Any] = state.state_dict()
    state.load_state_dict(saved)
    return saved


def averagers(model: nn.Module, group: dist.ProcessGroup) -> ModelAverager:
    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), averager)
    loss: float | None = optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    several: list[ModelAverager] = [averager, HierarchicalModelAverager({2: 4, 8: 16}, warmup_steps=10, process_group=group)]
    for one in several:
        one.average_parameters(optimizer.param_groups)
    average_parameters(iter(model.parameters()), group)
    average_parameters_or_parameter_groups(optimizer.param_groups, group)
    modules = [
        model_averaging.averagers,
        model_averaging.hierarchical_model_averager,
        model_averaging.utils,
        laconic.compat.optim,
    ]
    print(loss, averager.step, get_params_to_average(model.parameters()), modules)
    return averager
