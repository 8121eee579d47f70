"""Recipes of local updates: replicas step on their own, and are averaged seldom.

What they have in common: until `warmup` steps are over, the gradients of every step are averaged by `warmup_reducer`; then
Adam's second moment is treated as `second_moment` says (`Strategy` has the words).
"""

from collections.abc import Mapping
from types import MappingProxyType

from laconic.comm.scopes import AUTO, Scope
from laconic.reducers.base import Reducer, checked, checked_steps
from laconic.reducers.error_feedback import ErrorFeedback, Release
from laconic.reducers.exact import Exact
from laconic.reducers.quantized import Quantized
from laconic.reducers.ternary import Ternary
from laconic.reducers.topk import TopK
from laconic.reducers.warmup import Warmup
from laconic.strategies import routes
from laconic.strategies.outer import Adopt, Nesterov, Outer, SlowMo
from laconic.strategies.recipe import recipe, speaking_for
from laconic.strategies.schedules import Every, Schedule
from laconic.strategies.strategy import MOMENTS, Averaging, Deltas, Strategy, render

Moments = str | Mapping[str, int]


def _schedule(period: int | Schedule, warmup: int) -> Schedule:
    """When to sync. A strategy has one warm-up: the `warmup` that is given, or the start of a schedule."""
    checked_steps(warmup, "warmup")
    if not isinstance(period, Schedule):
        return Every(period, warmup)
    if period.never:
        raise ValueError(f"period is never due, got {render(period)}; to average replicas at the end alone use silent()")
    if warmup and period.start not in (None, 0, warmup):
        raise ValueError(f"period starts after {period.start} steps and warmup is {warmup}: give one of the two")
    return period.starting(warmup or period.start or 0)


