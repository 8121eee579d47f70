"""The largest numbers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather, AllToAll
from laconic.comm.exchange import Exchange, Reduced
from laconic.kernels.kernel import PIECE
from laconic.reducers.base import Reducer, checked_ratio, finite
from laconic.reducers.blockwise import shares

VALUES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TWO_BITS, SHORT = "2bit", 4096  # values of two bits, and the longest piece whose indices take twelve


@dataclass(frozen=True)
class TopK(Reducer):
    """Send the largest entries, as (index, value).

    Maths: each parameter is cut into equal pieces of at most `chunk` numbers; of a piece of s the k = max(1, ⌈ratio * s⌉)
    largest by magnitude are sent. With two phases each rank owns the pieces of one N-th of the entries: it collects everybody's
    entries of them, adds them to its own numbers as they are, and sends the k largest of each mean to all; the rest is in the
    owner's error. With one phase every rank gathers the entries of all, k of each parameter, and the mean has what any rank
    sent, divided by N. With values="2bit" an entry is its sign and one of two sizes: the mean of those of its piece that are
    below the mean, or of those above it.

    Bytes: 2(N-1)/N * k * (2 + itemsize of `values`), in an all-to-all and an all-gather, at any N. With "2bit" an entry takes
    14 bits, of which the index has 12, and a piece 4 bytes. With one phase (N-1) * 8k in one all-gather, which grows with N:
    above ratio = 1/N it is more than plain all-reduce.

    Memory: none.

    Paper: Aji & Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599; 2 bits: Sarfi et al. 2025,
    arXiv:2508.15706.

    Not: unbiased: wrap it in `ErrorFeedback`.

    Arguments:
      `ratio`: the share of entries that is sent, above 0 and at most 1. Default 0.01.
      `chunk`: numbers of a piece at most, from 8 to 32768, with "2bit" to 4096; with two phases only. Default 4096.
      `values`: how they are sent: "fp32", "bf16", "fp16" or "2bit". Default "fp32".
      `phases`: 2, or 1 to gather the entries of all ranks, in fp32 alone. Default 2.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.TopK(0.01, values="bf16")), layer, world_size=4
    ... ).wire_bytes
    60984
    """

    ratio: float = 0.01
    chunk: int = 4096
    values: str = "fp32"
    phases: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        checked_ratio(self.ratio)
        if not 8 <= self.chunk <= 1 << 15:
            raise ValueError(f"chunk must be from 8 to 32768 numbers, so that an index takes two bytes, got {self.chunk!r}")
        if self.values not in (*VALUES, TWO_BITS):
            raise ValueError(f"values must be one of {', '.join(VALUES)}, {TWO_BITS}, got {self.values!r}")
        if self.values == TWO_BITS and self.chunk > SHORT:
            raise ValueError(f"with values='2bit', chunk must be at most {SHORT}: an index has 12 bits; got {self.chunk}")
        if self.phases not in (1, 2):
            raise ValueError(f"phases must be 2, or 1 to gather the entries of all ranks, got {self.phases!r}")
        if self.phases == 1 and self.values != "fp32":
            raise ValueError(f"with phases=1, values are sent in fp32; got values={self.values!r}")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(0.1)
        yield cls(0.2, chunk=8, values="bf16")
        yield cls(0.2, chunk=16, values=TWO_BITS)
        yield cls(0.1, phases=1)

    def reduce(self, bucket: Bucket) -> Exchange:
        return self._two_phase(bucket) if self.phases == 2 else _gathered(bucket, self.ratio)

    def _two_phase(self, bucket: Bucket) -> Exchange:
        flat, world, rank = bucket.flat, bucket.world, bucket.rank
        plan = layout(tuple(view.numel() for view in bucket.views), self.ratio, self.chunk, world)
        if not plan.width:
            return Reduced(flat)
        form: Entries = TwoBits(plan) if self.values == TWO_BITS else Values(plan, VALUES[self.values])
        mine, rows = plan.spans[rank], plan.rows[rank]
        numbers = flat.float()
        sent = flat.new_zeros((world, form.size), dtype=torch.uint8)
        for owner in range(world):
            form.pick(sent[owner], numbers, plan.rows[owner])
        total = numbers[mine].clone()  # this rank's own numbers count as they are
        if world > 1:
            got = yield AllToAll(sent)
            for other in range(world):
                if other != rank:
                    form.add_to(total, got[other], rows, mine.start)
            total.mul_(1 / world)
        chosen = flat.new_zeros((1, form.size), dtype=torch.uint8)
        form.pick(chosen[0], total, rows, mine.start)
        if world > 1:
            chosen = yield AllGather(chosen[0])
        error = None
        if bucket.feedback:
            for owner in range(world):
                form.add_to(numbers, sent[owner], plan.rows[owner], weight=-1.0)
            # The mean lacks what its owner left out: as a part of the owner's own numbers, N times as much.
            form.add_to(total, chosen[rank if world > 1 else 0], rows, mine.start, weight=-1.0)
            numbers[mine] = total.mul_(world)
            error = flat.copy_(numbers)
        values = [form.read(chosen[owner], row)[1].view(-1) for owner in range(world) for row in plan.rows[owner]]

        def finish() -> None:
            mean = numbers.zero_()
            for owner in range(world):
                form.add_to(mean, chosen[owner], plan.rows[owner])
            flat.copy_(mean)

        # The mean takes the error's place once that has been taken.
        return Reduced(flat, error, finish, finite(torch.cat(values)))


def _gathered(bucket: Bucket, ratio: float) -> Exchange:
    flat, world = bucket.flat, bucket.world
    picks: list[Tensor] = [torch.empty(0, dtype=torch.int32, device=flat.device)]
    start = 0
    for view in bucket.views:
        size = view.numel()
        if size:
            count = max(1, math.ceil(ratio * size))
            picks.append(_largest(flat[start : start + size], count).int().add_(start))
        start += size
    index = torch.cat(picks)
    value = flat[index].float()

    rows = yield AllGather(torch.cat([index, value.view(torch.int32)]))
    count = index.numel()
    error = flat.index_fill_(0, index.long(), 0) if bucket.feedback else None

    def finish() -> None:
        mean = flat.zero_() if flat.dtype == torch.float32 else torch.zeros_like(flat, dtype=torch.float32)
        for row in rows:  # one rank after the other: no entry twice in a call, so the order of additions is fixed
            mean.index_add_(0, row[:count], row[count:].view(torch.float32), alpha=1 / world)
        if mean is not flat:
            flat.copy_(mean)

    # The mean takes the error's place once that has been taken.
    return Reduced(flat, error, finish, finite(rows[:, count:].contiguous().view(torch.float32)))


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Where the largest magnitudes are. Not-a-number counts as largest, so that it is sent and everybody learns of it.

    Of each piece first and then of those: torch keeps sixteen bytes for each number that it chooses from.
    """
    if len(numbers) <= PIECE:
        return numbers.abs().topk(count, sorted=False).indices
    pieces = enumerate(torch.split(numbers, PIECE))
    found = torch.cat([_largest(piece, min(count, len(piece))).add_(place * PIECE) for place, piece in pieces])
    return found[numbers[found].abs().topk(count, sorted=False).indices]


