"""The exchange of one fragment's deltas: complete at once, or outstanding while training goes on."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.exchange import PendingExchange, Reduced
from laconic.comm.flat_tensors import unflatten
from laconic.comm.pipeline import Pipeline
from laconic.ranks.presence import Heartbeat


@dataclass
class PendingBucket:
    """One bucket of it."""

    bucket: Bucket
    exchange: PendingExchange[Reduced]
    delta: Tensor | None = None  # as it left, where training goes on meanwhile


@dataclass
class FragmentExchange:
    """One fragment's deltas, launched after step `launched`; with its heartbeat in front."""

    fragment: int
    launched: int
    heartbeat: PendingExchange[Heartbeat]
    buckets: list[PendingBucket]
    pipeline: Pipeline
    problem: str | None = None  # why it moves nothing, once that is known

    def state(self) -> dict[str, Any]:
        """What it takes to send it again: plain data."""
        deltas = {
            name: view
            for pending in self.buckets
            if pending.delta is not None
            for name, view in zip(pending.bucket.names, unflatten(pending.delta, pending.bucket.views), strict=True)
        }
        return {"fragment": self.fragment, "launched": self.launched, "deltas": deltas}