def _local(
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


def _moments(moments: Moments) -> str | tuple[tuple[str, int], ...]:
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


def _averaging(
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
    return Averaging(routes.world(schedule), deltas, buffers, _moments(moments), atomic)


@recipe
def local_sgd(
    period: int | Schedule = 16,
    *,
    warmup: int = 0,
    reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "keep",
    atomic: bool = True,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """Every replica for itself; parameters averaged every `period` steps, after `warmup` steps of plain all-reduce.

    `period` may be any schedule, such as QSR(...), which follows the learning rate. With a lossy `reducer`, differences to the
    last average are sent. `moments={"exp_avg": 48, "exp_avg_sq": 96}` averages Adam's memory at periods of its own (DES-LOC,
    arXiv:2505.22549). With `atomic`, a worker that is lost on the way leaves every parameter as it was, and the averaging
    takes memory of the model's size; without, a few MiB, and some parameters are averaged then and others not.
    Bytes: 2(N-1)/N * 4n / period a step.  Paper: Stich 2018, arXiv:1805.09767.
    """
    schedule = _schedule(period, warmup)
    averaging = _averaging(schedule, reducer, buffers, moments, atomic=atomic)
    return _local(schedule, averaging, warmup_reducer, second_moment)


@recipe
def post_local_sgd(
    warmup: int = 100,
    period: int | Schedule = 16,
    *,
    subgroup: str | None = None,
    reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "keep",
    atomic: bool = True,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """Plain all-reduce for `warmup` steps; then gradients within the subgroup, and parameters averaged every `period`.

    `subgroup`: "node", the ranks on one host; "none"; the name of a dimension of the mesh given to `attach`; by default the
    node if there are several, else none. `atomic` is as in local_sgd.
    Bytes: 2(N-1)/N * 4n a step at first, then that / period over all, and the subgroup's own between.
    Paper: Lin et al. 2018, arXiv:1808.07217.
    """
    if subgroup is not None and not isinstance(subgroup, str):
        raise TypeError(f"subgroup must be 'node', 'none' or a dimension's name, got {subgroup!r}")
    schedule = _schedule(period, warmup)
    averaging = _averaging(schedule, reducer, buffers, moments, atomic=atomic)
    scope = {None: AUTO, "none": None}.get(subgroup, subgroup)
    return _local(schedule, averaging, warmup_reducer, second_moment, scope)


@recipe
def hierarchical_sgd(
    periods: Mapping[int, int | str] = MappingProxyType({4: "node", 16: "world"}),
    *,
    warmup: int = 0,
    reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "keep",
    atomic: bool = True,
) -> Strategy:
    """Parameters averaged within nodes, or blocks of neighbouring ranks: {period: ranks in a block}, the last holding all.

    `atomic` is as in local_sgd.
    Bytes: 2(g-1)/g * 4n for a block of g; where several periods are due, the longest alone.
    Paper: Wang et al. 2020, arXiv:2010.12998.
    """
    if not isinstance(reducer, Exact):
        raise ValueError(
            f"hierarchical_sgd averages parameters exactly: blocks have no anchor in common from which {render(reducer)} "
            "could send differences; use local_sgd or diloco for that"
        )
    checked_steps(warmup, "warmup")
    averaging = Averaging(routes.hierarchy(periods, warmup), None, buffers, _moments(moments), atomic)
    return Strategy(Exact(), routes.at_first(warmup), averaging)


@recipe
def slowmo(
    period: int | Schedule = 12,
    *,
    beta: float = 0.5,
    alpha: float = 1.0,
    outer: Outer | None = None,
    warmup: int = 0,
    reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "auto",
    offload: bool = False,
    outlier: float | None = None,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """Averaging with a slow momentum over it, in units of the learning rate.

    The momentum of an inner SGD starts at zero after each sync, as in the paper, and Adam's memory is kept. `outer` is another
    outer optimizer instead of beta and alpha.
    Bytes: 2(N-1)/N * 4n / period a step.  Memory: 2n.  Paper: Wang et al. 2019, arXiv:1910.00643.
    """
    chosen = _either(outer, SlowMo(beta, alpha), SlowMo(), "beta and alpha")
    schedule = _schedule(period, warmup)
    averaging = _averaging(schedule, reducer, buffers, moments, chosen, offload=offload, outlier=outlier)
    return _local(schedule, averaging, warmup_reducer, second_moment)


@recipe
def diloco(
    period: int | Schedule = 32,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    outer: Outer | None = None,
    warmup: int = 0,
    reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "keep",
    offload: bool = False,
    outlier: float | None = None,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """Local steps, and an outer Nesterov step on the mean of how far replicas came.

    The paper's outer_momentum of 0.9 takes a steady delta seven times: right for long runs from a warm model, too much for
    some hundred steps from scratch. Hence 0.6 here; for long runs try 0.9 with a `warmup`. `outer` is any other outer optimizer
    instead, such as OuterOptimizer(torch.optim.Adam, {"lr": 0.1}).
    Bytes: 2(N-1)/N * 4n / period a step, or the reducer's / period.  Memory: 2n.
    Paper: Douillard et al. 2023, arXiv:2311.08105.
    """
    chosen = _either(outer, _outer(outer_lr, outer_momentum), _outer(0.7, 0.6), "outer_lr and outer_momentum")
    schedule = _schedule(period, warmup)
    averaging = _averaging(schedule, reducer, buffers, moments, chosen, offload=offload, outlier=outlier)
    return _local(schedule, averaging, warmup_reducer, second_moment)


@recipe
def streaming_diloco(
    period: int | Schedule = 32,
    *,
    fragments: int = 4,
    delay: int = 4,
    blend: float = 0.5,
    carry: bool = False,
    order: str = "strided",
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    outer: Outer | None = None,
    warmup: int = 0,
    reducer: Reducer = Quantized(8),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "keep",
    offload: bool = False,
    outlier: float | None = None,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """DiLoCo in fragments that travel while training goes on: one is complete every period / fragments steps.

    An exchange stays outstanding for `delay` steps; then a fragment is `blend` of the local parameters and the rest global
    ones. With `carry`, the global ones get on top what this replica learnt while the exchange was outstanding, which else is
    lost to them. `outer` is any other outer optimizer instead of outer_lr and outer_momentum.
    Bytes: as diloco's, by the reducer; a fragment at a time.  Memory: 2n, and the fragments that are outstanding.
    Paper: Douillard et al. 2025, arXiv:2501.18512.
    """
    if isinstance(period, Schedule) and period.fixed_period is None:
        raise TypeError(
            "period must be a whole number of steps, or a schedule with a fixed_period, as fragments need their places in it; "
            f"got {period!r}"
        )
    chosen = _either(outer, _outer(outer_lr, outer_momentum), _outer(0.7, 0.6), "outer_lr and outer_momentum")
    schedule = _schedule(period, warmup)
    averaging = _averaging(schedule, reducer, buffers, moments, chosen, fragments, order, delay, blend, carry, offload, outlier)
    return _local(schedule, averaging, warmup_reducer, second_moment)


@recipe
def local_adam(
    period: int | Schedule = 4,
    *,
    warmup: int = 100,
    refresh: int = 64,
    reducer: Reducer = ErrorFeedback(Ternary()),  # noqa: B008  (a frozen value)
    second_moment: str = "shared",
    warmup_reducer: Reducer = ErrorFeedback(Quantized(4)),  # noqa: B008  (a frozen value)
    delay: int = 0,
    outer: Outer = Adopt(),  # noqa: B008  (a frozen value)
    buffers: str = "average",
    moments: Moments = "keep",
    offload: bool = False,
    outlier: float | None = None,
) -> Strategy:
    """Local steps for Adam: apart for few steps, deltas in 1.6 bits with error feedback, one second moment for all.

    Coarse deltas of a short period cost less loss than fine ones of a long period. Every `refresh` steps, gradients are
    averaged once, in 4 bits as in the warm-up, and Adam's second moment follows them most: a replica's own gradients are
    noisier than their mean, and would make its steps too short. A model that was trained before, with its optimizer's state,
    needs no warm-up. With `delay`, an exchange stays outstanding for so many steps, and what a replica learns meanwhile is
    carried on top. refresh=0 never averages gradients after the warm-up; a bare module, without a DDP, needs that and warmup=0.
    Bytes: 2(N-1)/N * n * (0.216 / period + 0.531 / refresh) a step, 1/64 of ddp's as given.  Memory: 2n.
    Paper: none has just this. Error feedback: Karimireddy et al. 2019, arXiv:1901.09847. A second moment that rests in
    local steps: Lu et al. 2022, arXiv:2202.06009 (0/1 Adam).
    """
    schedule = _schedule(period, warmup)
    checked_steps(refresh, "refresh")
    averaging = _averaging(
        schedule, reducer, buffers, moments, outer, delay=delay, carry=delay > 0, offload=offload, outlier=outlier
    )
    return _local(schedule, averaging, warmup_reducer, second_moment, refresh=refresh)


@recipe
def sparseloco(
    period: int | Schedule = 30,
    *,
    ratio: float = 1 / 64,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    outer: Outer | None = None,
    warmup: int = 0,
    buffers: str = "average",
    moments: Moments = "keep",
    offload: bool = False,
    outlier: float | None = None,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """DiLoCo that sends the largest entries of the deltas; error feedback takes the place of the outer momentum.

    `outer` is any other outer optimizer instead of outer_lr.
    As in the paper, entries are picked by chunks of at most 4096 and sent in 14 bits: 12 of index, 2 of value. They travel
    in two phases, where the paper gathers them, so that bytes don't grow with the world.
    Bytes: 2(N-1)/N * (14/8 * ratio + 4/4096) * n / period a step.  Memory: 2n.  Paper: Sarfi et al. 2025, arXiv:2508.15706.
    """
    reducer = ErrorFeedback(TopK(ratio, values="2bit"), decay)
    chosen = _either(outer, _outer(outer_lr, 0.0), Adopt(), "outer_lr")
    schedule = _schedule(period, warmup)
    averaging = _averaging(schedule, reducer, buffers, moments, chosen, offload=offload, outlier=outlier)
    return _local(schedule, averaging, warmup_reducer, second_moment)


def _either(outer: Outer | None, made: Outer, default: Outer, names: str) -> Outer:
    """The outer optimizer that was given, or the one made of numbers."""
    if outer is None:
        return made
    if made != default:
        raise ValueError(f"outer takes the place of {names}: give one or the other")
    return outer


def _outer(lr: float, momentum: float) -> Outer:
    with speaking_for("", lr="outer_lr", momentum="outer_momentum"):
        return Nesterov(lr, momentum) if momentum else Adopt(lr)
