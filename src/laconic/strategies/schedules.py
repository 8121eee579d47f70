"""Schedules: at which steps something is due. Pure functions of the step and of numbers that all ranks agree on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self


class Schedule(ABC):
    """Says after which steps something is due, alike on every rank.

    Derive a frozen dataclass from it and write `due`. What else a strategy must know, the schedule says by these, each of which
    has a default:

    - `start`, a field: steps before the first in which it can be due. A recipe's `warmup` sets it; None: it has none.
    - `cycle`, a property: steps after which it does the same again, which `predict` works out. None: unknown.
    - `fixed_period`, a property: steps from each time to the next, where they are always as many, which fragments need.
    - `follows_rate`, a class attribute: whether `due` reads `rate`. Default False.
    - `never`, a class attribute: whether it is due at no step at all. Default False.

    >>> from dataclasses import dataclass
    >>> import laconic
    >>> @laconic.register
    ... @dataclass(frozen=True)
    ... class AtSteps(laconic.Schedule):
    ...     steps: tuple[int, ...]
    ...
    ...     def due(self, step, last=0, rate=None):
    ...         return step + 1 in self.steps
    >>> [step for step in range(10) if AtSteps((3, 7)).due(step)]
    [2, 6]
    """

    follows_rate: bool = False  # whether `due` reads `rate`: ranks then agree on it at each sync
    never: bool = False  # whether it is due at no step at all
    # Each is an int or None. As `Any`, type checkers let a schedule say it by a field, a property or a class attribute.
    start: Any = None  # steps before the first in which it can be due
    cycle: Any = None  # steps after which it does the same again; of one that follows the learning rate, the fewest
    fixed_period: Any = None  # steps from each time to the next, where they are always as many

    @abstractmethod
    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        """Is it due in the step that follows `step` completed ones?

        `last` is how many were completed when it was done last, `rate` the learning rate that all ranks agreed on then, or
        None. The answer must depend on these and on fields alone.
        """

    def starting(self, step: int) -> Self:
        """The same, with its first step after `step` others; a schedule with a field `start` has this by itself."""
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

    Arguments:
      `period`: steps from each time to the next, at least 1. Default 1.
      `start`: steps before the first period. Default 0.
      `phase`: steps into each period, from 0 to `period`; 0 is its end. Default 0.

    >>> from laconic import Every
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
        """The period."""
        return self.period


@dataclass(frozen=True)
class Until(Schedule):
    """Every step before step `stop`.

    Arguments:
      `stop`: how many steps it is due in.

    >>> from laconic.strategies.schedules import Until
    >>> [step for step in range(10) if Until(3).due(step)]
    [0, 1, 2]
    """

    stop: int

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step < self.stop

    @property
    def cycle(self) -> int:
        """1: once it is over, all steps are alike."""
        return 1


@dataclass(frozen=True)
class QSR(Schedule):
    """The quadratic synchronisation rule: the smaller the learning rate, the rarer.

    Let a warm-up of plain all-reduce cover that of the learning rate.

    Maths: H = max(base, floor((alpha / rate)^2)) steps after the last time, at the rate of then; base steps at first, when no
    rate has been agreed on yet. The rate is the first rank's, the largest of its parameter groups.

    Paper: Gu et al. 2023, arXiv:2310.14423.

    Not: with fragments or a `delay`, which need a fixed period.

    Arguments:
      `base`: the fewest steps from one time to the next, at least 1.
      `alpha`: in units of the learning rate, above 0; the period exceeds `base` once the rate is below alpha / sqrt(base).
      `start`: steps before the first period. Default 0.

    >>> from laconic import QSR
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
        """Steps until the next time, at this learning `rate`; None: not known yet."""
        if rate is None or rate <= 0:
            return self.base
        return max(self.base, int((self.alpha / rate) ** 2))

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return step >= self.start and step + 1 - max(last, self.start) >= self.period(rate)

    @property
    def cycle(self) -> int:
        """The base: `predict` does not know the learning rate."""
        return self.base


@dataclass(frozen=True)
class Never(Schedule):
    """At no step.

    >>> from laconic import Never
    >>> Never().due(7)
    False
    """

    never = True

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return False

    @property
    def cycle(self) -> int:
        """1: all steps are alike."""
        return 1


def _whole(number: object, name: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} must be a whole number of steps, got {number!r}")
