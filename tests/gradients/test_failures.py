"""A backward that fails half-way: clock, memory and model stay those of the last completed step."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllReduce
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import Reducer
from tests.live import ranks
from tests.models import build, chain, difference, same_bits, vectors, weights


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Faulty(torch.autograd.Function):
    """Fails in backward when told to."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if Faulty.broken:
            raise ArithmeticError("in the middle of backward")
        return gradients[0]


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = chain(6), nn.Sequential(*[nn.Linear(3, 3) for _ in range(60)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(Faulty.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


def failing(rank: int, text: str) -> None:
    def fit(fault_at: int | None) -> list[Tensor]:
        model = build(Fragile)
        optimizer = sgd(model)
        run = laconic.attach(model, optimizer, text)
        for step in range(8):
            if step == fault_at:
                saved = copy.deepcopy(run.state_dict())
                Faulty.broken = True
                with pytest.raises(ArithmeticError):
                    model(vectors(rank, step)).square().mean().backward()
                Faulty.broken = False
                assert difference(run.state_dict(), saved) is None, "clock and memory are those of the last completed step"
                with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                    model(vectors(rank, step))
                layout = run.layout()
                run.detach()
                optimizer.zero_grad()
                model = DistributedDataParallel(model.module, bucket_cap_mb=0.001)
                run = laconic.attach(model, optimizer, text)
                run.load_state_dict(saved)
                assert len(layout) >= 6
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.stats().steps == 8
        run.detach()
        return weights(model)

    assert same_bits(fit(None), fit(4))


@pytest.mark.parametrize("text", ["ddp()", "bf16(warmup=2)"])
def test_an_exception_in_the_middle_of_backward_leaves_no_trace(text: str) -> None:
    ranks(2, failing, text)


@dataclass(frozen=True)
class Counting(Reducer):
    """Takes so many rounds, and counts exchanges in its memory."""

    rounds: int = 1

    def reduce(self, bucket: Bucket) -> Exchange:
        mean = yield AllReduce(bucket.flat)
        for _ in range(self.rounds - 1):
            yield AllReduce(torch.zeros(3))

        def finish() -> None:
            for slot in bucket.slots:
                slot["count"] = slot.get("count", torch.zeros(())) + 1

        return Reduced(mean, None, finish)


def memory_after_failure(rank: int, reducer: Reducer) -> None:
    model = build(Fragile)
    optimizer = sgd(model)
    run = laconic.attach(model, optimizer, laconic.ddp(reducer=reducer))
    for step in range(4):
        Faulty.broken = step == 3
        try:
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except ArithmeticError:
            assert step == 3
    Faulty.broken = False
    memory = run.state_dict()["memory"]
    assert len(memory) == len(list(model.parameters()))
    assert all(slot["count"] == 3 for slot in memory.values())
    run.detach()


@pytest.mark.parametrize(
    "reducer",
    [
        Counting(1),
        Counting(3),
        laconic.Warmup(3, Counting(1), before=Counting(2)),
        laconic.Warmup(3, Counting(3), before=Counting(1)),
    ],
    ids=str,
)
def test_memory_is_that_of_the_last_completed_step(reducer: Reducer) -> None:
    ranks(2, memory_after_failure, reducer)
