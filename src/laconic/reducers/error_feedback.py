"""What a message left out is added to the next one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from laconic.comm.bucket import RESIDUAL, Bucket, joined
from laconic.comm.exchange import Exchange, Reduced
from laconic.reducers.base import Reducer, checked, finite
from laconic.reducers.exact import Exact
from laconic.reducers.topk import TopK


@dataclass(frozen=True)
class ErrorFeedback(Reducer):
    """Add what the last message left out; remember what this one leaves out.

    Maths: x = g + decay * e;  send C(x);  e = x - C(x). With decay 1 nothing is ever lost: what has been applied, plus the
    mean of the ranks' e, is the sum of all true means. e is kept in units of the unscaled loss: a GradScaler may change
    its scale at any step. A value that is not finite, on any rank, leaves every rank's e as it was.

    Bytes: the inner reducer's.

    Memory: n numbers, for n that are averaged; and the inner reducer's.

    Paper: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847.

    Arguments:
      `inner`: the reducer that sends x.
      `decay`: how much of what was left out goes into the next message, from 0 to 1. Default 1.0.
      `dtype`: "bf16" keeps e in 16 bits: half the memory, and what is rounded away is lost; None: as the gradients.
        Default None.

    >>> import torch, laconic
    >>> reducer, slot = laconic.ErrorFeedback(laconic.TopK(0.5)), {}
    >>> for gradient in ([1.0, 0.25], [0.5, 0.5]):
    ...     flat = torch.tensor(gradient)
    ...     bucket = laconic.Bucket(flat, [flat], ["w"], [slot], rank=0, world=1)
    ...     (alone,) = laconic.simulate([reducer.reduce(bucket)])
    ...     alone.finish()
    ...     print(alone.mean, slot["error"])
    tensor([1., 0.]) tensor([0.0000, 0.2500])
    tensor([0.0000, 0.7500]) tensor([0.5000, 0.0000])
    """

    inner: Reducer
    decay: float = 1.0
    dtype: Literal["bf16"] | None = None  # None: that of the gradients
    memory = {RESIDUAL: "own"}  # noqa: RUF012  (declared as a ClassVar)

    def __post_init__(self) -> None:
        checked(self.inner, "inner")
        if RESIDUAL in self.inner.all_memory() and not isinstance(self.inner, Release):
            raise ValueError(
                f"ErrorFeedback keeps {RESIDUAL!r} for each parameter, and so does {type(self.inner).__name__} inside of it; "
                "each would overwrite the other's"
            )
        if self.dtype not in (None, "bf16"):
            raise ValueError(f"dtype must be 'bf16', or None for the gradients' own, got {self.dtype!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be from 0 (forget everything) to 1 (forget nothing), got {self.decay}")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(TopK(0.1))
        yield cls(TopK(0.1), decay=0.9)
        yield cls(TopK(0.1), dtype="bf16")

    def reduce(self, bucket: Bucket) -> Exchange:
        dtype = torch.bfloat16 if self.dtype else bucket.flat.dtype
        kept = joined(bucket, RESIDUAL, dtype=dtype)
        if kept is not None:
            add_scaled(bucket.flat, kept, self.decay * bucket.scale)
        # The residual can be written in place where asking for the verdict costs nothing, and no scale has to be taken out.
        scaled = isinstance(bucket.scale, Tensor) or bucket.flat.device.type != "cpu" or dtype != bucket.flat.dtype
        room = kept if self.inner.writes_residual and not scaled else None
        mean, error, finish, good = yield from self.inner.reduce(replace(bucket, feedback=True, residual=room))
        verdict = finite(mean) if good is None else good

        def take() -> None:
            if (error is None and kept is None) or (error is not None and error is room):
                return
            memory = kept if kept is not None else joined(bucket, RESIDUAL, create=True, dtype=dtype)
            assert memory is not None
            left = torch.zeros_like(memory) if error is None else error
            if isinstance(bucket.scale, Tensor):
                left = left.div_(bucket.scale)
            replace_if(verdict, memory, left)

        def keep() -> None:
            take()
            finish()

        return Reduced(mean, None, keep, verdict)


@dataclass(frozen=True)
class Release(Reducer):
    """What a former strategy's error feedback still holds goes into this exchange, once, and is forgotten.

    `run.swap` puts it around a reducer that has no error feedback of its own, so that no gradient is lost.

    Bytes: the inner reducer's.

    Memory: what is there already, which stays, as zeros; and the inner reducer's.

    Arguments:
      `inner`: the reducer that sends it.

    >>> import laconic
    >>> str(laconic.ddp(reducer=laconic.Release(laconic.Exact())))
    'ddp(reducer=Release(inner=Exact()))'
    """

    inner: Reducer
    memory = {RESIDUAL: "own"}  # noqa: RUF012  (declared as a ClassVar)

    def __post_init__(self) -> None:
        checked(self.inner, "inner")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(Exact())

    def reduce(self, bucket: Bucket) -> Exchange:
        kept = joined(bucket, RESIDUAL)
        if kept is not None:
            add_scaled(bucket.flat, kept, bucket.scale)
        mean, error, finish, good = yield from self.inner.reduce(bucket)
        verdict = finite(mean) if good is None else good

        def forget() -> None:
            finish()
            if kept is not None:
                kept.mul_(verdict.logical_not())

        return Reduced(mean, error, forget, verdict)


def replace_if(good: Tensor, old: Tensor, new: Tensor) -> None:
    """old = new, in place, where `good`. On the CPU, where asking costs nothing, that is a plain copy or nothing at all."""
    if good.device.type != "cpu":
        torch.where(good, new.to(old.dtype), old, out=old)  # of 16-bit numbers, an error may be in fp32
    elif good:
        old.copy_(new)


def add_scaled(flat: Tensor, more: Tensor, weight: float | Tensor) -> None:
    """flat += weight * more, in place."""
    if isinstance(weight, Tensor):
        flat.addcmul_(more.to(flat.dtype), weight.to(flat.dtype))
    else:
        flat.add_(more, alpha=weight)
