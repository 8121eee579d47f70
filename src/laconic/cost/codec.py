"""What encoding and decoding takes on this machine: each kind of exchange, timed on real tensors without a network."""

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from laconic.comm.bucket import Bucket
from laconic.comm.dryrun import work_of
from laconic.comm.flat_tensors import unflatten
from laconic.cost.around import DELTA_PASSES, GRADIENT_PASSES, MEAN_PASSES, TENSOR_OPERATIONS, heartbeat
from laconic.cost.step_time import Exchange, Step
from laconic.forecast.exchanges import Sent
from laconic.forecast.timeline import StepTraffic
from laconic.kernels.compiling import checked
from laconic.local.parameter_averaging import mean
from laconic.reducers.base import Reducer
from laconic.strategies.strategy import Strategy

TIMINGS = 5  # of each exchange, of which the median counts; each is the mean of some repeats
FEWEST, MOST, SECONDS = TIMINGS, 40, 0.05  # repeats in all: as many as fit into so many seconds, within these bounds
APART, AGAIN_SECONDS = 0.25, 0.2  # quartiles that are apart by more than this share have it timed again, for so many seconds
MOST_AGAIN_SECONDS = 2.0  # for all exchanges together
SCATTERED, NOTABLE_SECONDS = 0.5, 1e-3  # what is said of timings: quartiles further apart, where that is of any weight
LARGEST = 1 << 22  # numbers of the bucket that is timed; larger ones take as much longer as they are larger
OPERATIONS = 2000
COLD = 1 << 22  # numbers that are written before each repeat: a step of training leaves nothing of a bucket in the caches


class WorkModel(ABC):
    """Adds the seconds of work to a timeline.

    `counts_copies`: of gradients, into DDP's buckets and back. They are part of a step that was timed under DDP.
    """

    counts_copies: ClassVar[bool] = True

    def steps(self, strategy: Strategy, found: Sequence[StepTraffic]) -> list[Step]:
        """A timeline with the work of each exchange in it, and with the heartbeat that goes before each sync."""
        deltas = strategy.averaging.deltas if strategy.averaging else None
        between, passes = (deltas.reducer, DELTA_PASSES) if deltas is not None else (None, MEAN_PASSES)
        copies = GRADIENT_PASSES if self.counts_copies else 0.0
        return [
            Step(
                self._exchanges(strategy.reducer, one.in_backward),
                [*_heartbeat(one.after), *self._exchanges(between, one.after)],
                [*_heartbeat(one.outstanding), *self._exchanges(between, one.outstanding)],
                one.delay,
                self._around(one.in_backward, copies) + self._around([*one.after, *one.outstanding], passes),
            )
            for one in found
        ]

    def _exchanges(self, reducer: Reducer | None, sent: Sequence[Sent]) -> list[Exchange]:
        return [Exchange(one.rounds, self.work(reducer, one), one.numbers) for one in sent]

    def _around(self, sent: Sequence[Sent], passes: float) -> float:
        return self.around(passes, sum(one.numbers for one in sent), sum(len(one.like) for one in sent)) if sent else 0.0

    @abstractmethod
    def work(self, reducer: Reducer | None, sent: Sent) -> Sequence[float]:
        """Seconds before each round and after the last; `reducer` is None of a plain mean of parameters."""

    @abstractmethod
    def around(self, passes: float, numbers: int, tensors: int) -> float:
        """Seconds of so many passes over the memory of so many numbers in so many tensors."""


class Codec(WorkModel):
    """Times the work here; `crowding` is how much longer it takes where workers share cores."""

    def __init__(self, crowding: float = 1.0) -> None:
        self._crowding = crowding
        self._known: dict[tuple[object, ...], list[float]] = {}
        self._again = MOST_AGAIN_SECONDS
        self.scatter = 0.0  # how far the quartiles of a timing were apart at worst, as a share of its median
        self._units: tuple[float, float] | None = None  # seconds to copy a number, and of an operation on a small tensor

    def work(self, reducer: Reducer | None, sent: Sent) -> list[float]:
        if not sent.rounds:
            return [0.0]
        world, like = sent.rounds[0].world, _part(sent.like)
        scale = sent.numbers / max(1, sum(shape.numel() for shape in like)) * self._crowding
        key = (reducer, like, world)
        if key not in self._known:
            self._known[key], quartiles, again = _timed(reducer, like, world, min(AGAIN_SECONDS, self._again))
            self._again = max(0.0, self._again - again)
            if quartiles * scale > NOTABLE_SECONDS:
                self.scatter = max(self.scatter, quartiles / sum(self._known[key]))
        found = [seconds * scale for seconds in self._known[key]]
        # What is cut may be too small for a reducer's matrices, and then has fewer rounds.
        return found if len(found) == len(sent.rounds) + 1 else [sum(found) / (len(sent.rounds) + 1)] * (len(sent.rounds) + 1)

    def around(self, passes: float, numbers: int, tensors: int) -> float:
        if self._units is None:
            self._units = copy_seconds(), _operation_seconds()
        copy, operation = self._units
        return (passes * numbers * copy + TENSOR_OPERATIONS * tensors * operation) * self._crowding


