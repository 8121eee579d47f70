"""What encoding and decoding takes on this machine: each kind of exchange, timed once on real tensors without a network."""

import statistics
from collections.abc import Sequence

import torch

from laconic.comm.bucket import Bucket
from laconic.comm.dryrun import work_of
from laconic.comm.flat_tensors import unflatten
from laconic.cost.step_time import Exchange, Step
from laconic.forecast.exchanges import Sent
from laconic.forecast.timeline import StepTraffic
from laconic.local.parameter_averaging import mean
from laconic.reducers.base import Reducer
from laconic.strategies.strategy import Strategy

REPEATS = 5
LARGEST = 1 << 22  # numbers of the bucket that is timed; larger ones take as much longer as they are larger
# Passes over memory of a sync, a number: anchor - parameters and their norm, the outer optimizer's step, the way back.
DELTA_PASSES, MEAN_PASSES = 10.0, 3.0


class Codec:
    """Seconds of work of exchanges; `crowding` is how much longer it takes where workers share cores."""

    def __init__(self, crowding: float = 1.0) -> None:
        self._crowding = crowding
        self._known: dict[tuple[object, ...], list[float]] = {}
        self._copy: float | None = None

    def steps(self, strategy: Strategy, found: Sequence[StepTraffic]) -> list[Step]:
        """A timeline with the work of each exchange in it."""
        deltas = strategy.averaging.deltas if strategy.averaging else None
        between = deltas.reducer if deltas is not None else None
        return [
            Step(
                [self._exchange(strategy.reducer, sent) for sent in one.in_backward],
                [self._exchange(between, sent) for sent in one.after],
                [self._exchange(between, sent) for sent in one.outstanding],
                one.delay,
                self._around(one, DELTA_PASSES if deltas is not None else MEAN_PASSES),
            )
            for one in found
        ]

    def _exchange(self, reducer: Reducer | None, sent: Sent) -> Exchange:
        """`reducer` is None of a plain mean of parameters."""
        work = self._work(reducer, sent)
        return Exchange(sent.rounds, work, sent.numbers)

    def _work(self, reducer: Reducer | None, sent: Sent) -> list[float]:
        if not sent.rounds:
            return [0.0]
        scale = max(1.0, sent.numbers / LARGEST) * self._crowding
        world = sent.rounds[0].world
        key = (reducer, sent.like if scale == self._crowding else None, min(sent.numbers, LARGEST), world)
        if key not in self._known:
            self._known[key] = _timed(reducer, sent, world)
        return [seconds * scale for seconds in self._known[key]]

    def _around(self, one: StepTraffic, passes: float) -> float:
        numbers = sum(sent.numbers for sent in [*one.after, *one.outstanding])
        if not numbers:
            return 0.0
        if self._copy is None:
            self._copy = _copy_seconds()
        return passes * numbers * self._copy * self._crowding


def _timed(reducer: Reducer | None, sent: Sent, world: int) -> list[float]:
    """Seconds of each part of the work, the median of some repeats; the first, which fills caches and memories, is not one."""
    rows: list[list[float]] = []
    shapes = sent.like if sent.numbers <= LARGEST else ((LARGEST,),)
    like = [torch.empty(shape, device="meta") for shape in shapes]
    count = sum(each.numel() for each in like)
    source = torch.randn(count)
    slots: list[dict[str, torch.Tensor]] = [{} for _ in like]
    names = [str(place) for place in range(len(like))]
    for exchange in range(REPEATS + 1):
        flat = source.clone()
        if reducer is None:
            rounds = mean(flat, 0, world)
        else:
            bucket = Bucket(flat, unflatten(flat, like), names, slots, 0, world, 1 << 40, exchange)
            rounds = reducer.reduce(bucket)
        rows.append(work_of(rounds, world))
    length = len(rows[-1])
    return [statistics.median(row[part] for row in rows[1:] if len(row) == length) for part in range(length)]


def _copy_seconds() -> float:
    """To copy one number."""
    import time

    source, target = torch.zeros(1 << 22), torch.zeros(1 << 22)
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return statistics.median(found) / source.numel()
