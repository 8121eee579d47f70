"""Routes: when to talk, and with whom."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from laconic.schedules import Every, Never, Schedule

Scope: TypeAlias = Literal["world"]
"""Which ranks: all that train this model together."""


@dataclass(frozen=True)
class Route:
    """An ordered list of (schedule, scope); the first that is due wins, and where none is, the step is local.

    >>> world().at(0), silent().at(0)
    ('world', None)
    """

    legs: tuple[tuple[Schedule, Scope], ...]

    def at(self, step: int) -> Scope | None:
        """With whom to talk in the step that follows `step` completed ones."""
        return next((scope for schedule, scope in self.legs if schedule.due(step)), None)

    @property
    def talks(self) -> bool:
        """Whether any step is ever due."""
        return any(not isinstance(schedule, Never) for schedule, _ in self.legs)


def world() -> Route:
    """Everybody, at every step."""
    return Route(((Every(1), "world"),))


def silent() -> Route:
    """Nobody, ever."""
    return Route(((Never(), "world"),))