class Row(NamedTuple):
    """Neighbouring pieces of one length that one rank owns."""

    start: int  # in the bucket
    pieces: int
    length: int  # of a piece
    kept: int  # entries of a piece
    place: int  # of the first entry in the owner's message
    first: int  # pieces before it in the owner's message
    before: int  # groups of four entries before it there

    @property
    def stop(self) -> int:
        return self.start + self.pieces * self.length

    @property
    def fours(self) -> int:
        """Its groups of four entries, the last of which may have fewer."""
        return -(-self.pieces * self.kept // 4)


class Layout(NamedTuple):
    """How a bucket is cut, and who owns what."""

    rows: tuple[tuple[Row, ...], ...]  # by owner
    spans: tuple[slice, ...]  # by owner: its numbers
    width: int  # entries of a message; 0: the bucket is empty
    pieces: int  # of a message
    fours: int  # of a message


@lru_cache(maxsize=1024)
def layout(sizes: tuple[int, ...], ratio: float, chunk: int, world: int) -> Layout:
    """Each rank owns one N-th of the bucket, in equal pieces of at most `chunk` numbers that cross no parameter.

    Where ranks are many, some own nothing: a rank's part is never so small that one entry of it is more than the ratio asks.
    """
    count = sum(sizes)
    part = max(1, -(-count // world), math.ceil(1 / ratio))
    rows: list[list[Row]] = [[] for _ in range(world)]
    ends = [0] * world
    for owner, start, stop in shares(sizes, part):
        length = -(-(stop - start) // -(-(stop - start) // chunk))
        for first in range(start, stop, length):
            whole = min(length, stop - first)
            ends[owner] += _append(rows[owner], first, whole, max(1, math.ceil(ratio * whole)), ends[owner])
    spans = [slice(mine[0].start, mine[-1].stop) if mine else slice(0, 0) for mine in rows]
    lasts = [mine[-1] for mine in rows if mine]
    pieces = max((last.first + last.pieces for last in lasts), default=0)
    fours = max((last.before + last.fours for last in lasts), default=0)
    return Layout(tuple(map(tuple, rows)), tuple(spans), max(ends), pieces, fours)


def _append(rows: list[Row], start: int, length: int, kept: int, place: int) -> int:
    """One piece more, whose entries begin at `place`; a row goes on where it is as long as its own. Its entries."""
    last = rows[-1] if rows else None
    if last is not None and (last.stop, last.length) == (start, length):
        rows[-1] = last._replace(pieces=last.pieces + 1)
    else:
        so_far = (last.first + last.pieces, last.before + last.fours) if last is not None else (0, 0)
        rows.append(Row(start, 1, length, kept, place, *so_far))
    return kept


class Entries(ABC):
    """How entries stand in a message of bytes."""

    size: int  # of a message

    @abstractmethod
    def write(self, message: Tensor, row: Row, index: Tensor, value: Tensor) -> None:
        """Entries of a row's pieces, a line each."""

    @abstractmethod
    def read(self, message: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """Their indices within the pieces, and their values in fp32."""

    def pick(self, message: Tensor, numbers: Tensor, rows: Sequence[Row], origin: int = 0) -> None:
        """The largest of each piece, into a message; `numbers` begin at `origin` of the bucket."""
        for row in rows:
            pieces = numbers[row.start - origin : row.stop - origin].view(row.pieces, row.length)
            # Not-a-number counts as largest, so that it is sent and everybody learns of it.
            some = torch.split(pieces, max(1, PIECE // row.length))  # whose absolute values need little room
            index = torch.cat([each.abs().topk(row.kept, dim=1, sorted=False).indices for each in some])
            self.write(message, row, index, pieces.gather(1, index))

    def add_to(self, numbers: Tensor, message: Tensor, rows: Sequence[Row], origin: int = 0, weight: float = 1.0) -> None:
        """Add a message's values where they belong."""
        for row in rows:
            index, value = self.read(message, row)
            pieces = numbers[row.start - origin : row.stop - origin].view(row.pieces, row.length)
            pieces.scatter_add_(1, index, value.mul_(weight))


class Values(Entries):
    """Values of some type, then indices of two bytes."""

    def __init__(self, plan: Layout, dtype: torch.dtype) -> None:
        self._width, self._dtype = plan.width, dtype
        self.size = -(-self._width * (2 + dtype.itemsize) // 4) * 4  # the next message's values are aligned

    def write(self, message: Tensor, row: Row, index: Tensor, value: Tensor) -> None:
        place, (indices, values) = self._place(row), self._parts(message)
        indices[place] = index.view(-1).to(torch.int16)
        values[place] = value.view(-1).to(self._dtype)

    def read(self, message: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        place, (indices, values) = self._place(row), self._parts(message)
        shape = (row.pieces, row.kept)
        return indices[place].view(shape).long(), values[place].view(shape).to(torch.float32, copy=True)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        end = self._width * self._dtype.itemsize
        return message[end : end + 2 * self._width].view(torch.int16), message[:end].view(self._dtype)

    @staticmethod
    def _place(row: Row) -> slice:
        return slice(row.place, row.place + row.pieces * row.kept)


class TwoBits(Entries):
    """Fourteen bits an entry, four entries in seven bytes: index, sign, and which of two sizes. Then the sizes, in bf16."""

    def __init__(self, plan: Layout) -> None:
        self._codes = -(-7 * plan.fours // 2) * 2  # bytes; what stands behind them is aligned
        self.size = self._codes + 4 * plan.pieces

    def write(self, message: Tensor, row: Row, index: Tensor, value: Tensor) -> None:
        sizes = value.abs()
        large = sizes >= sizes.mean(1, keepdim=True)
        means = [(sizes * which).sum(1) / which.sum(1).clamp_min(1) for which in (large.logical_not(), large)]
        self._sizes(message, row)[:] = torch.stack(means, 1).to(torch.bfloat16)
        code = index | large.long() << 12 | (value < 0).long() << 13
        codes = message.new_zeros(4 * row.fours, dtype=torch.int64)
        codes[: code.numel()] = code.view(-1)
        shifts = torch.arange(0, 56, 14, device=message.device)
        words = (codes.view(-1, 4) << shifts).sum(1)
        self._bytes(message, row)[:] = words.view(torch.uint8).view(-1, 8)[:, :7]

    def read(self, message: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        eights = message.new_zeros((row.fours, 8))
        eights[:, :7] = self._bytes(message, row)
        shifts = torch.arange(0, 56, 14, device=message.device)
        codes = (eights.view(torch.int64) >> shifts).view(-1)[: row.pieces * row.kept].view(row.pieces, row.kept) & 0x3FFF
        sizes = self._sizes(message, row).float().gather(1, codes >> 12 & 1)
        return codes & 0xFFF, torch.where((codes >> 13).bool(), -sizes, sizes)

    def _bytes(self, message: Tensor, row: Row) -> Tensor:
        return message[7 * row.before : 7 * (row.before + row.fours)].view(-1, 7)

    def _sizes(self, message: Tensor, row: Row) -> Tensor:
        start = self._codes + 4 * row.first
        return message[start : start + 4 * row.pieces].view(torch.bfloat16).view(-1, 2)
