"""One bit a number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Exchange, Reduced
from laconic.kernels.kernel import Kernel
from laconic.reducers.base import Reducer
from laconic.reducers.blockwise import two_phase
from laconic.reducers.codecs import Digits, whole_numbers

_PIECE = 1 << 17  # signs that are unpacked at a time
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1, seen as one number: their bits meet in the highest byte


BITS = whole_numbers("bits", __name__, lambda scaled: scaled.ge(0).float().mul_(2).sub_(1), Digits(2, -1, 2), mean=1.0)


@dataclass(frozen=True)
class Sign(Reducer):
    """Send the sign of every entry, and one size for each block.

    Maths: a block b of numbers becomes sign(b) * mean|b|, where the sign of 0 is +. With two phases each rank owns one N-th of
    the bucket: it collects everybody's signs of its part, adds its own numbers there as they are, and sends the signs of the
    mean to all. What the second signs leave out is in the owner's error. With one phase every rank gathers the signs of all,
    with one size for each parameter, and the mean is the mean of what all ranks sent.

    Bytes: 2(N-1)/N * n * (1/8 + 4/block), in an all-to-all and an all-gather: 1/21 of fp32 at any N. With one phase
    (N-1) * (n/8 + 4 per parameter) in one all-gather, which grows with N: from N = 64 on it is more than fp32.

    Memory: none.

    Paper: Bernstein et al. 2018, arXiv:1802.04434; Karimireddy et al. 2019, arXiv:1901.09847. Two phases: Tang et al. 2021,
    arXiv:2102.02888 (1-bit Adam).

    Not: unbiased: wrap it in `ErrorFeedback`.

    Arguments:
      `block`: numbers that share a size, at least 8; with two phases only. Default 64.
      `phases`: 2, or 1 to gather the signs of all ranks. Default 2.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.ErrorFeedback(laconic.Sign())), layer, world_size=4
    ... ).wire_bytes
    281280
    """

    block: int = 64
    phases: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        if self.block < 8:
            raise ValueError(f"block must be at least 8 numbers, got {self.block!r}: its size takes 4 bytes")
        if self.phases not in (1, 2):
            raise ValueError(f"phases must be 2, or 1 to gather the signs of all ranks, got {self.phases!r}")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls()
        yield cls(block=16)
        yield cls(phases=1)

    def reduce(self, bucket: Bucket) -> Exchange:
        return two_phase(bucket, BITS, self.block, own_as_is=True) if self.phases == 2 else _gathered(bucket)

    def kernels(self) -> list[Kernel]:
        return BITS.kernels() if self.phases == 2 else []


def _gathered(bucket: Bucket) -> Exchange:
    flat, views = bucket.flat, bucket.views
    count = flat.numel()
    sizes = [view.numel() for view in views]
    sums = [piece.abs().sum(dtype=torch.float32) for piece in torch.split(flat, sizes)]
    scales = torch.stack([total / max(size, 1) for total, size in zip(sums, sizes, strict=True)])

    bits = pack(flat >= 0)
    rows = yield AllGather(torch.cat([bits, scales.view(torch.uint8)]) if count else bits)
    mean = torch.zeros_like(flat, dtype=torch.float32)
    for row in rows:
        _add(mean, row, len(bits), views, 1 / bucket.world)
    error = None
    if bucket.feedback:
        left = flat.float()
        _add(left, rows[bucket.rank], len(bits), views, -1.0)
        error = flat.copy_(left)
    return Reduced(mean.to(flat.dtype), error)


def _add(total: Tensor, row: Tensor, width: int, views: Sequence[Tensor], weight: float) -> None:
    """Add a message's signs in their sizes. In pieces: as floats, the signs take as much room as the bucket."""
    if total.numel() == 0:
        return
    scales, stop = row[width:].clone().view(torch.float32).mul_(weight), 0
    for view, scale in zip(views, scales, strict=True):
        start, stop = stop, stop + view.numel()
        for begin in range(start, stop, _PIECE):
            end = min(begin + _PIECE, stop)
            signs = unpack(row[begin // 8 : -(-end // 8)])[begin % 8 :]
            total[begin:end].addcmul_(signs[: end - begin], scale)


def pack(flags: Tensor) -> Tensor:
    """Eight flags in a byte."""
    eights = flags.new_zeros(-(-flags.numel() // 8) * 8, dtype=torch.uint8)
    eights[: flags.numel()] = flags
    return (eights.view(torch.int64) * _GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """+1 or -1 for each of eight flags in a byte."""
    places = torch.arange(8, device=packed.device)
    table = (torch.arange(256, device=packed.device)[:, None] >> places & 1).float().mul_(2).sub_(1)
    return table[packed.int()].view(-1)
