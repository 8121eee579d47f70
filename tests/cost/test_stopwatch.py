"""The parts of a step, timed in a loop that sleeps."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.cost.stopwatch import Stopwatch


class Slow(torch.autograd.Function):
    """Its backward takes a while."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        time.sleep(0.02)
        return grads[0]


def loop(forward: float, between: float, steps: int, accumulate: int = 1) -> Stopwatch:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow: Callable[[Tensor], Tensor] = Slow.apply
    with Stopwatch(model, optimizer) as watch:
        for _ in range(steps):
            time.sleep(between)
            for _ in range(accumulate):
                time.sleep(forward)
                loss: Any = slow(model(torch.ones(1, 2))).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model(torch.ones(1, 2))
    optimizer.step()
    return watch


def test_forward_backward_and_what_lies_between_steps() -> None:
    watch = loop(forward=0.01, between=0.01, steps=3)
    assert len(watch.rows) == 3, "the step after the block is not one"
    found = watch.compute()
    assert found.forward >= 0.02, "the loader and the forward"
    assert found.backward >= 0.02
    assert found.seconds == pytest.approx(sum(row.seconds for row in watch.rows) / 3)


def test_of_accumulated_gradients_the_last_backward_is_the_one_in_which_buckets_travel() -> None:
    found = loop(forward=0.0, between=0.0, steps=2, accumulate=3).compute()
    assert found.forward >= 0.04, "two backwards that send nothing"
    assert found.backward >= 0.02, "and one that does"


def test_without_a_step_there_is_nothing_to_tell() -> None:
    with pytest.raises(ValueError, match="no step was made"):
        loop(forward=0.0, between=0.0, steps=0).compute()
