"""The timer of steps: which part is which, and what is taken off."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from laconic.comm.collectives import Traffic
from laconic.comm.dryrun import Round
from laconic.cost import step_timer
from laconic.cost.link import Link
from laconic.cost.network import Network
from laconic.cost.step_time import Compute, Exchange, Step, step_time
from laconic.cost.step_timer import SKIPPED, StepTimer, without_communication


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test winds: its last number is the time."""
    times = [0.0]
    monkeypatch.setattr(step_timer, "now", lambda: times[-1])
    return times


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, clock: list[float], start: float) -> None:
    """Forward until 2, backward until 7, optimizer until 8, in seconds after `start`."""
    clock.append(start + 2)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    clock.append(start + 7)
    optimizer.step()
    clock.append(start + 8)


def test_the_three_parts_of_a_step(clock: list[float]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer(model, [optimizer])
    for step in range(SKIPPED + 3):
        one_step(model, optimizer, clock, 10.0 * step)
        with torch.no_grad():
            clock.append(10.0 * step + 8)
            model(torch.ones(1, 2))  # an evaluation is no forward of training
        timer.tick(waited=1.5)
        assert timer.timed == max(0, step + 1 - SKIPPED)
    # Each step begins at the tick before it: 2 seconds before its own start.
    assert timer.compute() == Compute(forward=4.0, backward=3.5, optimizer=1.0, jitter=0.0)
    clock.append(1000.0)
    one_step(model, optimizer, clock, 1000.0)
    timer.tick()
    assert timer.compute() == Compute(forward=4.0, backward=3.5, optimizer=1.0), "a pause is no step"
    timer.stop()
    assert not model._forward_hooks


def test_a_closure_hides_the_parts_and_the_whole_is_known(clock: list[float]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer(model, [optimizer])

    def closure() -> Any:
        clock.append(clock[-1] + 5)
        loss: Any = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    for _ in range(SKIPPED + 1):
        optimizer.step(closure)
        clock.append(clock[-1] + 1)
        timer.tick()
    assert timer.compute() == Compute.of(6.0)


def test_a_step_that_waited_for_all_of_its_backward_keeps_some_of_it(clock: list[float]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer(model, [optimizer])
    for step in range(SKIPPED + 1):
        one_step(model, optimizer, clock, 10.0 * step)
        timer.tick(waited=100.0)
    found = timer.compute()
    assert found is not None
    assert found.backward == pytest.approx(0.5)


def test_nothing_timed_is_nothing_known_and_a_copied_model_takes_nothing_along() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer(model, [optimizer])
    timer.tick()
    assert timer.compute() is None
    assert len(pickle.dumps(copy.deepcopy(model))) < 3000, "neither the optimizer nor the timer"


def sent(seconds_on_cable: float, network: Network) -> Step:
    """One exchange of all numbers, in backward."""
    rate = network.bytes_per_second
    assert rate is not None
    wire = int(seconds_on_cable * rate)
    return Step([Exchange([Round("AllReduce", Traffic(wire, wire, 1), 4)], [0.01, 0.02], 100)])


@pytest.mark.parametrize("waits_known", [True, False])
def test_compute_is_found_again_from_what_a_step_of_ddp_took(waits_known: bool) -> None:
    network = Network(Link(8_000_000), framing={})
    steps, compute = [sent(0.5, network)], Compute(0.2, 0.4, 0.1)
    time = step_time(steps, compute, network)
    assert time.waiting > 0.3
    under = time.work if waits_known else time.work + time.waiting
    measured = Compute(compute.forward, compute.backward + under, compute.optimizer)
    found = without_communication(measured, steps, network, waits_known=waits_known)
    assert (found.forward, found.optimizer) == (0.2, 0.1)
    assert found.backward == pytest.approx(0.4, rel=1e-6)


def test_steps_that_differ_have_a_jitter_and_waits_a_median(clock: list[float]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = StepTimer(model, [optimizer])
    start = 0.0
    for number, length in enumerate([9.0] * (SKIPPED + 1) + [11.0, 9.0, 11.0]):
        start += length
        one_step(model, optimizer, clock, start)
        timer.tick(waited=0.1 * number)
    found = timer.compute()
    assert found is not None
    assert (found.seconds + 0.1 * (SKIPPED + 1.5), found.jitter) == pytest.approx((10.0, 1.0), abs=0.2)
    assert timer.waited == pytest.approx(0.1 * (SKIPPED + 1.5))
