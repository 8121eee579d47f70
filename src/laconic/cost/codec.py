"""What encoding and decoding takes on this machine: each kind of exchange, timed once on real tensors without a network."""

import statistics
import time
from collections.abc import Sequence

import torch

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import Traffic
from laconic.comm.dryrun import Round, work_of
from laconic.comm.flat_tensors import unflatten
from laconic.cost.step_time import Exchange, Step
from laconic.forecast.exchanges import Sent
from laconic.forecast.timeline import StepTraffic
from laconic.local.parameter_averaging import mean
from laconic.reducers.base import Reducer
from laconic.strategies.strategy import Strategy

FEWEST, MOST, SECONDS = 4, 40, 0.05  # repeats of each exchange: as many as fit into so many seconds, within these bounds
LARGEST = 1 << 22  # numbers of the bucket that is timed; larger ones take as much longer as they are larger
OPERATIONS = 2000
COLD = 1 << 22  # numbers that are written before each repeat: a step of training leaves nothing of a bucket in the caches
# What is done beside the exchanges, as passes over memory, and as small operations on each tensor. Of a sync: the deltas and
# their norm, the outer optimizer's step, the way back. Of gradients: into the bucket and out of it again, which a step that
# averages nothing is spared. By the time that one process without peers needs more than for a step of silent().
DELTA_PASSES, MEAN_PASSES, GRADIENT_PASSES = 16.0, 6.0, 4.0
TENSOR_OPERATIONS = 8.0
HEARTBEAT_BYTES = 64  # of each rank, gathered by all before a sync: its step, norm and learning rates


class Codec:
    """Seconds of work of exchanges; `crowding` is how much longer it takes where workers share cores."""

    def __init__(self, crowding: float = 1.0) -> None:
        self._crowding = crowding
        self._known: dict[tuple[object, ...], list[float]] = {}
        self._units: tuple[float, float] | None = None  # seconds to copy a number, and of an operation on a small tensor

    def steps(self, strategy: Strategy, found: Sequence[StepTraffic]) -> list[Step]:
        """A timeline with the work of each exchange in it, and with the heartbeat that goes before each sync."""
        deltas = strategy.averaging.deltas if strategy.averaging else None
        between = deltas.reducer if deltas is not None else None
        return [
            Step(
                [self._exchange(strategy.reducer, sent) for sent in one.in_backward],
                [*_heartbeat(one.after), *(self._exchange(between, sent) for sent in one.after)],
                [*_heartbeat(one.outstanding), *(self._exchange(between, sent) for sent in one.outstanding)],
                one.delay,
                self._around(one.in_backward, GRADIENT_PASSES)
                + self._around([*one.after, *one.outstanding], DELTA_PASSES if deltas is not None else MEAN_PASSES),
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

    def _around(self, exchanges: Sequence[Sent], passes: float) -> float:
        if not exchanges:
            return 0.0
        if self._units is None:
            self._units = _copy_seconds(), _operation_seconds()
        numbers, tensors = sum(sent.numbers for sent in exchanges), sum(len(sent.like) for sent in exchanges)
        copy, operation = self._units
        return (passes * numbers * copy + TENSOR_OPERATIONS * tensors * operation) * self._crowding


def _heartbeat(sent: Sequence[Sent]) -> list[Exchange]:
    """What ranks tell each other before they average between steps; nothing where they don't."""
    worlds = [one.rounds[0].world for one in sent if one.rounds]
    if not worlds:
        return []
    world = max(worlds)
    traffic = Traffic(HEARTBEAT_BYTES, HEARTBEAT_BYTES * (world - 1), 1)
    return [Exchange([Round("AllGather", traffic, world)], [0.0, 0.0])]


def _timed(reducer: Reducer | None, sent: Sent, world: int) -> list[float]:
    """Seconds of each part of the work: the mean of some repeats; the first, which makes memories, is not one.

    A mean, because processes that share cores interrupt each other now and then, which a median would not see.
    """
    rows: list[list[float]] = []
    shapes = sent.like if sent.numbers <= LARGEST else ((LARGEST,),)
    like = [torch.empty(shape, device="meta") for shape in shapes]
    source, cold = torch.randn(sum(each.numel() for each in like)), torch.ones(COLD)
    slots: list[dict[str, torch.Tensor]] = [{} for _ in like]
    names = [str(place) for place in range(len(like))]
    while len(rows) <= FEWEST or (len(rows) <= MOST and sum(map(sum, rows)) < SECONDS):
        flat = source.clone()
        cold.add_(1.0)
        if reducer is None:
            rounds = mean(flat, 0, world)
        else:
            bucket = Bucket(flat, unflatten(flat, like), names, slots, 0, world, 1 << 40, len(rows))
            rounds = reducer.reduce(bucket)
        rows.append(work_of(rounds, world))
    length = len(rows[-1])
    return [statistics.fmean(row[part] for row in rows[1:] if len(row) == length) for part in range(length)]


def _copy_seconds() -> float:
    """To copy one number."""
    source, target = torch.ones(COLD), torch.ones(COLD)  # zeros share one page until they are written
    found = []
    for _ in range(FEWEST + 1):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return statistics.fmean(found[1:]) / source.numel()


def _operation_seconds() -> float:
    """Of an operation on a tensor that is so small that its numbers don't count."""
    few, began = torch.ones(64), time.perf_counter()
    while time.perf_counter() - began < SECONDS / 10:
        few.mul_(1.0)
    began = time.perf_counter()
    for _ in range(OPERATIONS):
        few.mul_(1.0)
    return (time.perf_counter() - began) / OPERATIONS
