"""Steps are counted once, whoever makes them."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from laconic.run.clock import Clock


def test_optimizers_that_share_parameters_count_as_one() -> None:
    model = nn.Linear(2, 2)
    old, new = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)
    ticks: list[int] = []
    clock = Clock([old], None, lambda: ticks.append(clock.step))
    old.step()
    clock.add(new)
    new.step()
    new.step()
    assert ticks == [1, 2, 3]
    clock.stop()
    new.step()
    assert clock.step == 3


def test_optimizers_of_different_parameters_make_one_step_together() -> None:
    model = nn.Linear(2, 2)
    one, other = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    clock = Clock([one, other], None, lambda: None)
    one.step()
    assert (clock.step, clock.between) == (0, True)
    other.step()
    assert (clock.step, clock.between) == (1, False)


def test_a_clock_goes_on_in_the_middle_of_a_step() -> None:
    one, other = (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    clock = Clock([one, other], None, lambda: None)
    clock.set(7, [1, 0])
    assert (clock.ahead, clock.between) == ([1, 0], True)
    other.step()
    assert (clock.step, clock.between) == (8, False)
    one.step()
    clock.set(3, [0])
    assert (clock.step, clock.ahead) == (3, [1, 0]), "of another number of optimizers nothing is known"


class Wrapper:
    """As some optimizers around others are: no torch.optim.Optimizer itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_through_a_scaler_counts_once_also_by_a_wrapper(wrapped: bool) -> None:
    model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = Clock([inner], scaler, lambda: None)
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(Wrapper(inner) if wrapped else inner)  # type: ignore[arg-type]
        scaler.update()
    assert clock.step == 3


def test_one_scaler_may_serve_two_clocks() -> None:
    models, scaler = [nn.Linear(2, 2), nn.Linear(2, 2)], torch.amp.GradScaler("cpu")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second = (Clock([optimizer], scaler, lambda: None) for optimizer in optimizers)

    def step(*which: int, x: float = 1.0) -> None:
        for one in which:
            scaler.scale(models[one](torch.full((1, 2), x)).sum()).backward()
            scaler.step(optimizers[one])
            optimizers[one].zero_grad()
        scaler.update()

    step(0, 1)
    step(1)
    first.stop()
    step(0, 1, x=float("inf"))  # skipped, and counted
    assert (first.step, second.step) == (1, 3)
    second.stop()
    step(0, 1)
    assert (first.step, second.step, "step" in vars(scaler)) == (1, 3, False)


def test_an_optimizer_over_the_parameters_of_several_stands_for_all_of_them() -> None:
    one, other, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first, second, apart = SGD([one], lr=1.0), SGD([other], lr=1.0), SGD([third], lr=1.0)
    clock = Clock([first, second, apart], None, lambda: None)
    whole = SGD([one, other], lr=1.0)
    clock.add(whole)
    for _ in range(3):
        whole.step()
        apart.step()
    assert clock.step == 3, "the optimizers that it covers are waited for no more"
    second.step()  # the old one again
    apart.step()
    assert clock.step == 4
    newest = SGD([other], lr=1.0)
    clock.add(newest)
    newest.step()
    assert clock.ahead == [1, 0], "it is one more of those"
    apart.step()
    assert clock.step == 5


def test_an_optimizer_over_some_parameters_of_another_does_not_stand_for_it() -> None:
    one, other, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first, second = SGD([one], lr=1.0), SGD([other, third], lr=1.0)
    clock = Clock([first, second], None, lambda: None)
    some = SGD([one, other], lr=1.0)
    clock.add(some)
    some.step()
    assert (clock.step, clock.ahead) == (0, [1, 0]), "nobody has stepped the third"
    second.step()
    assert clock.step == 1


class Telling(SGD):
    """Fails, or tells how it went."""

    fails = False

    def step(self, closure: object = None) -> float:  # type: ignore[override]
        if self.fails:
            raise ArithmeticError("not this time")
        return 0.5


def test_what_a_step_through_a_scaler_returns_or_raises_is_the_optimizers() -> None:
    parameter, scaler = nn.Parameter(torch.zeros(2)), torch.amp.GradScaler("cpu")
    optimizer = Telling([parameter], lr=0.1)
    clock = Clock([optimizer], scaler, lambda: None)
    scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    assert scaler.step(optimizer) == 0.5
    scaler.update()
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        scaler.step(optimizer)
    assert clock.step == 1, "no step was made"
    optimizer.fails = False
    optimizer.step()
    assert clock.step == 2, "without the scaler, it is counted again"
