"""Recipes of local updates with an outer optimizer, which moves a common anchor by the mean of how far replicas came.

What they have in common with `local_recipes.py`: the warm-up, and what becomes of Adam's second moment after it.
"""

from laconic.reducers.base import Reducer
from laconic.reducers.error_feedback import ErrorFeedback
from laconic.reducers.exact import Exact
from laconic.reducers.quantized import Quantized
from laconic.reducers.topk import TopK
from laconic.strategies.local_parts import Moments, averaging_of, chosen_outer, outer_of, schedule_of, strategy_of
from laconic.strategies.outer import Adopt, Outer, SlowMo
from laconic.strategies.recipe import recipe
from laconic.strategies.schedules import Schedule
from laconic.strategies.strategy import Strategy


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

    The momentum of an inner SGD starts at zero after each sync, as in the paper, and Adam's memory is kept.

    Maths: that of the outer optimizer `SlowMo`.

    Bytes: 2(N-1)/N * 4n / period a step, or the reducer's / period (N ranks, n numbers in fp32).

    Memory: 2n numbers, the anchor and the slow momentum; and the reducer's.

    Paper: Wang et al. 2019, arXiv:1910.00643.

    Arguments:
      `period`: steps from one sync to the next, or a schedule, such as QSR(4, 0.02). Default 12.
      `beta`: the decay of the slow momentum, at least 0 and below 1. Default 0.5.
      `alpha`: how far the anchor goes by it, above 0. Default 1.0.
      `outer`: any other outer optimizer, instead of `beta` and `alpha`. Default None.
      `warmup`: steps at first in which gradients are averaged instead; this takes a DDP or a sharded model. Default 0.
      `reducer`: how deltas are averaged. Default Exact().
      `buffers`, `moments`: as in `local_sgd`. Defaults "average" and "auto".
      `offload`, `outlier`: as in `diloco`. Defaults False and None.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Exact().
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # 2(N-1)/N * 4n / 12
    >>> laconic.predict(laconic.slowmo(12), layer, world_size=4).wire_bytes_per_step
    500000.0
    """
    chosen = chosen_outer(outer, SlowMo(beta, alpha), SlowMo(), "beta and alpha")
    schedule = schedule_of(period, warmup)
    averaging = averaging_of(schedule, reducer, buffers, moments, chosen, offload=offload, outlier=outlier)
    return strategy_of(schedule, averaging, warmup_reducer, second_moment)


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
    some hundred steps from scratch. Hence 0.6 here; for long runs try 0.9 with a `warmup`.

    Maths: that of the outer optimizer `Nesterov`.

    Bytes: 2(N-1)/N * 4n / period a step, or the reducer's / period (N ranks, n numbers in fp32).

    Memory: 2n numbers, the anchor and the outer momentum; and the reducer's.

    Paper: Douillard et al. 2023, arXiv:2311.08105.

    Arguments:
      `period`: steps from one sync to the next, or a schedule, such as QSR(4, 0.02). Default 32.
      `outer_lr`: the learning rate of the outer step, above 0. Default 0.7.
      `outer_momentum`: its momentum, at least 0 and below 1; with 0, the anchor goes `outer_lr` of the way. Default 0.6.
      `outer`: any other outer optimizer, such as OuterOptimizer(torch.optim.Adam, {"lr": 0.1}), instead of these two.
        Default None.
      `warmup`: steps at first in which gradients are averaged instead; this takes a DDP or a sharded model. Default 0.
      `reducer`: how deltas are averaged. Default Exact().
      `buffers`, `moments`: as in `local_sgd`. Defaults "average" and "keep".
      `offload`: keep the anchor and the outer optimizer's memory on the CPU. Default False.
      `outlier`: skip a sync whose deltas' norm is more than so many standard deviations above that of the syncs before, once
        there have been eight; None: skip none. Default None.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Exact().
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # 2(N-1)/N * 4n / 32
    >>> laconic.predict(laconic.diloco(32), layer, world_size=4).wire_bytes_per_step
    187500.0
    >>> str(laconic.diloco(64, outer_momentum=0.9, reducer=laconic.Quantized(8)))
    'diloco(period=64, outer_momentum=0.9, reducer=Quantized(bits=8))'
    """
    chosen = chosen_outer(outer, outer_of(outer_lr, outer_momentum), outer_of(0.7, 0.6), "outer_lr and outer_momentum")
    schedule = schedule_of(period, warmup)
    averaging = averaging_of(schedule, reducer, buffers, moments, chosen, offload=offload, outlier=outlier)
    return strategy_of(schedule, averaging, warmup_reducer, second_moment)


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

    Maths: that of the outer optimizer `Nesterov`, fragment by fragment; then p <- blend * p + (1 - blend) * anchor. With
    `carry`, how far p has come since the exchange left is added to the anchor there.

    Bytes: as diloco's, by the reducer: 2(N-1)/N * 1.008n / period a step, a fragment at a time (N ranks, n numbers).

    Memory: 2n numbers, the anchor and the outer momentum; and the fragments that are outstanding, twice.

    Paper: Douillard et al. 2025, arXiv:2501.18512.

    Arguments:
      `period`: steps in which all fragments have their turn, or a schedule with a `fixed_period`. Default 32.
      `fragments`: into how many parts parameters are cut, at most `period`. Default 4.
      `delay`: steps that an exchange stays outstanding, below `period`. Default 4.
      `blend`: the weight of the local parameters when it is complete, from 0 to 1; the rest is the anchor. Default 0.5.
      `carry`: put what this replica learnt while the exchange was outstanding on top of the anchor. Default False.
      `order`: how parameters become fragments: by layer, "strided" or "contiguous", or in runs of equal "bytes".
        Default "strided".
      `outer_lr`: the learning rate of the outer step, above 0. Default 0.7.
      `outer_momentum`: its momentum, at least 0 and below 1. Default 0.6.
      `outer`: any other outer optimizer, instead of these two. Default None.
      `warmup`: steps at first in which gradients are averaged instead; this takes a DDP or a sharded model. Default 0.
      `reducer`: how deltas are averaged. Default Quantized(8).
      `buffers`, `moments`: as in `local_sgd`. Defaults "average" and "keep".
      `offload`, `outlier`: as in `diloco`. Defaults False and None.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Exact().
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(
    ...     laconic.streaming_diloco(32, fragments=1), layer, world_size=4
    ... ).wire_bytes_per_step
    47241.75
    """
    if isinstance(period, Schedule) and period.fixed_period is None:
        raise TypeError(
            "period must be a whole number of steps, or a schedule with a fixed_period, as fragments need their places in it; "
            f"got {period!r}"
        )
    chosen = chosen_outer(outer, outer_of(outer_lr, outer_momentum), outer_of(0.7, 0.6), "outer_lr and outer_momentum")
    schedule = schedule_of(period, warmup)
    averaging = averaging_of(
        schedule, reducer, buffers, moments, chosen, fragments, order, delay, blend, carry, offload, outlier
    )
    return strategy_of(schedule, averaging, warmup_reducer, second_moment)


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

    As in the paper, entries are picked by chunks of at most 4096 and sent in 14 bits: 12 of index, 2 of value. They travel in
    two phases, where the paper gathers them, so that bytes don't grow with the world.

    Bytes: 2(N-1)/N * (14/8 * ratio + 4/4096) * n / period a step (N ranks, n numbers).

    Memory: 2n numbers, the anchor and what was left out.

    Paper: Sarfi et al. 2025, arXiv:2508.15706.

    Arguments:
      `period`: steps from one sync to the next, or a schedule. Default 30.
      `ratio`: the share of entries that is sent, above 0 and at most 1. Default 1 / 64.
      `decay`: how much of what was left out is kept for the next sync, from 0 to 1. Default 0.95.
      `outer_lr`: how far the anchor goes by the mean delta, above 0. Default 1.0.
      `outer`: any other outer optimizer, instead of `outer_lr`. Default None.
      `warmup`: steps at first in which gradients are averaged instead; this takes a DDP or a sharded model. Default 0.
      `buffers`, `moments`: as in `local_sgd`. Defaults "average" and "keep".
      `offload`, `outlier`: as in `diloco`. Defaults False and None.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Exact().
      `second_moment`: of Adam, after the warm-up: "local", "slow" or "shared" (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # of 30 steps
    >>> laconic.predict(laconic.sparseloco(30), layer, world_size=4).wire_bytes
    43152
    """
    reducer = ErrorFeedback(TopK(ratio, values="2bit"), decay)
    chosen = chosen_outer(outer, outer_of(outer_lr, 0.0), Adopt(), "outer_lr")
    schedule = schedule_of(period, warmup)
    averaging = averaging_of(schedule, reducer, buffers, moments, chosen, offload=offload, outlier=outlier)
    return strategy_of(schedule, averaging, warmup_reducer, second_moment)
