"""Low rank, by one step of power iteration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllReduce
from laconic.comm.exchange import Exchange, Reduced
from laconic.kernels.kernel import Kernel
from laconic.reducers.base import Reducer, checked_rank, finite
from laconic.reducers.exact import Exact
from laconic.reducers.lowrank import (
    Factors,
    Split,
    end,
    endings,
    ends_at_once,
    keep_factors,
    leave_out,
    matrix_views,
    rebuild,
    split,
    take_rest,
    warm,
)


@dataclass(frozen=True)
class PowerSGD(Reducer):
    """Send each matrix as two thin factors; everything else as it is, in the first factors' message.

    Maths: per matrix M (rows x columns) and Q of the last exchange: P = orth(mean M Q);  Q = mean MᵀP;  the mean is P Qᵀ.
    What this rank sent is P (MᵀP)ᵀ: its error is taken against that and not, as the paper does, against the mean, so
    that each rank's residual stays bounded.

    Bytes: 2(N-1)/N * 4(r(rows + columns) + the rest), in two all-reduces a bucket (N ranks, rank r).

    Memory: r * columns numbers a matrix, the last Q.

    Paper: Vogels et al. 2019, arXiv:1905.13727.

    Not: unbiased: wrap it in `ErrorFeedback`.

    Arguments:
      `rank`: columns of P and Q. Default 1.
      `min_compression_rate`: a parameter is sent as matrices where they are more than so many times smaller. Default 2.0.
      `warm_start`: begin with the last exchange's Q; False: with random numbers each time. Default True.
      `seed`: of the first Q, the same on all ranks. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(
    ...     laconic.ddp(reducer=laconic.ErrorFeedback(laconic.PowerSGD(rank=4))),
    ...     layer,
    ...     world_size=4,
    ... ).wire_bytes
    48000
    """

    rank: int = 1
    min_compression_rate: float = 2.0
    warm_start: bool = True
    seed: int = 0
    memory = {"q": "shared"}  # noqa: RUF012  (declared as a ClassVar)
    writes_residual = True

    def __post_init__(self) -> None:
        checked_rank(self.rank, self.min_compression_rate)

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(1, min_compression_rate=1)
        yield cls(3, min_compression_rate=0.5)
        yield cls(2, min_compression_rate=1, warm_start=False)

    def reduce(self, bucket: Bucket) -> Exchange:
        parts = split(bucket, self.rank, self.min_compression_rate)
        return self._exchange(bucket, parts) if parts.matrices else Exact().reduce(bucket)

    def _exchange(self, bucket: Bucket, parts: Split) -> Exchange:
        whole = bucket.flat if bucket.flat.dtype.itemsize >= 4 else bucket.flat.float()
        matrices = matrix_views(whole, parts)
        old = warm(bucket, parts, "q", True, self.seed, whole.dtype, self.warm_start)
        first = whole.new_empty(parts.tall + parts.plain)
        p = Factors(parts, first[: parts.tall], wide=False, across=True)
        for matrix, q_, p_ in zip(matrices, old.each(), p.each(), strict=True):
            torch.mm(matrix, q_.T, out=p_.T)
        take_rest(first[parts.tall :], whole, parts)
        first = yield AllReduce(first)

        p = Factors(parts, first[: parts.tall], wide=False, across=True).basis()
        q = Factors(parts, torch.empty_like(old.flat), wide=True)
        for matrix, p_, q_ in zip(matrices, p.each(), q.each(), strict=True):
            torch.mm(p_, matrix, out=q_)
        at_once = ends_at_once(bucket, whole, self.rank)
        own = Factors(parts, q.flat.clone(), wide=True) if at_once else q  # the mean overwrites it
        if bucket.feedback and not at_once:
            leave_out(whole, p, q)
        q = Factors(parts, (yield AllReduce(q.flat)), wide=True)
        good = finite(first) & finite(q.flat)

        def finish() -> None:
            if at_once:
                end(bucket, p, own, q, first[parts.tall :], good)
            else:
                rebuild(whole, p, q, first[parts.tall :])
            if whole is not bucket.flat:
                bucket.flat.copy_(whole)
            if self.warm_start:
                keep_factors(bucket.slots, q, old, "q", good)

        error = bucket.residual if at_once else whole
        return Reduced(bucket.flat, error if bucket.feedback else None, finish, good)

    def kernels(self) -> list[Kernel]:
        return endings(self.rank)
