"""The agenda: what a strategy averages between steps, and when. The run and `predict` both go by it."""

from collections.abc import Sequence

from laconic.comm.scopes import Scope
from laconic.strategies.schedules import Every, Schedule
from laconic.strategies.strategy import Averaging


class Agenda:
    """What is due after which step, by a strategy's `Averaging`.

    `last` and `rate` are of the last sync: how many steps were complete then, and the learning rate that ranks agreed on.
    """

    def __init__(self, averaging: Averaging, last: int = 0, rate: float | None = None) -> None:
        self.last, self.rate = last, rate
        self._averaging = averaging
        self._departures = _departures(averaging)

    def scope(self, step: int) -> Scope | None:
        """With whom parameters are averaged after `step` completed steps; None: not now, or deltas are sent instead."""
        averaging = self._averaging
        if averaging.deltas is not None or step <= averaging.start:
            return None
        return averaging.route.at(step - 1, self.last, self.rate)

    def departures(self, step: int) -> list[int]:
        """Which fragments' deltas leave after `step` completed steps, by number."""
        if step <= self._averaging.start:
            return []
        due = [schedule.due(step - 1, self.last, self.rate) for schedule in self._departures]
        return [fragment for fragment, leaves in enumerate(due) if leaves]

    @property
    def last_fragment(self) -> int:
        """The one that a sync is over with: the period ends when it is complete."""
        return len(self._departures) - 1

    def moments(self, step: int) -> list[str]:
        """Which of the optimizers' moments are averaged after `step` completed steps, each at a period of its own."""
        periods = self._averaging.moments if isinstance(self._averaging.moments, tuple) else ()
        return [key for key, period in periods if Every(period, self._averaging.start).due(step - 1)]

    def synced(self, step: int, rate: float | None) -> None:
        """A sync was made after `step` completed steps."""
        self.last, self.rate = step, rate


def _departures(averaging: Averaging) -> Sequence[Schedule]:
    """When each fragment leaves. Fragment f of F is complete (f + 1) / F into the period, and leaves `delay` steps before."""
    deltas, fixed = averaging.deltas, averaging.fixed
    if deltas is None:
        return []
    if deltas.fragments == 1 and deltas.delay == 0:
        return averaging.route.schedules[:1]
    assert fixed is not None, "a strategy with fragments or a delay was checked to have a fixed period"
    period = fixed.fixed_period
    assert period is not None
    ends = [(number + 1) * period // deltas.fragments for number in range(deltas.fragments)]
    return [Every(period, fixed.start or 0, (end - deltas.delay) % period) for end in ends]
