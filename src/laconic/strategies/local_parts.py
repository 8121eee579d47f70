"""What recipes of local updates are made of: when to sync, what is averaged then, and which gradients are averaged besides."""

from collections.abc import Mapping

from laconic.comm.scopes import Scope
from laconic.reducers.base import Reducer, checked, checked_steps
from laconic.reducers.error_feedback import ErrorFeedback, Release
from laconic.reducers.exact import Exact
from laconic.reducers.warmup import Warmup
from laconic.strategies import routes
from laconic.strategies.outer import Adopt, Nesterov, Outer
from laconic.strategies.recipe import speaking_for
from laconic.strategies.schedules import Every, Schedule
from laconic.strategies.strategy import MOMENTS, Averaging, Deltas, Strategy, render

Moments = str | Mapping[str, int]


def schedule_of(period: int | Schedule, warmup: int) -> Schedule:
    """When to sync. A strategy has one warm-up: the `warmup` that is given, or the start of a schedule."""
    checked_steps(warmup, "warmup")
    if not isinstance(period, Schedule):
        return Every(period, warmup)
    if period.never:
        raise ValueError(f"period is never due, got {render(period)}; to average replicas at the end alone use silent()")
    if warmup and period.start not in (None, 0, warmup):
        raise ValueError(f"period starts after {period.start} steps and warmup is {warmup}: give one of the two")
    return period.starting(warmup or period.start or 0)


def strategy_of(
    schedule: Schedule,
    averaging: Averaging,
    warmup_reducer: Reducer,
    second_moment: str,
    subgroup: Scope | None = None,
    refresh: int = 0,
) -> Strategy:
    """Gradients of every step by `warmup_reducer` until the schedule starts; then those of a subgroup, or of refreshes."""
    start, before = schedule.start or 0, checked(warmup_reducer, "warmup_reducer")
    route, after = routes.at_first(start, subgroup), Exact() if subgroup else before
    if refresh:
        route = routes.Route((*route.legs, (Every(refresh, start, phase=1), "world")))
        # What was left out of a gradient so many steps ago is of no use any more; what the warm-up left out goes into the first
        # refresh, which follows it at once.
        after = Release(before.inner) if isinstance(before, ErrorFeedback) else before
    reducer = before if before == after else Warmup(start, after, before)
    return Strategy(reducer, route, averaging, second_moment)


def moments_of(moments: Moments) -> str | tuple[tuple[str, int], ...]:
    """The word, or periods by name."""
    if isinstance(moments, str):
        return moments
    if not isinstance(moments, Mapping):  # from a text, it may be anything
        raise TypeError(f"moments must be one of {', '.join(MOMENTS)}, or periods by name, {{'exp_avg': 48}}, got {moments!r}")
    for key, period in moments.items():
        with speaking_for(f"moments[{key!r}]"):
            Every(period)  # says what is wrong with it
        if not isinstance(key, str):
            raise TypeError(f"moments are named by the optimizer's own keys, such as 'exp_avg', got {key!r}")
    return tuple(sorted(moments.items()))


def averaging_of(
    schedule: Schedule,
    reducer: Reducer,
    buffers: str,
    moments: Moments,
    outer: Outer | None = None,
    fragments: int = 1,
    order: str = "strided",
    delay: int = 0,
    blend: float = 0.0,
    carry: bool = False,
    offload: bool = False,
    outlier: float | None = None,
    atomic: bool = True,
) -> Averaging:
    """Parameters themselves where nothing is lost on the way, deltas from an anchor where something is."""
    checked(reducer, "reducer")
    plain = outer is None and isinstance(reducer, Exact)
    if outer is None:
        outer = Adopt()
    deltas = None if plain else Deltas(outer, reducer, fragments, order, delay, blend, carry, offload, outlier)
    return Averaging(routes.world(schedule), deltas, buffers, moments_of(moments), atomic)


def chosen_outer(outer: Outer | None, made: Outer, default: Outer, names: str) -> Outer:
    """The outer optimizer that was given, or the one made of numbers."""
    if outer is None:
        return made
    if made != default:
        raise ValueError(f"outer takes the place of {names}: give one or the other")
    return outer


def outer_of(lr: float, momentum: float) -> Outer:
    """The outer optimizer of these numbers, which recipes call outer_lr and outer_momentum."""
    with speaking_for("", lr="outer_lr", momentum="outer_momentum"):
        return Nesterov(lr, momentum) if momentum else Adopt(lr)
