"""Sixteen bits on the wire."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather, AllReduce, AllToAll
from laconic.comm.exchange import Exchange, Reduced
from laconic.kernels.kernel import PIECE
from laconic.reducers.base import Reducer, finite

FIRST = 1 << 16  # numbers of the piece that goes through a copy when a message takes the place of what it is made of
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Reducer):
    """Send 16-bit floats; by default still sum in 32.

    Maths: accumulate="fp32": each rank owns one N-th of the bucket, collects everybody's 16-bit copy of it, sums in fp32,
    rounds the mean once and hands it to all; two roundings, whatever N is. accumulate="wire": the backend's all-reduce
    adds in 16 bits; N roundings, one message fewer. fp16 reaches 65504 only, so with accumulate="fp32" other numbers are
    scaled by 2^-⌈log2 N⌉ first, which costs no mantissa bit: what a rank sends may be N times as large as the mean.

    Bytes: 2(N-1)/N * 2n either way, in an all-to-all and an all-gather, or an all-reduce (N ranks, n numbers).

    Memory: none.

    Not: for tiny gradients in fp16: what is below 6e-8 * N comes out as zero. bf16 has the range of fp32.

    Arguments:
      `dtype`: "bf16" or "fp16", or torch's own. Default "bf16".
      `accumulate`: where 16-bit numbers are summed: "fp32", by their owner, or "wire", by the backend. Default "fp32".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # 2(N-1)/N * 2n
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.Cast("bf16")), layer, world_size=4
    ... ).wire_bytes
    3000000
    """

    dtype: str = "bf16"
    accumulate: Literal["fp32", "wire"] = "fp32"

    def __post_init__(self) -> None:
        names = {dtype: name for name, dtype in DTYPES.items()}
        if isinstance(self.dtype, torch.dtype) and self.dtype in names:
            object.__setattr__(self, "dtype", names[self.dtype])
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.accumulate not in ("fp32", "wire"):
            raise ValueError(f"accumulate must be 'fp32' or 'wire', got {self.accumulate!r}")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        for dtype in DTYPES:
            yield cls(dtype)
            yield cls(dtype, accumulate="wire")

    def reduce(self, bucket: Bucket) -> Exchange:
        flat, world, dtype = bucket.flat, bucket.world, DTYPES[self.dtype]
        count = flat.numel()
        scale = self._scale(flat.dtype, world)

        error = None
        if bucket.feedback or self.accumulate == "wire" or world == 1:
            message = flat.new_empty(-(-count // world) * world, dtype=dtype)
            message[count:] = 0
            message[:count] = flat if scale == 1 else flat.mul_(scale)
            error = _left_out(flat, message[:count]).mul_(1 / scale) if bucket.feedback else None
        else:
            message = _in_place(flat, -(-count // world) * world, dtype, scale)

        if self.accumulate == "wire" or world == 1:  # alone, there is nothing to sum
            mean = yield AllReduce(message)
        else:
            rows = yield AllToAll(message.view(world, -1))
            mine = message.view(world, -1)[0]  # the mean goes where something has been read
            start = bucket.rank * len(mine)
            _average(rows, mine, scale, None if error is None else error[start : start + len(mine)])
            del rows  # which makes room for what comes
            mean = (yield AllGather(mine)).view(-1)

        def finish() -> None:
            flat.copy_(mean[:count])

        if error is None:
            finish()
            return Reduced(flat)
        return Reduced(flat, error, finish, finite(mean[:count]))

    def _scale(self, dtype: torch.dtype, world: int) -> float:
        # fp16 is sent as fp16, as it is: identical replicas then come back bit for bit.
        # In an all-reduce, 1/N comes after the cast, and shrinking twice would lose small numbers instead.
        if self.dtype == "bf16" or dtype == torch.float16 or self.accumulate == "wire":
            return 1.0
        return float(2.0 ** -(world - 1).bit_length())


def _in_place(flat: Tensor, count: int, dtype: torch.dtype, scale: float) -> Tensor:
    """scale * flat and zeros behind it, `count` numbers of that type, in the memory of `flat`, which is lost.

    From front to back, so that a number has been read before another is written there: no more memory, fewer pages to touch.
    """
    numbers = flat.numel()
    room = flat.view(dtype) if flat.itemsize > dtype.itemsize else flat[:0]
    message = room[:count] if count <= len(room) else flat.new_empty(count, dtype=dtype)
    start = 0
    while start < numbers:
        stop = min(max(2 * start, FIRST), start + PIECE, numbers)
        piece = flat[start:stop]
        if scale != 1:
            piece.mul_(scale)
        message[start:stop] = piece if start else piece.to(dtype)  # the first is written where it is read
        start = stop
    message[numbers:] = 0
    return message


def _average(rows: Tensor, mine: Tensor, scale: float, error: Tensor | None) -> None:
    """The mean of the rows in fp32, rounded once into `mine`; `error` is the owner's part of what was left out."""
    world = len(rows)
    for start in range(0, len(mine), PIECE):
        piece = slice(start, start + PIECE)
        total = rows[0, piece].float()  # and not sum(): that starts from +0, and two -0 would come out as +0
        for row in rows[1:]:
            total += row[piece]
        mine[piece] = total.mul_(1 / (world * scale))
        if error is not None:  # the second rounding is of all N ranks' sum: the owner bears N times its loss
            part = error[piece]
            part.add_(total.sub_(mine[piece])[: len(part)], alpha=world)


def _left_out(flat: Tensor, message: Tensor) -> Tensor:
    """flat - message, in place; in pieces, because torch copies what is of another type before it subtracts it."""
    for numbers, sent in zip(torch.split(flat, PIECE), torch.split(message, PIECE), strict=True):
        numbers.sub_(sent)
    return flat
