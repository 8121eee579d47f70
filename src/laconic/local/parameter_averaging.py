"""Averaging of parameters, in place."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Exchange, PendingExchange, Reduced
from laconic.comm.flat_tensors import local, squared_norm, stored
from laconic.comm.group import Group
from laconic.comm.ledger import Ledger
from laconic.comm.pipeline import WINDOW, Pipeline
from laconic.reducers.base import Reducer
from laconic.reducers.cast import DTYPES, Cast
from laconic.reducers.exact import Exact

CHUNK_BYTES = 4 << 20
Flats: TypeAlias = Sequence[tuple[Tensor, bool]]  # of each tensor its numbers, and whether they are a copy
Means: TypeAlias = Iterable[tuple[Sequence[Tensor], Tensor]]  # chunk by chunk, its pieces and what they are to become


class Write(Protocol):
    """Writes what has arrived; with `measure`, how far this rank's tensors were from it: a norm, else 0."""

    def __call__(self, *, measure: bool = False) -> float: ...


class ParameterAverager:
    """Replaces named tensors by their mean over the group; storage, memory format and dtype stay.

    Maths: fp32 by an all-reduce; 16-bit tensors travel in their own dtype and are summed in fp32, so that averaging
    identical replicas changes no bit. Of integers, such as the counters of BatchNorm, the largest is taken.
    Bytes: 2(N-1)/N * n * itemsize; of integers (N-1) * n * itemsize.
    Memory: a few chunks of 4 MiB, however large the tensors are; with `atomic`, as much as the tensors themselves.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ledger: Ledger) -> None:
        parts = [local(tensor) for tensor in tensors.values()]
        self._tensors = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        self._ledger = ledger

    def average(self, group: Group, *, atomic: bool = False, measure: bool = False) -> float | None:
        """All ranks of the group together. With `measure`, how far this rank's tensors were from the mean: a norm.

        With `atomic`, nothing is written before everything has arrived: a peer that is lost on the way leaves all tensors as
        they were, else some of them averaged.
        """
        moved = self._replace(group, mean, atomic, measure)
        return math.sqrt(moved) if measure else None

    @torch.no_grad()
    def exchange(self, group: Group, *, weight: float = 1.0) -> "Write":
        """The same in two: everything is exchanged now, and nothing is written before what is returned is called.

        A rank counts as much as its `weight` in the mean; those of all ranks are 1 on average. Integers have no weights.
        """
        flats, means = self._exchanged(group, mean, weight)
        arrived = list(means)

        @torch.no_grad()
        def write(*, measure: bool = False) -> float:
            return math.sqrt(self._write(flats, arrived, measure))

        return write

    def adopt_first(self, group: Group) -> None:
        """Instead of the mean, what the group's first rank has. Bytes: (N-1) * n * itemsize."""
        self._replace(group, _first)

    @torch.no_grad()
    def _replace(
        self, group: Group, exchange: Callable[[Tensor, int, int], Exchange], atomic: bool = False, measure: bool = False
    ) -> float:
        flats, means = self._exchanged(group, exchange, 1.0)
        return self._write(flats, list(means) if atomic else means, measure)

    def _exchanged(self, group: Group, exchange: Callable[[Tensor, int, int], Exchange], weight: float) -> tuple[Flats, Means]:
        views = [stored(tensor) for tensor in self._tensors]
        flats = [
            (tensor.flatten() if view is None else view, view is None)
            for tensor, view in zip(self._tensors, views, strict=True)
        ]
        return flats, self._means([flat for flat, _ in flats], group, exchange, weight)

    def _write(self, flats: Flats, means: Means, measure: bool) -> float:
        moved = 0.0
        for pieces, replacement in means:
            for target, piece in zip(pieces, torch.split(replacement, [piece.numel() for piece in pieces]), strict=True):
                if measure:
                    moved += squared_norm([target - piece])
                target.copy_(piece)
        for tensor, (flat, copied) in zip(self._tensors, flats, strict=True):
            if copied:  # it has gaps in memory
                tensor.copy_(flat.view(tensor.shape))
        return moved

    def _means(
        self, flats: Sequence[Tensor], group: Group, exchange: Callable[[Tensor, int, int], Exchange], weight: float
    ) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
        """Chunk by chunk, its pieces and what they are to become."""
        pipeline = Pipeline(group, self._ledger, {}, window=WINDOW)
        pending: deque[tuple[Sequence[Tensor], PendingExchange[Reduced]]] = deque()
        for number, pieces in enumerate(chunks(flats)):
            if len(pending) == WINDOW:
                yield _completed(*pending.popleft())
            chunk = torch.cat(list(pieces))
            if weight == 0 and chunk.is_floating_point():
                chunk.zero_()  # infinities, such as a mask's, times 0 are no numbers
            elif weight != 1 and chunk.is_floating_point():
                chunk.mul_(weight)
            pending.append((pieces, pipeline.add(number, exchange(chunk, group.rank, group.world))))
        pipeline.finish()
        while pending:
            yield _completed(*pending.popleft())


def chunks(flats: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Pieces of flat tensors, of one dtype and device and `CHUNK_BYTES` at most together; large tensors are cut."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for flat in flats:
        kinds.setdefault((flat.dtype, flat.device), []).append(flat)
    for (dtype, _), alike in kinds.items():
        limit, chunk, room = CHUNK_BYTES // dtype.itemsize, [], CHUNK_BYTES // dtype.itemsize  # type: int, list[Tensor], int
        for flat in alike:
            while flat.numel():
                piece, flat = flat[:room], flat[room:]
                chunk.append(piece)
                room -= piece.numel()
                if room == 0:
                    yield chunk
                    chunk, room = [], limit
        if chunk:
            yield chunk


def mean(flat: Tensor, rank: int, world: int) -> Exchange:
    """The exchange that averages one chunk."""
    if not flat.dtype.is_floating_point:
        return _largest(flat)
    reducer: Reducer = next((Cast(name) for name, known in DTYPES.items() if known == flat.dtype), Exact())
    return reducer.reduce(Bucket(flat, [flat], [""], [{}], rank, world))


def _largest(flat: Tensor) -> Exchange:
    return Reduced((yield AllGather(flat)).amax(0))


def _first(flat: Tensor, rank: int, world: int) -> Exchange:
    return Reduced((yield AllGather(flat))[0])


def _completed(pieces: Sequence[Tensor], exchange: PendingExchange[Reduced]) -> tuple[Sequence[Tensor], Tensor]:
    result = exchange.complete()
    result.finish()
    return pieces, result.mean
