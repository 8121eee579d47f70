"""The examples in torch's documentation of these classes, with the prefix changed and gloo for nccl, to their end."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic.compat.ddp_comm_hooks.post_localSGD_hook as post_localSGD
import laconic.compat.model_averaging.averagers as averagers
import laconic.compat.model_averaging.hierarchical_model_averager as hierarchicalSGD  # noqa: N812
from laconic.compat.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from laconic.compat.ddp_comm_hooks import powerSGD_hook as powerSGD
from laconic.compat.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from laconic.compat.optim import PostLocalSGDOptimizer
from tests.live import ranks
from tests.models import everywhere_equal


def alone() -> Any:
    new_subgroups: Any = dist.new_subgroups
    return new_subgroups(1)[0]


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    return model(torch.full((2, 1), float(rank + step))).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: int, after: Any = None) -> list[bool]:
    equal = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step % 7).backward()
        optimizer.step()
        if after is not None:
            after()
        equal.append(everywhere_equal([parameter.detach() for parameter in model.parameters()]))
    return equal


def periodic(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    state = PostLocalSGDState(process_group=None, subgroup=alone(), start_localSGD_iter=100)
    model.register_comm_hook(state, post_localSGD.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=4, warmup_steps=100)
    equal = train(model, optimizer, rank, 200, lambda: averager.average_parameters(model.parameters()))
    assert equal == [step < 100 or step % 4 == 0 for step in range(200)]


def test_periodic_averaging() -> None:
    ranks(2, periodic)


def hierarchical(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    subgroup = alone()
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=100)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = hierarchicalSGD.HierarchicalModelAverager(
        period_group_size_dict=OrderedDict([(4, 2), (16, 4)]), warmup_steps=100
    )
    equal = train(model, optimizer, rank, 200, lambda: averager.average_parameters(model.parameters()))
    assert equal == [step < 100 or step % 16 == 0 for step in range(200)]


@pytest.mark.soak
def test_hierarchical_averaging() -> None:
    ranks(4, hierarchical)


def post_local(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    # On one node the default subgroup would be everybody, and replicas never drift: the example runs as it stands.
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    model.register_comm_hook(state, post_localSGD_hook)
    local_optim = torch.optim.SGD(params=model.parameters(), lr=0.001)
    optimizer = PostLocalSGDOptimizer(optim=local_optim, averager=averagers.PeriodicModelAverager(period=4, warmup_steps=100))
    assert all(train(model, optimizer, rank, 200))


def test_post_local_sgd_optimizer() -> None:
    ranks(2, post_local)


def by_name(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1))
    register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model, None)
    assert all(train(model, torch.optim.SGD(model.parameters(), lr=0.001), rank, 3))


def test_a_hook_by_name() -> None:
    ranks(2, by_name)


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc2(self.relu(self.fc1(x)))


def save_and_reload(rank: int, folder: str) -> None:
    ddp_model = DistributedDataParallel(Simple())
    hook = powerSGD.powerSGD_hook
    state = powerSGD.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=4)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    ddp_model.register_comm_hook(state, hook)
    for _ in range(10):
        optimizer.zero_grad()
        ddp_model(torch.randn(20, 24)).square().mean().backward()
        optimizer.step()
    # Each rank its own: each has its own error.
    checkpoint = Path(folder) / f"checkpoint.{rank}.pt"
    torch.save({"state": ddp_model.state_dict(), "comm_hook": hook, "comm_hook_state": state}, checkpoint)
    dist.barrier()
    loaded = torch.load(checkpoint)  # with its default, weights_only=True
    new_ddp_model = DistributedDataParallel(Simple())
    new_ddp_model.load_state_dict(loaded["state"])
    new_ddp_model.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
    optimizer = torch.optim.SGD(new_ddp_model.parameters(), lr=0.001)
    assert loaded["comm_hook_state"].iter == 10
    for _ in range(5):
        optimizer.zero_grad()
        new_ddp_model(torch.randn(20, 24)).square().mean().backward()
        optimizer.step()
    assert everywhere_equal([parameter.detach() for parameter in new_ddp_model.parameters()])


def test_powersgd_saved_and_reloaded(tmp_path: Path) -> None:
    ranks(2, save_and_reload, str(tmp_path))
