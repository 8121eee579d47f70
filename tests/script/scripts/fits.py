"""Trains one module in several fits, by DDPs one after another and by two in turns, and several modules at once."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

Around = Callable[[DDP, Optimizer], AbstractContextManager[Any]]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model: DDP, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def three_fits(around: Around) -> list[nn.Module]:
    """A new DDP each time; the second fit goes on with the first one's optimizer."""
    net = build(1)
    optimizer: Optimizer = AdamW(net.parameters(), lr=2e-3)
    for fit, steps in enumerate((26, 17, 19)):
        if fit == 2:
            optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
        ddp = DDP(net)
        with around(ddp, optimizer):
            train(ddp, optimizer, steps)
    return [net]


def two_ddps_in_turns(around: Around) -> list[nn.Module]:
    """Both are there from the start, over one module."""
    net = build(2)
    ddps = [DDP(net), DDP(net)]
    optimizers = [AdamW(net.parameters(), lr=2e-3), SGD(net.parameters(), lr=0.05)]
    for turn, steps in enumerate((18, 10, 17)):
        with around(ddps[turn % 2], optimizers[turn % 2]):
            train(ddps[turn % 2], optimizers[turn % 2], steps)
    return [net]


def two_modules(around: Around) -> list[nn.Module]:
    """Trained in turns, each by a DDP and an optimizer of its own."""
    nets = [build(3), build(4)]
    pairs = [(DDP(net), AdamW(net.parameters(), lr=2e-3)) for net in nets]
    with ExitStack() as stack:
        for ddp, optimizer in pairs:
            stack.enter_context(around(ddp, optimizer))
        for _ in range(9):
            for steps, (ddp, optimizer) in enumerate(pairs, start=2):
                train(ddp, optimizer, steps)
    return nets


def one_within_another(around: Around) -> list[nn.Module]:
    """The second module comes in the middle of the first one's training."""
    nets = [build(5), build(6)]
    first, optimizer = DDP(nets[0]), AdamW(nets[0].parameters(), lr=2e-3)
    with around(first, optimizer):
        train(first, optimizer, 14)
        second, another = DDP(nets[1]), SGD(nets[1].parameters(), lr=0.05)
        with around(second, another):
            train(second, another, 18)
        train(first, optimizer, 12)
    return nets


def everything(around: Around) -> list[nn.Module]:
    scenes = (three_fits, two_ddps_in_turns, two_modules, one_within_another)
    return [net for scene in scenes for net in scene(around)]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nets = everything(lambda ddp, optimizer: nullcontext())
    dist.destroy_process_group()
    torch.save([net.state_dict() for net in nets], Path(sys.argv[1], f"final-{rank}.pt"))
