"""Two-phase all-reduce of codes with a scale for each block: `Quantized`, `Float8`, `Ternary` and `Sign` are made of it."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather, AllToAll
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import finite
from laconic.reducers.codecs import Codec

SHORT = 512  # what is left of a parameter behind its whole blocks is taken together with others', up to so many numbers


class Run(NamedTuple):
    """`blocks` neighbouring blocks of the same length."""

    start: int
    blocks: int
    length: int
    scale: int  # the place of the first block's scale

    @property
    def numbers(self) -> slice:
        """Where its numbers are."""
        return slice(self.start, self.start + self.blocks * self.length)

    @property
    def scales(self) -> slice:
        """Where its scales are."""
        return slice(self.scale, self.scale + self.blocks)


class Part(NamedTuple):
    """What one rank owns of a bucket: runs of blocks, and short blocks where a parameter or the part ends."""

    runs: tuple[Run, ...]
    short: tuple[tuple[int, int], ...]  # start and length
    blocks: int  # of both kinds

    @property
    def short_scales(self) -> slice:
        """Where the scales of short blocks are: last."""
        return slice(self.blocks - len(self.short), self.blocks)


class Layout(NamedTuple):
    """How a bucket is cut: a part for each rank, blocks that cross neither a parameter nor a part."""

    chunk: int  # numbers a rank owns
    scales: int  # scales in a message
    parts: tuple[Part, ...]  # places are counted from each one's start


def shares(sizes: Iterable[int], part: int) -> Iterator[tuple[int, int, int]]:
    """A bucket of parameters of these sizes, cut wherever a parameter or a rank's part of so many numbers ends.

    >>> list(shares([3, 4], 5))  # owner, start, stop
    [(0, 0, 3), (0, 3, 5), (1, 5, 7)]
    """
    end = 0
    for size in sizes:
        start, end = end, end + size
        while start < end:
            stop = min(end, (start // part + 1) * part)
            yield start // part, start, stop
            start = stop


@lru_cache(maxsize=1024)
def layout(sizes: tuple[int, ...], block: int, world: int, align: int) -> Layout:
    """The layout of a bucket with parameters of these sizes."""
    chunk = -(-sum(sizes) // (world * align)) * align
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for owner, start, stop in shares(sizes, chunk):
        pieces[owner].append((start - owner * chunk, stop - owner * chunk))
    parts = tuple(_part(each, block) for each in pieces)
    return Layout(chunk, max(part.blocks for part in parts), parts)


def _part(pieces: Iterable[tuple[int, int]], block: int) -> Part:
    runs: list[Run] = []
    short: list[tuple[int, int]] = []
    blocks = 0
    for start, stop in pieces:
        whole, rest = divmod(stop - start, block)
        if whole and runs and (runs[-1].numbers.stop, runs[-1].length) == (start, block):
            runs[-1] = runs[-1]._replace(blocks=runs[-1].blocks + whole)
        elif whole:
            runs.append(Run(start, whole, block, blocks))
        blocks += whole
        if rest > SHORT:
            runs.append(Run(stop - rest, 1, rest, blocks))
            blocks += 1
        elif rest:
            short.append((stop - rest, rest))
    return Part(tuple(runs), tuple(short), blocks + len(short))


def _table(short: tuple[tuple[int, int], ...], like: Tensor) -> "_Table":
    # A tensor of another kind, such as one that is only traced, can't be picked from by tensors that are kept.
    return _kept_table(short, like.device) if type(like) is Tensor else _new_table(short, like.device)


def _new_table(short: tuple[tuple[int, int], ...], device: torch.device) -> "_Table":
    block = max(length for _, length in short)
    places = [torch.arange(start, start + length) for start, length in short]
    seats = [torch.arange(row * block, row * block + length) for row, (_, length) in enumerate(short)]
    # Two rows at least: a compiled kernel takes no less.
    lengths = torch.tensor([float(length) for _, length in short] + [1.0] * (2 - len(short)))
    return _Table(torch.cat(places).to(device), torch.cat(seats).to(device), lengths.to(device), block)


_kept_table = lru_cache(maxsize=4096)(_new_table)


class _Table(NamedTuple):
    """Short blocks, a row each, and zeros behind them.

    So they take a few calls together, and not a few for each: a model may have more vectors than matrices.
    """

    places: Tensor  # where their numbers are in the part
    seats: Tensor  # and where in the table, row by row
    lengths: Tensor
    block: int

    def fill(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The table of these numbers."""
        table = source.new_zeros(len(self.lengths) * self.block, dtype=dtype)
        return table.index_copy_(0, self.seats, source.index_select(0, self.places).to(dtype)).view(-1, self.block)

    def numbers(self, table: Tensor) -> Tensor:
        """The numbers in a table, without the zeros."""
        return table.view(-1).index_select(0, self.seats)


