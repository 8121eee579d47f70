"""Whole numbers of 8, 4 or 2 bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.exchange import Exchange
from laconic.kernels.kernel import Kernel
from laconic.reducers.base import Reducer
from laconic.reducers.blockwise import two_phase
from laconic.reducers.codecs import Digits, whole_numbers
from laconic.reducers.randomness import uniform

BLOCKS = {8: 512, 4: 128, 2: 256}  # numbers that share a scale, by bits


CODECS = {
    8: whole_numbers("int8", __name__, Tensor.round_, limit=127.0),
    4: whole_numbers("int4", __name__, Tensor.round_, Digits(16, -8, 1), limit=7.0),
    2: whole_numbers(
        "int2", __name__, lambda scaled: scaled.mul_(0.5).floor_().mul_(2).add_(1).clamp_(-3, 3), Digits(4, -3, 2), mean=0.624
    ),
}


@dataclass(frozen=True)
class Quantized(Reducer):
    """A true quantized all-reduce: 8-, 4- or 2-bit whole numbers, with one fp32 scale for each block.

    Maths: a block b of numbers becomes round(b / s) with s = max|b| / L, L = 127 or 7. With 2 bits it becomes -3, -1, 1 or 3
    times s = 0.624 mean|b|, which is the best even spacing for normal numbers; larger ones are cut. Each rank owns one N-th of
    the bucket, collects everybody's codes of it, sums in fp32, encodes the mean once more and hands it to all: two roundings,
    at any N. With 8 and 4 bits each is off by at most s/2 (nearest) or s (stochastic, which is right on average). Blocks
    cross no parameter.

    Bytes: 2(N-1)/N * n * (bits/8 + 4/block), in an all-to-all and an all-gather (N ranks, n numbers).

    Memory: none.

    Paper: quantized gradients: Alistarh et al. 2017, arXiv:1610.02132 (QSGD). Two phases: Wang et al. 2023, arXiv:2306.10209
    (ZeRO++).

    Not: unbiased, unless `rounding` is "stochastic"; with 4 and 2 bits, wrap it in `ErrorFeedback`.

    Arguments:
      `bits`: 8, 4 or 2. Default 8.
      `block`: numbers that share a scale, at least 8; None: 512 for 8 bits, 128 for 4, 256 for 2. Default None.
      `rounding`: "nearest", or "stochastic", which 2 bits don't have. Default "nearest".
      `seed`: of the noise of stochastic rounding. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 1.008n
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.Quantized(8)), layer, world_size=4
    ... ).wire_bytes
    1511736
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
        return two_phase(bucket, CODECS[self.bits], self.block or BLOCKS[self.bits], noise, own_as_is=self.bits == 2)

    def kernels(self) -> list[Kernel]:
        return CODECS[self.bits].kernels(stochastic=self.rounding == "stochastic")

    def _noise(self, bucket: Bucket) -> Tensor:
        device = bucket.flat.device
        keys = [(self.seed, bucket.exchanges, bucket.rank, name) for name in bucket.names]
        return torch.cat([uniform((view.numel(),), device, *key) for view, key in zip(bucket.views, keys, strict=True)])
