"""Low rank, by one step of power iteration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from laconic.bucket import Bucket
from laconic.reducers.base import Reducer, checked_rank, finite
from laconic.reducers.exact import Exact
from laconic.reducers.lowrank import (
    Factors,
    Split,
    copy_rest,
    keep_factors,
    leave_out,
    matrix_view,
    product,
    split,
    warm,
)
from laconic.wire import AllReduce, Exchange, Reduced


@dataclass(frozen=True)
class PowerSGD(Reducer):
    """Send each matrix as two thin factors; everything else as it is, in the first factors' message.

    Maths: per matrix M (rows x columns) and Q of the last exchange: P = orth(mean M Q);  Q = mean MᵀP;  the mean is P Qᵀ.
    What this rank sent is P (MᵀP)ᵀ: its error is taken against that and not, as the paper does, against the mean, so
    that each rank's residual stays bounded. Biased: wrap it in ErrorFeedback.
    Bytes: 2(N-1)/N * 4(r(rows + columns) + the rest), in two all-reduces a bucket.
    A parameter is compressed where that saves at least `min_compression_rate`.
    Paper: Vogels et al. 2019, arXiv:1905.13727.

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.ErrorFeedback(laconic.PowerSGD(rank=4))))
    'ddp(reducer=ErrorFeedback(inner=PowerSGD(rank=4)))'
    """

    rank: int = 1
    min_compression_rate: float = 2.0
    warm_start: bool = True
    seed: int = 0

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
        whole = bucket.flat if bucket.flat.dtype == torch.float32 else bucket.flat.float()
        first = whole.new_empty(parts.tall + parts.plain)
        p = Factors(parts.matrices, first[: parts.tall], wide=False)
        q = warm(bucket, parts.matrices, "q", True, self.seed, self.warm_start, parts.wide)
        for matrix in parts.matrices:
            torch.mm(q.of(matrix), matrix_view(whole, matrix).T, out=p.of(matrix))
        copy_rest(first[parts.tall :], whole, parts, into=False)
        first = yield AllReduce(first)

        p = Factors(parts.matrices, first[: parts.tall], wide=False)
        p.orthonormalise()
        for matrix in parts.matrices:
            torch.mm(p.of(matrix), matrix_view(whole, matrix), out=q.of(matrix))
        error = whole if bucket.feedback else None
        if error is not None:
            leave_out(error, p, q, parts)
        q = Factors(parts.matrices, (yield AllReduce(q.flat)), wide=True)

        mean = whole if error is None else torch.empty_like(whole)
        product(mean, p, q)
        copy_rest(first[parts.tall :], mean, parts, into=True)

        good = finite(first) & finite(q.flat)

        def remember() -> None:
            if self.warm_start:
                keep_factors(bucket.slots, q, "q", good)

        dtype = bucket.flat.dtype
        return Reduced(mean.to(dtype), error if error is None else error.to(dtype), remember, good)
