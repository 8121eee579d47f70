"""Hooks by name, and things that are no functions."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compat.libraries import averaged, both, but_torch, close, linear, mean, module, noise
from tests.live import ranks
from tests.models import everywhere_equal

SHAPES = ((40, 30), (7,))
WORK_IN_TORCH = ["ALLREDUCE", "FP16_COMPRESS", "POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2"]
OURS_ALONE = ["BF16_COMPRESS", "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"]


def by_name(rank: int, library: str, name: str) -> None:
    hooks = module(library, "ddp_comm_hooks")
    for by_value in (False, True):
        model = linear(*SHAPES)
        if by_value:
            hooks.DDPCommHookType[name].value(model=model, state=dist.group.WORLD)
        else:
            hooks.register_ddp_comm_hook(hooks.DDPCommHookType[name], model)
        found = averaged(model, noise(rank, *SHAPES))
        assert close(found, mean(lambda rank: noise(rank, *SHAPES), 2), 0.05)
        assert everywhere_equal(found)


@pytest.mark.parametrize("name", WORK_IN_TORCH)
@both
def test_each_name_registers_its_hook(library: str, name: str) -> None:
    ranks(2, by_name, library, name)


@pytest.mark.parametrize("name", OURS_ALONE)
@but_torch("needs NCCL")
def test_names_that_need_nccl_in_torch(library: str, name: str) -> None:
    ranks(2, by_name, library, name)


class Given:
    """What is registered with it."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook


@pytest.mark.parametrize("name", [*WORK_IN_TORCH, *OURS_ALONE, "NOOP"])
def test_a_name_stands_for_the_hook_and_the_rank_that_it_has_in_torch(name: str) -> None:
    found: list[Any] = [Given(), Given()]
    for library, given in zip(("torch", "laconic"), found, strict=True):
        module(library, "ddp_comm_hooks").DDPCommHookType[name].value(model=given, state="a group")
    theirs, ours = found
    assert ours.hook.__qualname__ == theirs.hook.__qualname__
    assert "a group" in (ours.state, getattr(ours.state, "process_group", None))
    for setting in ("matrix_approximation_rank", "start_powerSGD_iter", "process_group"):
        assert getattr(ours.state, setting, None) == getattr(theirs.state, setting, None)


def in_pairs(rank: int) -> None:
    """The group that is given as the state, and not the DDP's, is averaged over."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    hooks, group, world = module("laconic", "ddp_comm_hooks"), groups[rank // 2], 2 - rank // 2
    wanted = mean(lambda place: noise(rank // 2 * 2 + place, *SHAPES), world)
    for name in ("ALLREDUCE", "FP16_COMPRESS", "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"):
        model = linear(*SHAPES)
        hooks.register_ddp_comm_hook(hooks.DDPCommHookType[name], model, state=group)
        assert close(averaged(model, noise(rank, *SHAPES)), wanted, 0.05), name
    model = linear(*SHAPES)
    state = hooks.powerSGD.PowerSGDState(group, 30, 2, min_compression_rate=0.1)
    model.register_comm_hook(state, hooks.powerSGD.powerSGD_hook)
    for _ in range(4):
        assert close(averaged(model, noise(rank, *SHAPES)), wanted, 1e-4), "also when it compresses"


def test_the_state_is_the_group_to_average_over() -> None:
    ranks(3, in_pairs)


def silent(rank: int, library: str) -> None:
    hooks = module(library, "ddp_comm_hooks")
    model = linear(*SHAPES)
    hooks.register_ddp_comm_hook(hooks.DDPCommHookType.NOOP, model)
    assert close(averaged(model, noise(rank, *SHAPES)), noise(rank, *SHAPES))


@both
def test_noop_averages_nothing(library: str) -> None:
    ranks(2, silent, library)


def test_an_unknown_type_is_refused() -> None:
    hooks = module("laconic", "ddp_comm_hooks")
    with pytest.raises(TypeError, match=r"such as DDPCommHookType.POWER_SGD, got 'power_sg'"):
        hooks.register_ddp_comm_hook("power_sg", None)


class Doubling:
    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        default: Any = module("laconic", "ddp_comm_hooks.default_hooks")
        future: torch.futures.Future[Tensor] = default.allreduce_hook(None, bucket)
        return future.then(lambda done: 2 * done.value())


def odd_hooks(rank: int) -> None:
    hooks = module("laconic", "ddp_comm_hooks")
    wanted = mean(lambda rank: noise(rank, *SHAPES), 2)
    per_channel = partial(hooks.quantization.quantization_perchannel_hook, bucket_size=64)
    for hook, factor, tolerance in [
        (per_channel, 1, 0.05),
        (Doubling(), 2, 1e-6),
        (lambda state, b: hooks.default.allreduce_hook(state, b), 1, 1e-6),
    ]:
        model = linear(*SHAPES)
        model.register_comm_hook(None, hooks.as_hook(hook))
        assert close(averaged(model, noise(rank, *SHAPES)), [factor * each for each in wanted], tolerance)
    with pytest.raises(TypeError, match=r"callable with \(state, bucket\), got 'fp16'"):
        hooks.as_hook("fp16")


def test_as_hook() -> None:
    ranks(2, odd_hooks)
