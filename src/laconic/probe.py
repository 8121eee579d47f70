"""A look into exchanges: what compression loses, and how far replicas had come apart. Off, it costs nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.bucket import Bucket, unflatten
from laconic.reducers.base import Reducer
from laconic.wire import Exchange, Reduced


@dataclass(frozen=True)
class Layer:
    """One parameter in one exchange. The norms stay on the device until somebody reads them."""

    size: Tensor  # ||x||, where x is what was to be sent, with what error feedback had kept
    lost: Tensor | None  # ||x - sent||; None: nothing was lost
    residual: Tensor | None  # what error feedback keeps now; None: it has none

    @property
    def error(self) -> float:
        """||x - sent|| / ||x||."""
        size = float(self.size)
        return 0.0 if self.lost is None or size == 0 else float(self.lost) / size


@dataclass(frozen=True)
class Sync:
    """One averaging between steps."""

    step: int
    drift: float  # how far replicas were from their mean: root mean square over ranks, or of this rank where others are unknown
    norm: float | None = None  # of this rank's pseudo-gradient
    mean_norm: float | None = None  # of the mean that came out
    cosine: float | None = None  # between the pseudo-gradients of two ranks, on average over pairs


def sync_of_deltas(step: int, squares: Sequence[float], rank: int, mean_square: float) -> Sync:
    """From the squared norms of all ranks' deltas, which every sync tells, and that of their mean.

    N^2 ||mean||^2 is the sum of all inner products, so what is left without the squares is that of the pairs. Where deltas
    are compressed, the mean is what was decoded, and the cosine as exact as that.

    >>> sync_of_deltas(8, [1.0, 1.0], 0, 0.5).cosine  # two unit vectors at a right angle
    0.0
    """
    ranks, norms = len(squares), [math.sqrt(square) for square in squares]
    pairs = sum(norms) ** 2 - sum(squares)
    cosine = max(-1.0, min((ranks**2 * mean_square - sum(squares)) / pairs, 1.0)) if pairs > 0 else None
    drift = math.sqrt(max(sum(squares) / ranks - mean_square, 0.0))
    return Sync(step, drift, norms[rank], math.sqrt(mean_square), cosine)


class Probe:
    """Given to whoever runs exchanges. `watching`: syncs are wanted; `looking`: layers are wanted, too, which costs passes."""

    def __init__(self) -> None:
        self.watching = self.looking = False
        self.layers: dict[str, Layer] = {}
        self.syncs: list[Sync] = []

    def reduce(self, reducer: Reducer, bucket: Bucket) -> Exchange:
        """The reducer's exchange, looked at or not."""
        return self._look(reducer, bucket) if self.looking else reducer.reduce(bucket)

    def _look(self, reducer: Reducer, bucket: Bucket) -> Exchange:
        sizes = [
            torch.linalg.vector_norm(view + slot["error"] * bucket.scale if "error" in slot else view)
            for view, slot in zip(bucket.views, bucket.slots, strict=True)
        ]
        asking = Bucket(
            bucket.flat, bucket.views, bucket.names, bucket.slots, bucket.rank, bucket.world, bucket.step, bucket.round,
            bucket.scale, feedback=True,
        )  # fmt: skip
        mean, error, finish, good = yield from reducer.reduce(asking)
        lost = None if error is None else [torch.linalg.vector_norm(part) for part in unflatten(error, bucket.views)]

        def finish_and_note() -> None:
            finish()
            for place, (name, slot) in enumerate(zip(bucket.names, bucket.slots, strict=True)):
                residual = torch.linalg.vector_norm(slot["error"]) if "error" in slot else None
                gone = lost[place] if lost else None if residual is None else residual * bucket.scale
                self.layers[name] = Layer(sizes[place], gone, residual)

        return Reduced(mean, error if bucket.feedback else None, finish_and_note, good)
