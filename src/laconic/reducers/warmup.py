"""One reducer first, another one later."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from laconic.comm.bucket import Bucket
from laconic.comm.exchange import Exchange
from laconic.reducers.base import Reducer, checked, checked_steps
from laconic.reducers.cast import Cast
from laconic.reducers.exact import Exact


@dataclass(frozen=True)
class Warmup(Reducer):
    """`before` until step `start` of the run's clock, then `inner`.

    Bytes: those of whichever is in force.

    Memory: that of both.

    Arguments:
      `start`: steps in which `before` averages.
      `inner`: the reducer of all later steps.
      `before`: the reducer of the first steps. Default Exact().

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> strategy = laconic.ddp(reducer=laconic.Warmup(100, laconic.Cast("bf16")))
    >>> [
    ...     laconic.predict(strategy, layer, world_size=4, step=step).wire_bytes
    ...     for step in (99, 100)
    ... ]
    [6000000, 3000000]
    """

    start: int
    inner: Reducer
    before: Reducer = field(default_factory=Exact)

    def __post_init__(self) -> None:
        checked_steps(self.start, "start")
        checked(self.inner, "inner")
        checked(self.before, "before")

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls(2, Cast("bf16"))
        yield cls(2, Exact(), before=Cast("fp16"))

    @property
    def warmup_steps(self) -> int:
        return self.start

    def changes_at(self) -> list[int]:
        return [self.start, *super().changes_at()]

    def is_plain(self, step: int) -> bool:
        return self._at(step).is_plain(step)

    def reduce(self, bucket: Bucket) -> Exchange:
        return self._at(bucket.step).reduce(bucket)

    def _at(self, step: int) -> Reducer:
        return self.before if step < self.start else self.inner
