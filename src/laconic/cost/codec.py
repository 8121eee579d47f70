"""What encoding and decoding takes on this machine: each kind of exchange, timed once on real tensors without a network."""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
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

FEWEST, MOST, SECONDS = 4, 40, 0.05  # repeats of each exchange: as many as fit into so many seconds, within these bounds
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
        self._units: tuple[float, float] | None = None  # seconds to copy a number, and of an operation on a small tensor

    def work(self, reducer: Reducer | None, sent: Sent) -> list[float]:
        if not sent.rounds:
            return [0.0]
        world, like = sent.rounds[0].world, _part(sent.like)
        scale = sent.numbers / max(1, sum(shape.numel() for shape in like)) * self._crowding
        key = (reducer, like, world)
        if key not in self._known:
            self._known[key] = _timed(reducer, like, world)
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


def _timed(reducer: Reducer | None, shapes: Sequence[torch.Size], world: int) -> list[float]:
    """Seconds of each part of the work: the mean of some repeats; the first, which makes memories, is not one.

    A mean, because processes that share cores interrupt each other now and then, which a median would not see.
    """
    rows: list[list[float]] = []
    fused = checked("auto") is not False  # what is compiled already, as a run would use it
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
            bucket = Bucket(flat, unflatten(flat, like), names, slots, 0, world, 1 << 40, len(rows), fused=fused)
            rounds = reducer.reduce(bucket)
        rows.append(work_of(rounds, world))
    length = len(rows[-1])
    return [statistics.fmean(row[part] for row in rows[1:] if len(row) == length) for part in range(length)]


def copy_seconds() -> float:
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
