"""A reducer, a schedule and an outer optimizer as a user would write them: one file, outside of the package."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.optim import Optimizer

import laconic


@dataclass(frozen=True)
class Clipped(laconic.Reducer):
    """Send what lies within a limit; the rest waits. The largest mean so far is remembered, too."""

    limit: float = 0.01
    memory = {"backlog": "own", "peak": "shared"}  # noqa: RUF012  (declared as a ClassVar)

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        slot = bucket.slots[0]  # of the bucket's first parameter
        backlog = slot.get("backlog", torch.zeros_like(bucket.flat))
        wanted = bucket.flat + backlog
        sent = wanted.clamp(-self.limit, self.limit)
        left = wanted - sent
        mean = yield laconic.AllReduce(sent)

        def finish() -> None:
            slot["backlog"] = left
            slot["peak"] = torch.maximum(slot.get("peak", torch.zeros(())), mean.abs().max())

        return laconic.Reduced(bucket.flat.copy_(mean), None, finish)


@dataclass(frozen=True)
class Forgetful(laconic.Reducer):
    """One that doesn't declare whose its memory is."""

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        mean = yield laconic.AllReduce(bucket.flat)

        def finish() -> None:
            bucket.slots[0]["seen"] = mean.clone()

        return laconic.Reduced(mean, None, finish)


@dataclass(frozen=True)
class Doubling(laconic.Schedule):
    """After `first` steps, then after twice as many, and so on.

    >>> [step + 1 for step in range(20) if Doubling(2).due(step)]
    [2, 4, 8, 16]
    """

    first: int = 2
    start: int = 0

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        made = step + 1 - self.start
        turns, rest = divmod(made, self.first)
        return made > 0 and rest == 0 and turns & (turns - 1) == 0


@dataclass(frozen=True)
class Capped(laconic.Outer):
    """Adopt the mean, but never go further than `limit` in a sync, over all parameters together."""

    limit: float = 1.0

    def build(self, groups: Any) -> Optimizer:
        return CappedSGD(list(groups), {"limit": self.limit})


class CappedSGD(Optimizer):
    """Counts its steps, and looks at the norm of all gradients: it must be stepped once a sync, over all parameters."""

    def __init__(self, groups: Any, defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.steps = 0

    @torch.no_grad()
    def step(self: Self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        moved = [(group["limit"], p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in moved if p.grad is not None]).norm()
        for limit, p in moved:
            assert p.grad is not None
            p.sub_(p.grad * torch.clamp(limit / norm, max=1.0))
            self.state[p]["norm"] = norm.clone()
