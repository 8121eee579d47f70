"""Momentum travels instead of gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from laconic.comm.bucket import Bucket, joined
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import Reducer, checked, finite
from laconic.reducers.error_feedback import ErrorFeedback, replace_if
from laconic.reducers.exact import Exact
from laconic.reducers.sign import Sign

KEY = "momentum"


@dataclass(frozen=True)
class Momentum(Reducer):
    """Send the momentum that a gradient makes, by any reducer, and hand on the gradient that makes the averaged one.

    Maths: x = beta * m + (1 - beta) * g;  m' = mean of x by `inner`;  the mean gradient is (m' - beta * m) / (1 - beta), and
    m' is the next m, the same on all ranks. An optimizer whose momentum has the same beta, as Adam's first moment, then
    has m' as its momentum, whatever it had before. x changes little from step to step and is less noisy than g, so a coarse
    `inner` loses less of it; but the gradient that is handed on is up to 1 / (1 - beta) times as noisy, so that Adam's second
    moment must not follow it: use it with second_moment="slow".

    Bytes: the inner reducer's.

    Memory: n numbers, for n that are averaged; and the inner reducer's.

    Paper: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam).

    Not: with clipping of gradient norms: that would cut nearly every step.

    Arguments:
      `inner`: the reducer that sends the momentum.
      `beta`: its decay, that of the optimizer's own momentum, at least 0 and below 1. Default 0.9.

    >>> import laconic
    >>> reducer = laconic.Momentum(laconic.ErrorFeedback(laconic.Sign()))
    >>> str(laconic.ddp(reducer=reducer, second_moment="slow"))
    "ddp(reducer=Momentum(inner=ErrorFeedback(inner=Sign())), second_moment='slow')"
    """

    inner: Reducer
    beta: float = 0.9
    memory = {KEY: "shared"}  # noqa: RUF012  (declared as a ClassVar)

    def __post_init__(self) -> None:
        checked(self.inner, "inner")
        if KEY in self.inner.all_memory():
            raise ValueError(f"Momentum keeps {KEY!r} for each parameter, and so does {type(self.inner).__name__} inside of it")
        if type(self.beta) not in (int, float) or not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, got {self.beta!r}; Adam's first one is 0.9 as a rule")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(Exact())
        yield cls(Sign())
        yield cls(ErrorFeedback(Sign()), beta=0.5)

    def reduce(self, bucket: Bucket) -> Exchange:
        beta, before = self.beta, joined(bucket, KEY)
        bucket.flat.mul_(1 - beta)
        if before is not None:
            bucket.flat.addcmul_(before, torch.as_tensor(beta * bucket.scale).to(before))
        mean, error, finish, good = yield from self.inner.reduce(bucket)
        if error is not None:
            error = error / (1 - beta)  # of the gradient, not of the momentum that it makes
        verdict = finite(mean) if good is None else good
        handed = torch.empty_like(mean)

        def take() -> None:
            finish()  # only now an inner reducer's mean is there for sure
            memory = before if before is not None else joined(bucket, KEY, create=True)
            assert memory is not None
            scale = torch.as_tensor(bucket.scale).to(memory)
            handed.copy_(mean).addcmul_(memory, scale, value=-beta).div_(1 - beta)
            replace_if(verdict, memory, mean.to(memory.dtype) / scale)

        return Reduced(handed, error, take, verdict)
