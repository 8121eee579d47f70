"""Schedules: at which steps something is due. Pure functions of the step and of numbers that all ranks agree on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Schedule(ABC):
    """Answers one question, alike on every rank."""

    @abstractmethod
    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        """Is it due in the step that follows `step` completed ones?

        `last` is how many were completed when it was done last, `rate` the learning rate that all ranks agreed on then.
        """


@dataclass(frozen=True)
class Every(Schedule):
    """The last of every `period` steps from step `start` on; with a `phase`, so many steps into each period instead.

    >>> [step for step in range(10) if Every(3, start=2).due(step)]
    [4, 7]
    >>> [step for step in range(10) if Every(3, start=2, phase=1).due(step)]
    [2, 5, 8]
    """

    period: int = 1
    start: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        _whole(self.period, "period")
        _whole(self.start, "start")
        if self.period < 1:
            raise ValueError(f"period must be at least 1, got {self.period}; to average gradients at every step use ddp()")
        if self.start < 0:
            raise ValueError(f"start must be 0 or more steps, got {self.start}")
        if not 0 <= self.phase <= self.period:
            raise ValueError(f"phase must be within the period of {self.period} steps, got {self.phase}")

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step >= self.start and (step + 1 - self.start - self.phase) % self.period == 0


@dataclass(frozen=True)
class Until(Schedule):
    """Every step before step `stop`.

    >>> [step for step in range(10) if Until(3).due(step)]
    [0, 1, 2]
    """

    stop: int

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step < self.stop


@dataclass(frozen=True)
class QSR(Schedule):
    """The quadratic synchronisation rule: the smaller the learning rate, the rarer.

    Maths: H = max(base, floor((alpha / rate)^2)) steps after the last time, at the rate of then; base steps at first, when
    no rate has been agreed on yet. Let a warm-up of plain all-reduce cover that of the learning rate.
    Paper: Gu et al. 2023, arXiv:2310.14423.

    >>> QSR(base=4, alpha=0.02).period(0.01), QSR(base=4, alpha=0.02).period(0.004)
    (4, 25)
    """

    base: int
    alpha: float
    start: int = 0

    def __post_init__(self) -> None:
        _whole(self.base, "base")
        if self.base < 1:
            raise ValueError(f"base must be at least 1 step, got {self.base}")
        _whole(self.start, "start")
        if not isinstance(self.alpha, int | float) or not self.alpha > 0:  # type: ignore[redundant-expr]  # a text
            raise ValueError(f"alpha must be above 0, of the size of a learning rate, got {self.alpha}")

    def period(self, rate: float | None) -> int:
        """Steps until the next time, at this learning rate."""
        if rate is None or rate <= 0:
            return self.base
        return max(self.base, int((self.alpha / rate) ** 2))

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step >= self.start and step + 1 - max(last, self.start) >= self.period(rate)


@dataclass(frozen=True)
class Never(Schedule):
    """At no step.

    >>> Never().due(7)
    False
    """

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return False


def _whole(number: object, name: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} must be a whole number of steps, got {number!r}")