def _heartbeat(sent: Sequence[Sent]) -> list[Exchange]:
    """Nothing where nothing is averaged."""
    worlds = [one.rounds[0].world for one in sent if one.rounds]
    return [heartbeat(max(worlds))] if worlds else []


def _part(like: Sequence[torch.Size]) -> tuple[torch.Size, ...]:
    """A bucket of up to `LARGEST` numbers or so: of a larger one, the same share of the rows of each tensor."""
    share = LARGEST / max(1, sum(shape.numel() for shape in like))
    if share >= 1:
        return tuple(like)
    return tuple(torch.Size([max(1, int(shape[0] * share)), *shape[1:]]) if shape.numel() > 1 else shape for shape in like)


def _timed(reducer: Reducer | None, shapes: Sequence[torch.Size], world: int, again: float) -> tuple[list[float], float, float]:
    """Seconds of each part of the work, by the median over some timings; how far apart the quartiles of the whole are.

    Where these are far apart, it is timed `again` for so many seconds; the last number is how many that took.

    A timing is the mean of some repeats, because processes that share cores interrupt each other now and then, which a median
    of single repeats would not see. The median over the timings is for what happens once: a moment in which the machine was
    busy. Without it, one and the same exchange took 4 ms in a run of the advisor and 50 ms in another.
    """
    repeats = _repeats(reducer, shapes, world)
    next(repeats)  # which makes memories
    rows = [next(repeats) for _ in range(FEWEST)]
    while len(rows) < MOST and sum(map(sum, rows)) < SECONDS:
        rows.append(next(repeats))
    parts, together = len(rows[-1]), len(rows) // TIMINGS  # of the work; repeats in a timing
    timings, began = _timings(rows, parts, together), time.perf_counter()
    while _quartiles(timings) > APART * statistics.median(map(sum, timings)) and time.perf_counter() - began < again:
        timings += _timings([next(repeats) for _ in range(together)], parts, together)
    found = [statistics.median(part) for part in zip(*timings, strict=True)]
    return found, _quartiles(timings), time.perf_counter() - began


def _timings(rows: Sequence[list[float]], parts: int, together: int) -> list[list[float]]:
    """Means of so many repeats after each other, of those with as many parts; the last few may be left out."""
    rows = [row for row in rows if len(row) == parts]
    starts = range(0, len(rows) - together + 1, together)
    return [[statistics.fmean(part) for part in zip(*rows[start : start + together], strict=True)] for start in starts]


def _quartiles(timings: Sequence[Sequence[float]]) -> float:
    """How far apart they are, in seconds."""
    if len(timings) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(map(sum, timings), n=4, method="inclusive")
    return upper - lower


def _repeats(reducer: Reducer | None, shapes: Sequence[torch.Size], world: int) -> Iterator[list[float]]:
    """Without an end: seconds of each part of the work."""
    fused = checked("auto") is not False  # what is compiled already, as a run would use it
    like = [torch.empty(shape, device="meta") for shape in shapes]
    source, cold = torch.randn(sum(each.numel() for each in like)), torch.ones(COLD)
    slots: list[dict[str, torch.Tensor]] = [{} for _ in like]
    names = [str(place) for place in range(len(like))]
    for step in itertools.count():
        flat = source.clone()
        cold.add_(1.0)
        if reducer is None:
            rounds = mean(flat, 0, world)
        else:
            bucket = Bucket(flat, unflatten(flat, like), names, slots, 0, world, 1 << 40, step, fused=fused)
            rounds = reducer.reduce(bucket)
        yield work_of(rounds, world)


def copy_seconds() -> float:
    """To copy one number."""
    source, target = torch.ones(COLD), torch.ones(COLD)  # zeros share one page until they are written
    found = []
    for _ in range(FEWEST + 1):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:]) / source.numel()


def _operation_seconds() -> float:
    """Of an operation on a tensor that is so small that its numbers don't count."""
    few, began = torch.ones(64), time.perf_counter()
    while time.perf_counter() - began < SECONDS / 10:
        few.mul_(1.0)
    began = time.perf_counter()
    for _ in range(OPERATIONS):
        few.mul_(1.0)
    return (time.perf_counter() - began) / OPERATIONS
