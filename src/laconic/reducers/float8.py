"""Eight-bit floats."""

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
from laconic.reducers.codecs import Codec, codec


def _of(name: str, dtype: torch.dtype) -> Codec:
    largest = torch.finfo(dtype).max
    return codec(name, __name__, 4, dtype, lambda scaled: scaled.clamp_(-largest, largest), Tensor.float, limit=largest)


FORMATS = {"e4m3": _of("e4m3", torch.float8_e4m3fn), "e5m2": _of("e5m2", torch.float8_e5m2)}


@dataclass(frozen=True)
class Float8(Reducer):
    """An all-reduce of 8-bit floats, with one fp32 scale for each block.

    Maths: as `Quantized`, with torch's float8 types for whole numbers: a block is scaled to the type's range and rounded to
    3 (e4m3) or 2 (e5m2) bits of mantissa. Small numbers beside a large one keep their digits, which whole numbers do not
    give them; the largest are coarser.

    Bytes: 2(N-1)/N * n * (1 + 4/block), in an all-to-all and an all-gather (N ranks, n numbers).

    Memory: none.

    Paper: gradients in 8-bit floats: Peng et al. 2023, arXiv:2310.18313 (FP8-LM). Scales by block are
    this reducer's own.

    Arguments:
      `format`: "e4m3", of more precision, or "e5m2", of more range. Default "e4m3".
      `block`: numbers that share a scale, at least 8. Default 512.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 1.008n
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.Float8()), layer, world_size=4
    ... ).wire_bytes
    1511736
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
        return two_phase(bucket, FORMATS[self.format], self.block)

    def kernels(self) -> list[Kernel]:
        return FORMATS[self.format].kernels()
