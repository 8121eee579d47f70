"""Recipes of local updates: replicas step on their own, and are averaged seldom.

What they have in common: until `warmup` steps are over, the gradients of every step are averaged by `warmup_reducer`; then
Adam's second moment is treated as `second_moment` says (`Strategy` has the words).
"""

from collections.abc import Mapping
from types import MappingProxyType

from laconic.comm.scopes import AUTO
from laconic.reducers.base import Reducer, checked_steps
from laconic.reducers.error_feedback import ErrorFeedback
from laconic.reducers.exact import Exact
from laconic.reducers.quantized import Quantized
from laconic.reducers.ternary import Ternary
from laconic.strategies import routes
from laconic.strategies.local_parts import Moments, averaging_of, moments_of, schedule_of, strategy_of
from laconic.strategies.outer import Adopt, Outer
from laconic.strategies.recipe import recipe
from laconic.strategies.schedules import Schedule
from laconic.strategies.strategy import Averaging, Strategy, render


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
    """Every replica for itself; parameters averaged every `period` steps.

    With a lossy `reducer`, differences to the last average are sent instead. Adam's memory can be averaged at periods of its
    own, as in DES-LOC (Iacob et al. 2025, arXiv:2505.22549).

    Bytes: 2(N-1)/N * 4n / period a step (N ranks, n numbers in fp32).

    Memory: n numbers during an averaging; with `atomic=False` a few MiB; with a lossy reducer n always, and the reducer's.

    Paper: Stich 2018, arXiv:1805.09767.

    Arguments:
      `period`: steps from one averaging to the next, or a schedule, such as QSR(4, 0.02). Default 16.
      `warmup`: steps at first in which gradients are averaged instead; this takes a DDP or a sharded model. Default 0.
      `reducer`: how parameters are averaged. Default Exact().
      `buffers`: "average" (of counters, the largest), "local" (left alone), or "broadcast" (the first rank's).
        Default "average".
      `moments`: the optimizer's memory at an averaging: "keep", "average", "reset", "auto" (SGD's momentum is reset, all else
        kept), or each key's period in steps, such as {"exp_avg": 48, "exp_avg_sq": 96}. Default "keep".
      `atomic`: a worker that is lost on the way leaves every parameter as it was; False: some are averaged then, others not.
        Default True.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Exact().
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # 2(N-1)/N * 4n / 16
    >>> laconic.predict(laconic.local_sgd(16), layer, world_size=4).wire_bytes_per_step
    375000.0
    >>> str(laconic.local_sgd(laconic.QSR(4, 0.02), warmup=100))
    'local_sgd(period=QSR(base=4, alpha=0.02), warmup=100)'
    """
    schedule = schedule_of(period, warmup)
    averaging = averaging_of(schedule, reducer, buffers, moments, atomic=atomic)
    return strategy_of(schedule, averaging, warmup_reducer, second_moment)


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
    """Gradients averaged for `warmup` steps; then only within the subgroup, and parameters averaged every `period`.

    Bytes: 2(N-1)/N * 4n a step at first, then that / period over all, and the subgroup's own between (N ranks, n numbers).

    Memory: as that of `local_sgd`.

    Paper: Lin et al. 2018, arXiv:1808.07217.

    Not: with a subgroup, a DDP that has `find_unused_parameters=True`.

    Arguments:
      `warmup`: steps at first in which gradients are averaged over all ranks; this takes a DDP or a sharded model. Default 100.
      `period`: steps from one averaging to the next, or a schedule, such as QSR(4, 0.02). Default 16.
      `subgroup`: who averages gradients between: "node", the ranks on one host; "none", nobody; the name of a dimension of the
        mesh given to `attach`; None: the node if there are several, else nobody. Default None.
      `reducer`: how parameters are averaged; if lossy, by differences to the last average. Default Exact().
      `buffers`, `moments`, `atomic`: as in `local_sgd`. Defaults "average", "keep" and True.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Exact().
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> strategy = laconic.post_local_sgd(warmup=100, period=16)
    >>> laconic.predict(
    ...     strategy, layer, world_size=4, step=0, steps=100
    ... ).wire_bytes_per_step
    6000000.0
    >>> # after the warm-up, all ranks on one node
    >>> laconic.predict(strategy, layer, world_size=4).wire_bytes_per_step
    375000.0
    """
    if subgroup is not None and not isinstance(subgroup, str):
        raise TypeError(f"subgroup must be 'node', 'none' or a dimension's name, got {subgroup!r}")
    schedule = schedule_of(period, warmup)
    averaging = averaging_of(schedule, reducer, buffers, moments, atomic=atomic)
    scope = {None: AUTO, "none": None}.get(subgroup, subgroup)
    return strategy_of(schedule, averaging, warmup_reducer, second_moment, scope)


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
    """Parameters averaged within nodes, or blocks of neighbouring ranks, often, and over all ranks more rarely.

    Where several periods are due, the longest alone is done.

    Bytes: 2(g-1)/g * 4n for an averaging within a block of g ranks (n numbers in fp32).

    Memory: as that of `local_sgd`.

    Paper: Wang et al. 2020, arXiv:2010.12998.

    Not: with a lossy reducer: blocks have no anchor in common.

    Arguments:
      `periods`: in steps, and who averages then: a number of ranks, "node", "world", or a dimension of the mesh given to
        `attach`; the last is all ranks. Default {4: "node", 16: "world"}.
      `warmup`: steps at first in which gradients are averaged over all ranks; this takes a DDP or a sharded model. Default 0.
      `reducer`: Exact() alone. Default Exact().
      `buffers`, `moments`, `atomic`: as in `local_sgd`. Defaults "average", "keep" and True.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # pairs every 4 steps, all 8 ranks every 16
    >>> strategy = laconic.hierarchical_sgd({4: 2, 16: 8})
    >>> # of 16 steps: 3 * 4n and 2 * 7/8 * 4n
    >>> laconic.predict(strategy, layer, world_size=8).wire_bytes
    19000000
    """
    if not isinstance(reducer, Exact):
        raise ValueError(
            f"hierarchical_sgd averages parameters exactly: blocks have no anchor in common from which {render(reducer)} "
            "could send differences; use local_sgd or diloco for that"
        )
    checked_steps(warmup, "warmup")
    averaging = Averaging(routes.hierarchy(periods, warmup), None, buffers, moments_of(moments), atomic)
    return Strategy(Exact(), routes.at_first(warmup), averaging)


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
    averaged once, and Adam's second moment follows them most: a replica's own gradients are noisier than their mean, and would
    make its steps too short. A model that was trained before, with its optimizer's state, needs no warm-up.

    Bytes: 2(N-1)/N * n * (0.216 / period + 0.531 / refresh) a step, 1/64 of ddp's as given (N ranks, n numbers).

    Memory: 3n numbers: the anchor, and what was left out of deltas and of gradients.

    Paper: none has just this. Error feedback: Karimireddy et al. 2019, arXiv:1901.09847. A second moment that rests in local
    steps: Lu et al. 2022, arXiv:2202.06009 (0/1 Adam).

    Arguments:
      `period`: steps from one sync to the next, or a schedule. Default 4.
      `warmup`: steps at first in which `warmup_reducer` averages gradients; this takes a DDP or a sharded model. Default 100.
      `refresh`: steps from one averaging of gradients to the next; 0: none after the warm-up. This takes a DDP or a
        sharded model; a bare module needs refresh=0 and warmup=0. Default 64.
      `reducer`: how deltas are averaged. Default ErrorFeedback(Ternary()).
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "shared".
      `warmup_reducer`: how gradients are averaged in the warm-up and in refreshes. Default ErrorFeedback(Quantized(4)).
      `delay`: steps that an exchange stays outstanding; what a replica learns meanwhile is carried on top. Default 0.
      `outer`: what is done with the mean delta. Default Adopt().
      `buffers`, `moments`: as in `local_sgd`. Defaults "average" and "keep".
      `offload`, `outlier`: as in `diloco`. Defaults False and None.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # after the warm-up; ddp() sends 6000000
    >>> laconic.predict(laconic.local_adam(), layer, world_size=4).wire_bytes_per_step
    93313.5
    """
    schedule = schedule_of(period, warmup)
    checked_steps(refresh, "refresh")
    averaging = averaging_of(
        schedule, reducer, buffers, moments, outer, delay=delay, carry=delay > 0, offload=offload, outlier=outlier
    )
    return strategy_of(schedule, averaging, warmup_reducer, second_moment, refresh=refresh)
