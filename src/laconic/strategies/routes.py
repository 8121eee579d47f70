"""Routes: when to communicate, and with whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from laconic.comm.scopes import Scope
from laconic.reducers.base import checked_frozen
from laconic.strategies.schedules import Every, Never, Schedule, Until


@dataclass(frozen=True)
class Route:
    """When to communicate, and with whom: the first of its legs that is due wins; where none is, the step is local.

    Arguments:
      `legs`: pairs of a schedule and a scope, in order. A scope is "world", all ranks that hold this model, or the same shard
        of it; "node", those of them on this host; a number, blocks of so many neighbouring ranks; or the name of a dimension
        of the mesh given to `attach`.

    >>> import laconic
    >>> route = laconic.Route(((laconic.Every(4), "world"), (laconic.Every(1), "node")))
    >>> [route.at(step) for step in range(4)]
    ['node', 'node', 'node', 'world']
    """

    legs: tuple[tuple[Schedule, Scope], ...]

    def __post_init__(self) -> None:
        for leg in self.legs if isinstance(self.legs, tuple | list) else [self.legs]:  # type: ignore[redundant-expr]  # a text's
            match leg:
                case (Schedule() as schedule, str() | int()):
                    _check_schedule(schedule)
                    continue
            raise TypeError(f"legs must be pairs such as (Every(16), 'world'), got {leg!r}")

    def at(self, step: int, last: int = 0, rate: float | None = None) -> Scope | None:
        """With whom to communicate in the step that follows `step` completed ones, or None: nobody.

        `last` and `rate` are as in `Schedule.due`.
        """
        return next((scope for schedule, scope in self.legs if schedule.due(step, last, rate)), None)

    @property
    def communicates(self) -> bool:
        """Whether any step is ever due."""
        return bool(self.schedules)

    @property
    def scopes(self) -> set[Scope]:
        """All that it ever communicates with."""
        return {scope for schedule, scope in self.legs if not schedule.never}

    @property
    def schedules(self) -> list[Schedule]:
        """Those that are ever due."""
        return [schedule for schedule, _ in self.legs if not schedule.never]


def _check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule of the user's own that says something that can't be."""
    name = type(schedule).__name__
    checked_frozen(schedule)
    for word, least in (("start", 0), ("cycle", 1), ("fixed_period", 1)):
        value = getattr(schedule, word)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{name}.{word} must be a whole number of steps, {least} or more, got {value!r}")


def world(schedule: Schedule | None = None) -> Route:
    """Everybody, at every step or by a schedule."""
    return Route(((schedule or Every(1), "world"),))


def node(schedule: Schedule | None = None) -> Route:
    """The ranks on this host, at every step or by a schedule."""
    return Route(((schedule or Every(1), "node"),))


def silent() -> Route:
    """Nobody, ever."""
    return Route(((Never(), "world"),))


def at_first(steps: int, then: Scope | None = None) -> Route:
    """Everybody for so many steps, and from then on a part of them, or nobody.

    >>> [at_first(2, "node").at(step) for step in range(4)]
    ['world', 'world', 'node', 'node']
    """
    legs: list[tuple[Schedule, Scope]] = []
    if steps:
        legs.append((Until(steps), "world"))
    if then is not None:
        legs.append((Every(1, start=steps), then))
    return Route(tuple(legs)) if legs else silent()


def hierarchy(sizes: Mapping[int, Scope], start: int = 0) -> Route:
    """With whom every so many steps: {period: scope}; where several periods are due, the longest alone.

    >>> [hierarchy({2: 2, 4: 8}).at(step) for step in range(4)]
    [None, 2, None, 8]
    """
    if not isinstance(sizes, Mapping) or not sizes:  # type: ignore[redundant-expr]  # from a text, it may be anything
        raise ValueError(f"a hierarchy needs {{period: group size}}, such as {{4: 2, 16: 8}}, got {sizes!r}")
    for period, size in sizes.items():
        if isinstance(size, int) and size < 1:
            raise ValueError(f"a group must have at least 1 rank, got {size} for period {period}")
    ordered = sorted(sizes.items())
    for (short, small), (long, large) in pairwise(ordered):
        if isinstance(small, int) and isinstance(large, int) and large <= small:
            raise ValueError(f"longer periods need larger groups, got {small} ranks every {short} steps, {large} every {long}")
    return Route(tuple((Every(period, start), size) for period, size in reversed(ordered)))
