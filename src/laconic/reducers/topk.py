"""The largest numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import Reducer, checked_ratio


@dataclass(frozen=True)
class TopK(Reducer):
    """Send the largest entries of each parameter, as (index, value).

    Maths: per parameter of s entries, the k = max(1, ⌈ratio * s⌉) largest by magnitude; the mean has what any rank sent,
    divided by N. Biased: wrap it in ErrorFeedback.
    Bytes: (N-1) * 8k, in one all-gather: it grows with N, and above ratio = 1/N it is more than plain all-reduce.
    Paper: Aji & Heafield 2017, arXiv:1704.05021; Stich et al. 2018, arXiv:1809.07599.

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.TopK(ratio=0.05)))
    'ddp(reducer=TopK(ratio=0.05))'
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        checked_ratio(self.ratio)

    def reduce(self, bucket: Bucket) -> Exchange:
        flat, world = bucket.flat, bucket.world
        picks: list[Tensor] = [torch.empty(0, dtype=torch.int32, device=flat.device)]
        start = 0
        for view in bucket.views:
            size = view.numel()
            if size:
                count = max(1, math.ceil(self.ratio * size))
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
