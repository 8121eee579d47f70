"""Schedules: at which steps something is due. Pure functions of the step and of numbers that all ranks agree on."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Schedule(ABC):
    """Answers one question, alike on every rank."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Is it due in the step that follows `step` completed ones?"""


@dataclass(frozen=True)
class Every(Schedule):
    """The last of every `period` steps, from step `start` on.

    >>> [step for step in range(10) if Every(3, start=2).due(step)]
    [4, 7]
    """

    period: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period must be at least 1, got {self.period}; for never, use Never()")
        if self.start < 0:
            raise ValueError(f"start must be 0 or more steps, got {self.start}")

    def due(self, step: int) -> bool:
        return step >= self.start and (step - self.start + 1) % self.period == 0


@dataclass(frozen=True)
class Never(Schedule):
    """At no step.

    >>> Never().due(7)
    False
    """

    def due(self, step: int) -> bool:
        return False
