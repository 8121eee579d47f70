"""The gradient hook over a group of our own, without processes."""

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from laconic import wire
from laconic.hook import GradientHook
from laconic.reducers.exact import Exact
from laconic.wire import Collective, Ledger


class Stuck:
    """A collective whose peers never come; it tells how long it was waited for."""

    waits: list[float] = []  # noqa: RUF012  (one test's)

    def wait(self) -> Tensor:
        raise AssertionError("nobody may wait for it without a limit")

    def future(self) -> Future[Tensor]:
        raise AssertionError("nobody asks for it")

    def settle(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False


class Alone:
    rank, world = 0, 2

    def launch(self, collective: Collective) -> Stuck:
        return Stuck()


class Filled:
    """As much of DDP's bucket as the hook reads."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False

    def buffer(self) -> Tensor:
        return torch.ones(2)

    def parameters(self) -> list[Tensor]:
        return [self._parameter]

    def gradients(self) -> list[Tensor]:
        return [torch.ones(2)]


def test_how_long_a_failed_backward_is_waited_for_is_set_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.25)
    parameter = torch.ones(2)
    hook = GradientHook(Exact(), Alone(), {id(parameter): "weight"}, {"weight": {}}, Ledger())
    hook.arrive(Filled(parameter))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="a peer never launched its part"):
        hook.settle()
    assert Stuck.waits == [pytest.approx(0.25, abs=0.1)]
