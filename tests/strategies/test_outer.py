"""Outer optimizers and what becomes of the inner ones' memory, on numbers."""

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.comm.ledger import Ledger
from laconic.local.moments import Moments


def go(outer: laconic.Outer, deltas: list[float], rates: list[list[float]]) -> list[list[float]]:
    """Where two anchors, each in a group of its own, are after each delta; they begin at 0."""
    anchors = [torch.zeros(1), torch.zeros(1)]
    optimizer = outer.build([{"params": [anchor], "rate": 1.0} for anchor in anchors])
    found = []
    for delta, now in zip(deltas, rates, strict=True):
        for anchor, group, rate in zip(anchors, optimizer.param_groups, now, strict=True):
            anchor.grad, group["rate"] = torch.tensor([delta]), rate
        optimizer.step()
        found.append([anchor.item() for anchor in anchors])
    return found


def test_adopting_goes_so_much_of_the_way() -> None:
    assert go(laconic.Adopt(0.25), [4.0, 8.0], [[1.0, 1.0]] * 2) == [[-1, -1], [-3, -3]]


def test_slow_momentum_has_a_rate_for_each_group() -> None:
    rates, deltas = [[0.5, 0.25], [0.25, 0.5], [0.125, 0.5]], [1.0, 2.0, 4.0]
    for place in range(2):
        x, u = 0.0, 0.0
        for now, delta, after in zip(rates, deltas, go(laconic.SlowMo(0.5, 0.75), deltas, rates), strict=True):
            u = 0.5 * u + delta / now[place]
            x -= 0.75 * now[place] * u
            assert after[place] == pytest.approx(x)


def test_slow_momentum_survives_a_rate_of_zero() -> None:
    """A warm-up of the learning rate begins there, and a decay ends there."""
    found = go(laconic.SlowMo(0.5, 1.0), [1.0, 1.0, 1.0], [[0.0, 0.5], [0.5, 0.0], [0.5, 0.5]])
    assert found == [[-1, -1], [-2.5, -2], [-4.25, -3.5]]


def remembered(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, bool]]:
    """Of each parameter, whether there is anything but zeros under each key."""
    return [
        {key: bool(value.any()) for key, value in state.items() if isinstance(value, Tensor)}
        for optimizer in optimizers
        for state in optimizer.state.values()
    ]


@pytest.mark.parametrize(
    ("policy", "momentum", "others"), [("keep", True, True), ("auto", False, True), ("reset", False, False)]
)
def test_which_memory_starts_again_at_a_sync(policy: str, momentum: bool, others: bool) -> None:
    ours, theirs = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)  # one model's, and another one's
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD([*ours.parameters(), *theirs.parameters()], lr=0.1, momentum=0.9),
        torch.optim.Adam(ours.parameters(), lr=0.1),
    ]
    for parameter in (ours.weight, theirs.weight):
        parameter.grad = torch.ones(2, 2)
    for optimizer in optimizers:
        optimizer.step()
    moments = Moments(optimizers, {"weight": ours.weight}, Ledger(), Ledger(), torch.device("cpu"))
    moments.treat(policy, None)  # type: ignore[arg-type]  # nobody is asked
    adam = {"step": others, "exp_avg": others, "exp_avg_sq": others}
    assert remembered(optimizers) == [{"momentum_buffer": momentum}, {"momentum_buffer": True}, adam]
