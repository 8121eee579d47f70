"""Whole numbers of 8, 4 or 2 bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.exchange import Exchange
from laconic.reducers.base import Reducer
from laconic.reducers.blockwise import Codec, two_phase
from laconic.reducers.randomness import uniform

BLOCKS = {8: 512, 4: 128, 2: 256}  # numbers that share a scale, by bits


@dataclass(frozen=True)
class Quantized(Reducer):
    """A true quantized all-reduce: 8-, 4- or 2-bit whole numbers, with one fp32 scale for each block.

    Maths: a block b of numbers becomes round(b / s) with s = max|b| / L, L = 127 or 7. With 2 bits it becomes -3, -1, 1 or 3
    times s = 0.624 mean|b|, which is the best even spacing for normal numbers; larger ones are cut. Each rank owns one N-th of
    the bucket, collects everybody's codes of it, sums in fp32, encodes the mean once more and hands it to all: two roundings,
    at any N. With 8 and 4 bits each is off by at most s/2 (nearest) or s (stochastic, which is right on average). Blocks
    cross no parameter.
    Bytes: 2(N-1)/N * n * (bits/8 + 4/block), in an all-to-all and an all-gather; scales travel with the codes.
    Paper: Alistarh et al. 2017, arXiv:1610.02132 (QSGD); Wang et al. 2023, arXiv:2306.10209 (ZeRO++).

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.Quantized(bits=4)))
    'ddp(reducer=Quantized(bits=4))'
    """

    bits: Literal[2, 4, 8] = 8
    block: int | None = None  # None: 512 for 8 bits, 128 for 4, 256 for 2
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in BLOCKS:
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}; for one bit use Sign(), for 16 Cast()")
        if self.block is not None and self.block < 8:
            raise ValueError(f"block must be at least 8 numbers, got {self.block}: its scale takes 4 bytes")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        if self.rounding == "stochastic" and self.bits == 2:
            raise ValueError(
                "with 2 bits large numbers are cut, so rounding='stochastic' would not be right on average; use 4 bits"
            )

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(8)
        yield cls(4)
        yield cls(4, block=16, rounding="stochastic")
        yield cls(2)

    def reduce(self, bucket: Bucket) -> Exchange:
        noise = self._noise(bucket) if self.rounding == "stochastic" else None
        codec: Codec = Int8() if self.bits == 8 else Int4() if self.bits == 4 else Int2()
        return two_phase(bucket, codec, self.block or BLOCKS[self.bits], noise, own_as_is=self.bits == 2)

    def _noise(self, bucket: Bucket) -> Tensor:
        device = bucket.flat.device
        keys = [(self.seed, bucket.exchanges, bucket.rank, name) for name in bucket.names]
        return torch.cat([uniform((view.numel(),), device, *key) for view, key in zip(bucket.views, keys, strict=True)])


class Int8(Codec):
    """-127 ... 127, a byte each."""

    limit, per_word = 127.0, 4

    def encode(self, numbers: Tensor, out: Tensor, noise: Tensor | None) -> None:
        out.copy_(_whole(numbers, noise, self.limit))

    def buffer(self, message: Tensor, count: int) -> Tensor:
        return message.view(torch.int8)

    def seal(self, codes: Tensor, message: Tensor) -> None:
        """The codes are in the message."""

    def open(self, message: Tensor, count: int) -> Tensor:
        return message.view(torch.int8)


class Int4(Codec):
    """-7 ... 7, two in a byte."""

    limit, per_word = 7.0, 8

    def encode(self, numbers: Tensor, out: Tensor, noise: Tensor | None) -> None:
        out.copy_(_whole(numbers, noise, self.limit))

    def buffer(self, message: Tensor, count: int) -> Tensor:
        return message.new_zeros(count, dtype=torch.int8)

    def seal(self, codes: Tensor, message: Tensor) -> None:
        pairs = codes.view(-1, 2)
        torch.bitwise_or(pairs[:, 0].bitwise_and(15), pairs[:, 1].bitwise_left_shift(4), out=message.view(torch.int8))

    def open(self, message: Tensor, count: int) -> Tensor:
        signed = message.view(torch.int8)  # shifting right copies the sign
        return torch.stack([signed.bitwise_left_shift(4).bitwise_right_shift_(4), signed.bitwise_right_shift(4)], -1).view(-1)


class Int2(Codec):
    """-3, -1, 1 or 3, four in a byte."""

    limit, per_word = 3.0, 16

    def scale(self, sizes: Tensor) -> Tensor:
        return sizes.mean(1).mul_(0.624)

    def encode(self, numbers: Tensor, out: Tensor, noise: Tensor | None) -> None:
        out.copy_(numbers.mul_(0.5).floor_().mul_(2).add_(1).clamp_(-3, 3))

    def buffer(self, message: Tensor, count: int) -> Tensor:
        return message.new_ones(count, dtype=torch.int8)

    def seal(self, codes: Tensor, message: Tensor) -> None:
        fours = codes.add(3).bitwise_right_shift_(1).view(torch.uint8).view(-1, 4)  # 0 ... 3
        for place in range(1, 4):
            fours[:, 0].bitwise_or_(fours[:, place].bitwise_left_shift(2 * place))
        message.copy_(fours[:, 0])

    def open(self, message: Tensor, count: int) -> Tensor:
        parts = [message.bitwise_right_shift(2 * place).bitwise_and_(3) for place in range(4)]
        return torch.stack(parts, -1).view(-1).view(torch.int8).mul_(2).sub_(3)


def _whole(numbers: Tensor, noise: Tensor | None, limit: float) -> Tensor:
    # fp32 rounds limit + noise up to limit + 1 where the noise is next to 1; as a code, that would be a negative number.
    return numbers.round_() if noise is None else numbers.add_(noise).floor_().clamp_max_(limit)
