"""Some numbers, the same ones on every rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllReduce
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import Reducer, checked_ratio
from laconic.reducers.randomness import number


@dataclass(frozen=True)
class RandomK(Reducer):
    """Send entries that all ranks draw alike, so that no index travels.

    Maths: per parameter of s entries, k = max(1, ⌈ratio * s⌉) of them, evenly spaced from a random start: each entry is as
    likely as any other. The rest of the mean is zero.

    Bytes: 2(N-1)/N * 4(k + 1 per bucket), in one all-reduce, at any N.

    Memory: none.

    Paper: Stich et al. 2018, arXiv:1809.07599.

    Not: unbiased: wrap it in `ErrorFeedback`.

    Arguments:
      `ratio`: the share of entries that is sent, above 0 and at most 1. Default 0.01.
      `seed`: of the draw, the same on all ranks. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.RandomK(0.05)), layer, world_size=4
    ... ).wire_bytes
    300006
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        checked_ratio(self.ratio)

    def reduce(self, bucket: Bucket) -> Exchange:
        flat = bucket.flat
        picks: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=flat.device)]
        start = 0
        for view, name in zip(bucket.views, bucket.names, strict=True):
            size = view.numel()
            if size:
                count = max(1, math.ceil(self.ratio * size))
                comb = torch.arange(count, device=flat.device).mul_(size).floor_divide_(count)
                picks.append(comb.add_(number(self.seed, bucket.exchanges, name) % size).remainder_(size).add_(start))
            start += size
        index = torch.cat(picks)

        # What is not finite may stand where nobody looks: one more number, 0 or not-a-number, carries the news.
        alarm = torch.stack(torch.aminmax(flat)).float().mul_(0).sum().view(1) if flat.numel() else flat.float()
        sent = yield AllReduce(torch.cat([flat[index].float(), alarm]))
        mean = torch.zeros_like(flat)
        if flat.numel():
            mean.index_copy_(0, index, (sent[:-1] + sent[-1]).to(flat.dtype))
        error = flat.index_fill_(0, index, 0) if bucket.feedback else None
        return Reduced(mean, error)