def two_phase(
    bucket: Bucket,
    codec: Codec,
    block: int,
    noise: Tensor | None = None,
    *,
    own_as_is: bool = False,
) -> Exchange:
    """All-to-all of encoded parts, sum in fp32, encode once more, all-gather; every rank decodes the same bytes.

    What the owner of a part loses in the second rounding concerns all N ranks' sum; it is added, times N, to the owner's
    own error, so that the mean of all errors is exactly what is missing. With `own_as_is`, a rank's own part, which never
    leaves it, goes into the sum as it is: with error feedback, what was missing in the mean then comes back in full.
    """
    flat, world = bucket.flat, bucket.world
    if flat.numel() == 0:
        return Reduced(flat)
    # Whole words of codes, so that the scales behind them are aligned.
    plan = layout(tuple(view.numel() for view in bucket.views), block, world, codec.per_word)
    coder = _Coder(codec, plan, bucket.fused)
    error = flat if bucket.feedback else None
    spans = [slice(min(rank * plan.chunk, flat.numel()), min((rank + 1) * plan.chunk, flat.numel())) for rank in range(world)]
    mine, part = spans[bucket.rank], plan.parts[bucket.rank]

    own = flat[mine].to(torch.float32, copy=True) if own_as_is and world > 1 else None
    message = flat.new_empty((world, coder.bytes), dtype=torch.uint8)
    for rank, (row, span) in enumerate(zip(message, spans, strict=True)):
        if own is not None and rank == bucket.rank:
            continue  # nobody reads it
        coder.encode(flat[span], plan.parts[rank], row, None if noise is None else noise[span], left=error is not None)
    if world > 1:  # alone, what would be decoded is the mean
        rows = yield AllToAll(message)
        del message, row  # what has been read makes room for what comes
        total = flat.new_empty(mine.stop - mine.start, dtype=torch.float32)
        for number, row in enumerate(rows):
            if own is not None and number == bucket.rank:
                total.copy_(own) if number == 0 else total.add_(own)
            else:
                coder.decode(row, part, total, add=number > 0)
        total.mul_(1 / world)
        again = flat.new_empty(coder.bytes, dtype=torch.uint8)
        coder.encode(total, part, again, None if noise is None else noise[mine], left=error is not None)
        if error is not None and own is not None:
            error[mine] = total.mul_(world)
        elif error is not None:
            error[mine].add_(total, alpha=world)
        del rows, row, total, own
        message = yield AllGather(again)

    def finish() -> None:
        for row, span, part in zip(message, spans, plan.parts, strict=True):
            coder.decode(row, part, flat[span], add=False)

    if error is None:
        finish()
        return Reduced(flat)
    # Numbers are finite where their scales are. The mean takes the error's place once that has been taken.
    return Reduced(flat, error, finish, finite(message[:, coder.codes_bytes :].contiguous().view(torch.float32)))


