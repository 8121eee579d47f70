"""Post-local SGD's hook: torch's and ours."""

import io
import logging
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.compat.libraries import averaged, both, but_torch, close, linear, listening, mean, module, noise
from tests.live import ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights

PATH = "ddp_comm_hooks.post_localSGD_hook"
SHAPES = ((20, 10), (7,), (300,))


def pairs(rank: int) -> dist.ProcessGroup:
    groups: list[dist.ProcessGroup] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


def hooked(library: str, subgroup: Any, start: int, **options: Any) -> tuple[Any, DistributedDataParallel]:
    local = module(library, PATH)
    state = local.PostLocalSGDState(None, subgroup, start, **options)
    model = linear(*SHAPES)
    model.register_comm_hook(state, local.post_localSGD_hook)
    return state, model


def phases(rank: int, library: str, gradients_too: bool) -> None:
    state, model = hooked(library, pairs(rank), 3, post_local_gradient_allreduce=gradients_too)
    for step in range(6):
        found = averaged(model, noise(10 * step + rank, *SHAPES))
        mine = [0, 1, 2, 3] if step < 3 else [rank // 2 * 2, rank // 2 * 2 + 1] if gradients_too else [rank]
        wanted = mean(lambda place, step=step, mine=mine: noise(10 * step + mine[place], *SHAPES), len(mine))  # type: ignore[misc]
        assert close(found, wanted), f"step {step}"
        if library == "laconic":
            assert state.iter == step + 1
    assert state.iter >= 3


@pytest.mark.parametrize("gradients_too", [True, False])
@both
def test_all_ranks_first_then_the_subgroup(library: str, gradients_too: bool) -> None:
    ranks(4, phases, library, gradients_too)


def side_by_side(rank: int, world: int, exact: bool) -> None:
    final = []
    subgroup = pairs(rank) if world == 4 else dist.new_group([0, 1, 2])
    for library in ("torch", "laconic"):
        local = module(library, PATH)
        model = build(chain, bucket_cap_mb=25)
        model.register_comm_hook(local.PostLocalSGDState(None, subgroup, 4), local.post_localSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(10):
            model(vectors(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        final.append(weights(model))
    assert same_bits(*final) if exact else close(final[0], final[1], 1e-5)


@pytest.mark.parametrize(("world", "exact"), [(4, True), (3, False)])
def test_as_torch(world: int, exact: bool) -> None:
    ranks(world, side_by_side, world, exact)


def by_node(rank: int, library: str) -> None:
    os.environ["GROUP_RANK"] = str(rank // 2)  # as torchrun would have it on two nodes
    try:
        state, model = hooked(library, None, 2)
        for step in range(4):
            found = averaged(model, noise(10 * step + rank, *SHAPES))
        assert dist.get_process_group_ranks(state.subgroup) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert close(found, mean(lambda place: noise(30 + rank // 2 * 2 + place, *SHAPES), 2))
    finally:
        del os.environ["GROUP_RANK"]


@but_torch("asks CUDA for the number of devices")
def test_the_default_subgroup_is_the_node(library: str) -> None:
    ranks(4, by_node, library)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def with_buffers(rank: int, library: str) -> None:
    """In the local phase, each rank's running mean is its own."""
    local = module(library, PATH)
    model = DistributedDataParallel(Normed())
    model.register_comm_hook(local.PostLocalSGDState(None, dist.group.WORLD, 3), local.post_localSGD_hook)
    running: Any = model.module.norm.running_mean
    for step in range(8):
        before = running.clone()
        batch = torch.full((8, 4), float(rank)) + torch.arange(8.0)[:, None]
        model(batch).square().sum().backward()
        if step >= 3:
            assert torch.allclose(running, 0.9 * before + 0.1 * batch.mean(0)), f"step {step}"
        model.zero_grad()


def with_buffers_of_its_own(rank: int, library: str) -> None:
    """A DDP that was told not to broadcast buffers never does, in the warm-up neither."""
    local = module(library, PATH)
    model = DistributedDataParallel(Normed(), broadcast_buffers=False)
    model.register_comm_hook(local.PostLocalSGDState(None, dist.group.WORLD, 3), local.post_localSGD_hook)
    for _ in range(3):
        model(torch.full((8, 4), float(rank))).square().sum().backward()
    assert torch.allclose(model.module.norm.running_mean, rank * torch.full((4,), 1 - 0.9**3))


@both
def test_buffers_that_ddp_leaves_alone(library: str) -> None:
    ranks(2, with_buffers_of_its_own, library)


@but_torch("DDP goes on broadcasting rank 0's")
def test_buffers_stay_local(library: str) -> None:
    ranks(2, with_buffers, library)


def accumulated(rank: int, library: str) -> None:
    """Three backwards a step without `no_sync`, a warm-up of two steps."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    state, model = hooked(library, alone, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for micro in range(3):
            model(*noise(10 * (step + micro) + rank, *SHAPES)).backward()
            found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert everywhere_equal(found) == (step < 2), "all three are of one phase"
        assert state.iter == step + 1
        optimizer.step()
        optimizer.zero_grad()


@but_torch("counts backwards, and only until the switch")
def test_the_warm_up_counts_optimizer_steps(library: str) -> None:
    ranks(2, accumulated, library)


def logged(rank: int, library: str) -> list[str]:
    local = module(library, PATH)
    with listening(local.logger, logging.INFO) as lines:
        model = build(chain)
        model.register_comm_hook(local.PostLocalSGDState(None, dist.group.WORLD, 3), local.post_localSGD_hook)
        for step in range(6):
            model(vectors(rank, step)).sum().backward()
            model.zero_grad()
    return [line for line in lines if "ocal SGD" in line]


@both
def test_the_log_says_it_at_the_start_and_at_the_switch(library: str) -> None:
    (lines,) = ranks(1, logged, library)
    assert len(lines) == 2
    assert all("after 3 iterations" in line for line in lines)


def saved(rank: int, library: str) -> None:
    state, model = hooked(library, pairs(rank), 2)
    for step in range(3):
        averaged(model, noise(step, *SHAPES))
    local = module(library, PATH)
    file = io.BytesIO()
    torch.save({"state": state, "hook": local.post_localSGD_hook}, file)
    file.seek(0)
    again = torch.load(file)["state"]
    for loaded in (again, pickle.loads(pickle.dumps(state))):
        assert (loaded.iter, loaded.start_localSGD_iter, loaded.post_local_gradient_allreduce) == (3, 2, True)
        assert loaded.process_group is dist.group.WORLD
        assert loaded.subgroup is None
    again.subgroup = state.subgroup
    model = linear(*SHAPES)
    model.register_comm_hook(again, local.post_localSGD_hook)
    found = averaged(model, noise(rank, *SHAPES))
    assert close(found, mean(lambda place: noise(rank // 2 * 2 + place, *SHAPES), 2)), "no warm-up again"


@but_torch("a process group can't be pickled")
def test_a_state_can_be_saved(library: str) -> None:
    ranks(4, saved, library)


def trained(rank: int) -> None:
    """Hook and averager together: replicas drift within a period and are equal after it."""
    local, averagers = module("laconic", PATH), module("laconic", "model_averaging.averagers")
    model = build(chain)
    model.register_comm_hook(local.PostLocalSGDState(None, pairs(rank), 4), local.post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averager = averagers.PeriodicModelAverager(period=3, warmup_steps=4)
    equal = []
    for step in range(12):
        model(vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.average_parameters(model.parameters())
        equal.append(everywhere_equal(list(model.parameters())))
    assert equal == [step < 4 or (step - 4) % 3 == 0 for step in range(12)]


def test_with_an_averager() -> None:
    ranks(4, trained)
