"""Schedules: at which steps something is due. Pure functions of the step and of numbers that all ranks agree on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Self


class Schedule(ABC):
    """Answers one question, alike on every rank: a frozen dataclass with a method `due`.

    What else a strategy must know of it, the schedule says itself: its `start`, its `cycle`, its `fixed_period`, whether it is
    ever due, and whether it follows the learning rate.
    """

    follows_rate = False  # whether `due` reads `rate`: ranks then agree on it at each sync
    never = False  # whether it is due at no step at all

    @abstractmethod
    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        """Is it due in the step that follows `step` completed ones?

        `last` is how many were completed when it was done last, `rate` the learning rate that all ranks agreed on then.
        """

    if TYPE_CHECKING:
        # At run time these are class attributes, so that a dataclass may have fields of these names.

        @property
        def start(self) -> int | None:
            """Steps before the first in which it can be due; None: it has no start of its own."""

        @property
        def cycle(self) -> int | None:
            """Steps after which it does the same again; of one that follows the learning rate, the fewest. None: unknown."""

        @property
        def fixed_period(self) -> int | None:
            """Steps from each time to the next, where they are always as many: fragments need it. None: they are not."""
    else:
        start = cycle = fixed_period = None

    def starting(self, step: int) -> Self:
        """The same, with another start; a schedule with a field `start` has this by itself."""
        if is_dataclass(self) and "start" in {field.name for field in fields(self)}:
            return replace(self, start=step)
        if step == 0:
            return self
        raise ValueError(
            f"{type(self).__name__} can't begin after a warm-up of {step} steps: it has no field start; give it one"
        )


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

    @property
    def fixed_period(self) -> int:
        return self.period


@dataclass(frozen=True)
class Until(Schedule):
    """Every step before step `stop`.

    >>> [step for step in range(10) if Until(3).due(step)]
    [0, 1, 2]
    """

    stop: int

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step < self.stop

    @property
    def cycle(self) -> int:
        return 1  # once it is over


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
    follows_rate = True

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

    @property
    def cycle(self) -> int:
        return self.base


@dataclass(frozen=True)
class Never(Schedule):
    """At no step.

    >>> Never().due(7)
    False
    """

    never = True

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return False

    @property
    def cycle(self) -> int:
        return 1


def _whole(number: object, name: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} must be a whole number of steps, got {number!r}")
