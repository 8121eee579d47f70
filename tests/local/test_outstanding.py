"""Outstanding fragments: every value at every step, against formulas on numbers; checkpoints meanwhile; overlap's order."""

import copy
import io
import itertools
import random
import time

import pytest
import torch
from torch import nn

import laconic
from tests.live import ranks
from tests.models import difference, everything, everywhere_equal, same_bits, weights


class Two(nn.Module):
    """Two layers of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.first.weight.data.fill_(1.0)
        self.second.weight.data.fill_(-2.0)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        pull = torch.tensor(0.5 * (rank + 1) + 0.1 * step)
        return ((self.first.weight - pull) ** 2 + 2 * (self.second.weight + pull) ** 2).sum()


class Model:
    """Streaming DiLoCo of one number, by its formulas: plain SGD inside, Nesterov outside."""

    def __init__(self, start: float, curvature: float, sign: float, ending: int, delay: int, blend: float, carry: bool) -> None:
        self.locals, self.anchor, self.m = [start, start], start, 0.0
        self.curvature, self.sign, self.ending = curvature, sign, ending
        self.delay, self.blend, self.carry = delay, blend, carry
        self.outstanding: tuple[int, list[float]] | None = None  # when it left, and where the replicas were

    def step(self, done: int) -> None:
        """`done` steps have been made before."""
        pulls = [0.5 * (rank + 1) + 0.1 * done for rank in range(2)]
        self.locals = [x - 0.05 * 2 * self.curvature * (x - self.sign * p) for x, p in zip(self.locals, pulls, strict=True)]
        now = done + 1
        if self.outstanding is not None and now == self.outstanding[0] + self.delay:
            self.complete()
        if (now - self.ending + self.delay) % 6 == 0:
            self.outstanding = now, self.locals
            if self.delay == 0:
                self.complete()

    def complete(self) -> None:
        assert self.outstanding is not None
        left = self.outstanding[1]
        delta = sum(self.anchor - x for x in left) / 2
        self.m = 0.6 * self.m + delta
        self.anchor -= 0.7 * (delta + 0.6 * self.m)
        there = [self.anchor + self.carry * (x - was) for x, was in zip(self.locals, left, strict=True)]
        self.locals = [self.blend * x + (1 - self.blend) * y for x, y in zip(self.locals, there, strict=True)]
        self.outstanding = None


def streams(rank: int, delay: int, blend: float, carry: bool) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = [Model(1.0, 1, 1, 3, delay, blend, carry), Model(-2.0, 2, -1, 6, delay, blend, carry)]
    text = f"streaming_diloco(6, fragments=2, delay={delay}, blend={blend}, carry={carry}, reducer=Exact())"
    with laconic.attach(model, optimizer, text) as run:
        for step in range(26):
            torch.autograd.backward(model.loss(rank, step))
            optimizer.step()
            optimizer.zero_grad()
            for number, layer in zip(numbers, (model.first, model.second), strict=True):
                number.step(step)
                assert layer.weight.item() == pytest.approx(number.locals[rank], rel=1e-5), (step, delay, blend)
        with run.consensus("anchor"):
            assert model.first.weight.item() == pytest.approx(numbers[0].anchor, rel=1e-5)
            assert run.stats().background_bytes == 0
    assert everywhere_equal(weights(model))


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize(("delay", "blend"), list(itertools.product([0, 1, 4], [0.0, 0.5, 1.0])))
def test_every_value_at_every_step(delay: int, blend: float, carry: bool) -> None:
    ranks(2, streams, delay, blend, carry)


def same_data_everywhere(rank: int, carry: bool) -> list[float]:
    """A streamed run on the same batches on all ranks, through an outer optimizer that adopts the mean."""
    model, alone = Two(), Two()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, alone)]
    carries = f"streaming_diloco(6, fragments=2, delay=4, blend=0.0, carry={carry}"
    with laconic.attach(model, optimizers[0], f"{carries}, outer_lr=1.0, outer_momentum=0.0, reducer=Exact())"):
        for step in range(20):
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                torch.autograd.backward(one.loss(0, step))
                optimizer.step()
                optimizer.zero_grad()
    return [abs(a.item() - b.item()) for a, b in zip(model.parameters(), alone.parameters(), strict=True)]


def test_with_carry_nothing_learnt_in_the_air_is_lost() -> None:
    """Then the delay can't be seen where all replicas learn the same: the run is that of one process alone."""
    assert max(ranks(2, same_data_everywhere, True)[0]) < 1e-5
    assert max(ranks(2, same_data_everywhere, False)[0]) > 1e-3


def deep() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(24, 24) for _ in range(6)])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, which: range) -> None:
    for step in which:
        batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


REDUCERS = ["Exact()", "ErrorFeedback(Quantized(4))", "ErrorFeedback(PowerSGD(2))"]


def resumes(rank: int, reducer: str, cut: int) -> None:
    text = f"streaming_diloco(6, fragments=3, delay=4, carry=True, reducer={reducer})"
    model = deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with laconic.attach(model, optimizer, text) as run:
        steps(model, optimizer, rank, range(cut))
        kept = io.BytesIO()
        torch.save([run.state_dict(), model.state_dict(), optimizer.state_dict()], kept)
        steps(model, optimizer, rank, range(cut, 20))
        wanted = everything(model, [optimizer], run)
    kept.seek(0)
    states = torch.load(kept)  # weights_only, as is its default
    other = deep()
    other.load_state_dict(states[1])
    again = torch.optim.Adam(other.parameters(), lr=0.01)
    again.load_state_dict(copy.deepcopy(states[2]))
    with laconic.attach(other, again, text) as run:
        other.load_state_dict(states[1])
        run.load_state_dict(states[0])
        steps(other, again, rank, range(cut, 20))
        unlike = difference(everything(other, [again], run), wanted)
        assert unlike is None, unlike
    assert same_bits(weights(model), weights(other))


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("cut", [9, 11])
def test_a_checkpoint_in_mid_air_resumes_to_the_same_bits(reducer: str, cut: int) -> None:
    ranks(2, resumes, reducer, cut)


def sleepy(rank: int, reducer: str) -> None:
    draw = random.Random(rank)
    model = deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    text = f"streaming_diloco(6, fragments=6, delay=5, order='bytes', blend=0.25, reducer={reducer})"
    with laconic.attach(model, optimizer, text):
        for step in range(60):
            time.sleep(draw.random() * 0.01)
            steps(model, optimizer, rank, range(step, step + 1))
    assert everywhere_equal(weights(model))


@pytest.mark.parametrize("reducer", REDUCERS)
def test_several_fragments_in_the_air_and_ranks_that_take_their_time(reducer: str) -> None:
    ranks(3, sleepy, reducer)


def poisoned(rank: int, delay: int) -> None:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with laconic.attach(model, optimizer, f"streaming_diloco(4, fragments=1, blend=0.0, delay={delay})"):
        steps(model, optimizer, rank, range(5))
        with torch.no_grad():
            if rank == 1:
                model[2].weight[1, 1] = float("nan")  # type: ignore[index]
        with pytest.warns(UserWarning, match="not finite"):
            steps(model, optimizer, rank, range(5, 8 + delay))
        assert all(tensor.isfinite().all() for tensor in weights(model))
        steps(model, optimizer, rank, range(8 + delay, 17))
    assert all(tensor.isfinite().all() for tensor in weights(model))
    assert everywhere_equal(weights(model))


@pytest.mark.parametrize("delay", [0, 2])
def test_a_replica_that_is_not_finite_goes_back_to_the_anchor(delay: int) -> None:
    ranks(2, poisoned, delay)
