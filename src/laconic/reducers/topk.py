"""The largest numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather, AllToAll
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import Reducer, checked_ratio, finite

VALUES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TopK(Reducer):
    """Send the largest entries, as (index, value).

    Maths: each parameter is cut into equal pieces of at most `chunk` numbers; of a piece of s the k = max(1, ⌈ratio * s⌉)
    largest by magnitude are sent. With two phases each rank owns the pieces of one N-th of the entries: it collects everybody's
    entries of them, adds them to its own numbers as they are, and sends the k largest of each mean to all; the rest is in the
    owner's error. With one phase every rank gathers the entries of all, k of each parameter, and the mean has what any rank
    sent, divided by N. Biased: wrap it in ErrorFeedback.
    Bytes: 2(N-1)/N * k * (2 + itemsize of `values`), in an all-to-all and an all-gather, at any N. With one phase (N-1) * 8k in
    one all-gather, which grows with N: above ratio = 1/N it is more than plain all-reduce.
    Paper: Aji & Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599.

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.TopK(ratio=0.05, values="bf16")))
    "ddp(reducer=TopK(ratio=0.05, values='bf16'))"
    """

    ratio: float = 0.01
    chunk: int = 4096
    values: str = "fp32"
    phases: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        checked_ratio(self.ratio)
        if not 8 <= self.chunk <= 1 << 15:
            raise ValueError(f"chunk must be from 8 to 32768 numbers, so that an index takes two bytes, got {self.chunk!r}")
        if self.values not in VALUES:
            raise ValueError(f"values must be one of {', '.join(VALUES)}, got {self.values!r}")
        if self.phases not in (1, 2):
            raise ValueError(f"phases must be 2, or 1 to gather the entries of all ranks, got {self.phases!r}")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(0.1)
        yield cls(0.2, chunk=8, values="bf16")
        yield cls(0.1, phases=1)

    def reduce(self, bucket: Bucket) -> Exchange:
        return self._two_phase(bucket) if self.phases == 2 else _gathered(bucket, self.ratio)

    def _two_phase(self, bucket: Bucket) -> Exchange:
        flat, world, rank = bucket.flat, bucket.world, bucket.rank
        plan = layout(tuple(view.numel() for view in bucket.views), self.ratio, self.chunk, world)
        if not plan.width:
            return Reduced(flat)
        dtype, mine, rows = VALUES[self.values], plan.spans[rank], plan.rows[rank]
        numbers = flat.to(torch.float32, copy=True)
        sent = Entries.blank(flat, world, plan.width, dtype)
        for owner in range(world):
            sent.pick(owner, numbers, plan.rows[owner])
        total = numbers[mine].clone()  # this rank's own numbers count as they are
        if world > 1:
            got = Entries((yield AllToAll(sent.message)), plan.width, dtype)
            for other in range(world):
                if other != rank:
                    got.add_to(total, other, rows, mine.start)
            total.mul_(1 / world)
        chosen = Entries.blank(flat, 1, plan.width, dtype)
        chosen.pick(0, total, rows, mine.start)
        if world > 1:
            chosen = Entries((yield AllGather(chosen.message[0])), plan.width, dtype)
        mean = torch.zeros_like(numbers)
        for owner in range(world):
            chosen.add_to(mean, owner, plan.rows[owner])
        error = None
        if bucket.feedback:
            for owner in range(world):
                sent.add_to(numbers, owner, plan.rows[owner], weight=-1.0)
            # The mean lacks what its owner left out: as a part of the owner's own numbers, N times as much.
            numbers[mine] = total.sub_(mean[mine]).mul_(world)
            error = numbers.to(flat.dtype)

        def finish() -> None:
            flat.copy_(mean)

        return Reduced(flat, error, finish, finite(mean))


def _gathered(bucket: Bucket, ratio: float) -> Exchange:
    flat, world = bucket.flat, bucket.world
    picks: list[Tensor] = [torch.empty(0, dtype=torch.int32, device=flat.device)]
    start = 0
    for view in bucket.views:
        size = view.numel()
        if size:
            count = max(1, math.ceil(ratio * size))
            # Not-a-number counts as largest, so that it is sent and everybody learns of it.
            picks.append(flat[start : start + size].abs().topk(count, sorted=False).indices.int().add_(start))
        start += size
    index = torch.cat(picks)
    value = flat[index].float()

    rows = yield AllGather(torch.cat([index, value.view(torch.int32)]))
    count = index.numel()
    mean = torch.zeros_like(flat, dtype=torch.float32)
    for row in rows:  # one rank after the other: no entry twice in a call, so the order of additions is fixed
        mean.index_add_(0, row[:count], row[count:].view(torch.float32), alpha=1 / world)
    error = flat.index_fill_(0, index.long(), 0) if bucket.feedback else None
    return Reduced(mean.to(flat.dtype), error)


class Row(NamedTuple):
    """Neighbouring pieces of one length that one rank owns."""

    start: int  # in the bucket
    pieces: int
    length: int  # of a piece
    kept: int  # entries of a piece
    place: int  # of the first entry in the owner's message

    @property
    def stop(self) -> int:
        return self.start + self.pieces * self.length


class Layout(NamedTuple):
    """How a bucket is cut, and who owns what."""

    rows: tuple[tuple[Row, ...], ...]  # by owner
    spans: tuple[slice, ...]  # by owner: its numbers
    width: int  # entries of a message; 0: the bucket is empty


@lru_cache(maxsize=1024)
def layout(sizes: tuple[int, ...], ratio: float, chunk: int, world: int) -> Layout:
    """Pieces in the order of the bucket; a piece belongs to the rank in whose N-th of all entries it begins.

    Where ranks are many, pieces are shorter than `chunk`, so that each rank has some to own; never so short that one entry of
    each would be more than the ratio asks for.
    """
    pieces: list[tuple[int, int, int]] = []  # start, length, entries
    limit = max(1, min(chunk, max(-(-sum(sizes) // world), math.ceil(1 / ratio))))
    start = 0
    for size in sizes:
        length = -(-size // max(1, -(-size // limit)))
        for first in range(start, start + size, max(1, length)):
            whole = min(length, start + size - first)
            pieces.append((first, whole, max(1, math.ceil(ratio * whole))))
        start += size
    entries = sum(kept for _, _, kept in pieces)
    rows: list[list[Row]] = [[] for _ in range(world)]
    ends, before = [0] * world, 0
    for first, length, kept in pieces:
        owner = before * world // entries
        before += kept
        last = rows[owner][-1] if rows[owner] else None
        if last is not None and (last.stop, last.length) == (first, length):
            rows[owner][-1] = last._replace(pieces=last.pieces + 1)
        else:
            rows[owner].append(Row(first, 1, length, kept, ends[owner]))
        ends[owner] += kept
    spans = [slice(mine[0].start, mine[-1].stop) if mine else slice(0, 0) for mine in rows]
    width = -(-max(ends) // 2) * 2  # values behind the indices are aligned
    return Layout(tuple(map(tuple, rows)), tuple(spans), width)


class Entries:
    """Messages, one a row: `width` indices within their pieces, and as many values."""

    def __init__(self, message: Tensor, width: int, dtype: torch.dtype) -> None:
        self.message = message
        self._index, self._value = message[:, : 2 * width].view(torch.int16), message[:, 2 * width :].view(dtype)

    @classmethod
    def blank(cls, like: Tensor, messages: int, width: int, dtype: torch.dtype) -> Self:
        """Messages without entries."""
        return cls(like.new_zeros((messages, width * (2 + dtype.itemsize)), dtype=torch.uint8), width, dtype)

    def pick(self, message: int, numbers: Tensor, rows: Sequence[Row], origin: int = 0) -> None:
        """The largest of each piece, into a message; `numbers` begin at `origin` of the bucket."""
        for row in rows:
            pieces = numbers[row.start - origin : row.stop - origin].view(row.pieces, row.length)
            # Not-a-number counts as largest, so that it is sent and everybody learns of it.
            index = pieces.abs().topk(row.kept, dim=1, sorted=False).indices
            place = slice(row.place, row.place + row.pieces * row.kept)
            self._index[message, place] = index.view(-1).to(torch.int16)
            self._value[message, place] = pieces.gather(1, index).view(-1).to(self._value.dtype)

    def add_to(self, numbers: Tensor, message: int, rows: Sequence[Row], origin: int = 0, weight: float = 1.0) -> None:
        """Add a message's values where they belong."""
        for row in rows:
            place, shape = slice(row.place, row.place + row.pieces * row.kept), (row.pieces, row.kept)
            index, value = self._index[message, place].view(shape), self._value[message, place].view(shape)
            pieces = numbers[row.start - origin : row.stop - origin].view(row.pieces, row.length)
            pieces.scatter_add_(1, index.long(), value.float().mul_(weight))
