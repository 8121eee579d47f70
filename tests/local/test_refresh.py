"""Steps in a local phase whose gradients all ranks average."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.live import ranks

REFRESHED = "local_adam(2, warmup=0, refresh=4, reducer=Exact(), warmup_reducer=Exact())"


def scaled(rank: int) -> list[float]:
    """Each rank's gradient of ones, times its rank + 1; the loss scales differ, as after an overflow on one rank alone."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (rank + 1), growth_interval=100)
    seen = []
    with laconic.attach(model, optimizer, REFRESHED, scaler=scaler):
        for _ in range(6):
            scaler.scale(model(torch.full((1, 3), rank + 1.0)).sum()).backward()
            scaler.unscale_(optimizer)
            assert model.module.weight.grad is not None
            seen.append(model.module.weight.grad[0, 0].item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return seen


def test_gradients_are_averaged_without_the_ranks_own_loss_scales() -> None:
    first, second = ranks(2, scaled)
    # The first step follows no local one, so that all scales are alike there, as a rule; here they are not.
    assert first[1:] == [1.0, 1.0, 1.0, 1.5, 1.0], "the fifth step is a refresh, the others are local"
    assert second[1:] == [2.0, 2.0, 2.0, 1.5, 2.0]


def buffered(rank: int) -> tuple[list[float], int]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=1.0)))
    optimizer = torch.optim.Adam(model.parameters())
    means = []
    with laconic.attach(model, optimizer, f"{REFRESHED[:-1]}, buffers='local')") as run:
        for step in range(6):
            model(torch.full((2, 2), rank + 1.0) * torch.tensor([[1.0], [2.0]]) * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert isinstance(model.module[1].running_mean, torch.Tensor)
            means.append(model.module[1].running_mean[0].item())
        exchanges = run.stats().exchanges
    dist.barrier()
    return means, exchanges


def test_a_refresh_broadcasts_no_buffers() -> None:
    (first, exchanges), (second, _) = ranks(2, buffered)
    assert exchanges == 2, "the first step and the fifth"
    assert all(a != b for a, b in zip(first[1:], second[1:], strict=True)), "each rank keeps what it saw"
