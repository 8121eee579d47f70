"""One bit a number."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Exchange, Reduced
from laconic.comm.flat_tensors import unflatten
from laconic.reducers.base import Reducer

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1, seen as one number: their bits meet in the highest byte


@dataclass(frozen=True)
class Sign(Reducer):
    """Send the sign of every entry, and one size for each parameter.

    Maths: per parameter of s entries, sign(x) * ‖x‖₁ / s, where the sign of 0 is +; the mean of what all ranks sent. Biased:
    wrap it in ErrorFeedback.
    Bytes: (N-1) * (n/8 + 4 per parameter), in one all-gather: it grows with N, and from N = 64 on it is more than fp32.
    Paper: Bernstein et al. 2018, arXiv:1802.04434; Karimireddy et al. 2019, arXiv:1901.09847.

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.Sign()))
    'ddp(reducer=Sign())'
    """

    def reduce(self, bucket: Bucket) -> Exchange:
        flat, views = bucket.flat, bucket.views
        count = flat.numel()
        sizes = [view.numel() for view in views]
        sums = [piece.abs().sum(dtype=torch.float32) for piece in torch.split(flat, sizes)]
        scales = torch.stack([total / max(size, 1) for total, size in zip(sums, sizes, strict=True)])

        bits = pack(flat >= 0)
        rows = yield AllGather(torch.cat([bits, scales.view(torch.uint8)]) if count else bits)
        mean = torch.zeros_like(flat, dtype=torch.float32)
        for row in rows:
            self._add(mean, row, len(bits), views, 1 / bucket.world)
        error = None
        if bucket.feedback:
            sent = torch.zeros_like(flat, dtype=torch.float32)
            self._add(sent, rows[bucket.rank], len(bits), views, 1.0)
            error = flat.sub_(sent)
        return Reduced(mean.to(flat.dtype), error)

    def _add(self, total: Tensor, row: Tensor, width: int, views: Sequence[Tensor], weight: float) -> None:
        if total.numel() == 0:
            return
        signs = unpack(row[:width])[: total.numel()]
        scales = row[width:].clone().view(torch.float32).mul_(weight)
        for part, plus_minus, scale in zip(unflatten(total, views), unflatten(signs, views), scales, strict=True):
            part.addcmul_(plus_minus, scale)


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
