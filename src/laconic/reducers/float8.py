"""Eight-bit floats."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.exchange import Exchange
from laconic.reducers.base import Reducer
from laconic.reducers.blockwise import Codec, two_phase

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8(Reducer):
    """An all-reduce of 8-bit floats, with one fp32 scale for each block.

    Maths: as `Quantized`, with torch's float8 types for whole numbers: a block is scaled to the type's range and rounded to
    3 (e4m3) or 2 (e5m2) bits of mantissa. Small numbers beside a large one keep their digits, which whole numbers do not
    give them; the largest are coarser.
    Bytes: 2(N-1)/N * n * (1 + 4/block), in an all-to-all and an all-gather.
    Paper: Peng et al. 2023, arXiv:2310.18313 (FP8-LM).

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.Float8("e5m2")))
    "ddp(reducer=Float8(format='e5m2'))"
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 512

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.block < 8:
            raise ValueError(f"block must be at least 8 numbers, got {self.block}: its scale takes 4 bytes")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls()
        yield cls("e5m2")

    def reduce(self, bucket: Bucket) -> Exchange:
        return two_phase(bucket, Small(FORMATS[self.format]), self.block)


class Small(Codec):
    """A float8 type of torch's."""

    per_word = 4

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.limit = dtype, torch.finfo(dtype).max

    def encode(self, numbers: Tensor, out: Tensor, noise: Tensor | None) -> None:
        out.copy_(numbers.clamp_(-self.limit, self.limit))

    def buffer(self, message: Tensor, count: int) -> Tensor:
        return message.view(self.dtype)

    def seal(self, codes: Tensor, message: Tensor) -> None:
        """The codes are in the message."""

    def open(self, message: Tensor, count: int) -> Tensor:
        return message.view(self.dtype)
