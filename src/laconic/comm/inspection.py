"""A look into exchanges: what compression loses, and how far replicas had drifted apart. Off, it costs nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.comm.bucket import RESIDUAL, Bucket
from laconic.comm.exchange import Exchange, Reduced
from laconic.comm.flat_tensors import unflatten


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
    """From the squared norms of all ranks' deltas, which ranks exchange at every sync, and that of their mean.

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


class Inspector:
    """Given to whoever runs exchanges. `watching`: syncs are wanted; `looking`: layers are wanted, too, which costs passes."""

    def __init__(self) -> None:
        self.watching = self.looking = False
        self.layers: dict[str, Layer] = {}
        self.syncs: list[Sync] = []

    def inspect(self, reduce: Callable[[Bucket], Exchange], bucket: Bucket) -> Exchange:
        """The exchange that `reduce` makes of a bucket, looked at or not."""
        return self._look(reduce, bucket) if self.looking else reduce(bucket)

    def _look(self, reduce: Callable[[Bucket], Exchange], bucket: Bucket) -> Exchange:
        sizes = [
            torch.linalg.vector_norm(view + slot[RESIDUAL] * bucket.scale if RESIDUAL in slot else view)
            for view, slot in zip(bucket.views, bucket.slots, strict=True)
        ]
        mean, error, finish, good = yield from reduce(replace(bucket, feedback=True))
        lost = None if error is None else [torch.linalg.vector_norm(part) for part in unflatten(error, bucket.views)]

        def finish_and_note() -> None:
            finish()
            for place, (name, slot) in enumerate(zip(bucket.names, bucket.slots, strict=True)):
                residual = torch.linalg.vector_norm(slot[RESIDUAL]) if RESIDUAL in slot else None
                gone = lost[place] if lost else None if residual is None else residual * bucket.scale
                self.layers[name] = Layer(sizes[place], gone, residual)

        return Reduced(mean, error if bucket.feedback else None, finish_and_note, good)