class _Coder(NamedTuple):
    """Encodes and decodes parts of one bucket."""

    codec: Codec
    plan: Layout
    fused: bool

    @property
    def codes_bytes(self) -> int:
        return self.plan.chunk // self.codec.per_word * 4

    @property
    def bytes(self) -> int:
        """Of a message: codes, then scales."""
        return self.codes_bytes + 4 * self.plan.scales

    def encode(self, source: Tensor, part: Part, message: Tensor, noise: Tensor | None, *, left: bool) -> None:
        """Encode a part into its message; with `left`, it becomes what the codes leave out."""
        codes = self.codec.room(message[: self.codes_bytes], self.plan.chunk)
        scales = message[self.codes_bytes :].view(torch.float32)
        scales[part.blocks :] = 0
        for run in part.runs:
            matrix, chance = source[run.numbers].view(-1, run.length), None
            if noise is not None:
                chance = noise[run.numbers].view(-1, run.length)
            numbers = matrix.float()
            self._find_scales(numbers, scales[run.scales], run.length)
            self._quantize(numbers, chance, codes[run.numbers].view(-1, run.length), scales[run.scales], left=left)
            if left and numbers.dtype != matrix.dtype:
                matrix.copy_(numbers)
        if part.short:
            table = _table(part.short, source)
            numbers = table.fill(source, torch.float32)
            chance = None if noise is None else table.fill(noise, torch.float32)
            written = torch.empty_like(numbers, dtype=codes.dtype)
            found = scales.new_empty(len(numbers))
            self._find_scales(numbers, found, table.lengths)
            self._quantize(numbers, chance, written, found, left=left)
            scales[part.short_scales] = found[: len(part.short)]
            _bytes(codes).index_copy_(0, table.places, table.numbers(_bytes(written)))
            if left:
                source.index_copy_(0, table.places, table.numbers(numbers).to(source.dtype))
        self.codec.seal(codes, message[: self.codes_bytes], fused=self.fused)

    def decode(self, message: Tensor, part: Part, out: Tensor, *, add: bool) -> None:
        """Write what a message says of a part, or add it to what is there."""
        codes = self.codec.open(message[: self.codes_bytes], self.plan.chunk, fused=self.fused)
        scales = message[self.codes_bytes :].view(torch.float32)
        kernel = self.codec.add if add else self.codec.decode
        for run in part.runs:
            matrix = out[run.numbers].view(-1, run.length)
            numbers = matrix if matrix.dtype == torch.float32 else torch.empty_like(matrix, dtype=torch.float32)
            kernel(codes[run.numbers].view(-1, run.length), scales[run.scales], numbers, fused=self.fused)
            if numbers is not matrix:
                matrix.copy_(numbers)
        if part.short:
            table = _table(part.short, out)
            written = table.fill(_bytes(codes), torch.int8).view(codes.dtype)
            numbers = torch.empty_like(written, dtype=torch.float32)
            factors = scales.new_zeros(len(numbers))
            factors[: len(part.short)] = scales[part.short_scales]
            self.codec.decode(written, factors, numbers, fused=self.fused)
            found = table.numbers(numbers).to(out.dtype)
            if add:
                out.index_add_(0, table.places, found)
            else:
                out.index_copy_(0, table.places, found)

    def _find_scales(self, numbers: Tensor, scales: Tensor, lengths: Tensor | int) -> None:
        if self.codec.mean is not None:
            torch.linalg.vector_norm(numbers, 1, dim=1, out=scales)
            scales.mul_(self.codec.mean).div_(lengths)

    def _quantize(self, numbers: Tensor, noise: Tensor | None, codes: Tensor, scales: Tensor, *, left: bool) -> None:
        if noise is None:
            kernel = self.codec.quantize_left if left else self.codec.quantize
            kernel(numbers, codes, scales, fused=self.fused)
        else:
            chosen = self.codec.stochastic_left if left else self.codec.stochastic
            assert chosen is not None, "this codec has no stochastic rounding"
            chosen(numbers, noise, codes, scales, fused=self.fused)


def _bytes(codes: Tensor) -> Tensor:
    # Not every code's type can be picked by index.
    return codes.view(torch.int8)
