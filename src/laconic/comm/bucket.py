"""Buckets: a flat run of numbers, the parameters inside it, and each parameter's memory."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Slot: TypeAlias = dict[str, Tensor]
"""One parameter's memory, as `state[p]` is in torch.optim. Two reducers never share a key."""

RESIDUAL = "error"
"""The key under which error feedback keeps what it has not sent yet, in units of what is averaged. Whoever takes a strategy's
place sends it, so that no gradient is lost."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a reducer is given: numbers to average, and everything it may know.

    A reducer may overwrite `flat`. It reads `slots` at will, and writes them in `Reduced.finish` alone, so that a step
    that fails half-way leaves the memory of the step before.
    """

    flat: Tensor  # 1-D, contiguous
    views: Sequence[Tensor]  # per parameter, into `flat`, in the parameter's shape
    names: Sequence[str]  # same order
    slots: Sequence[Slot]  # same order, found by parameter name
    rank: int
    world: int
    step: int = 0  # the run's clock: warm up by this
    exchanges: int = 0  # done before this one: alternate by this
    scale: float | Tensor = 1.0  # what the loss was multiplied by: memory is kept in units of the unscaled loss
    feedback: bool = False  # somebody will read `Reduced.error`; else it needn't be worked out
    fused: bool = False  # compiled kernels may be used, where they are there
    # Given to a reducer with `writes_residual`: error feedback's residual, laid out as `flat`, which has it already. The
    # reducer writes its error there in `Reduced.finish`, where `Reduced.good` is true. That saves passes over memory.
    residual: Tensor | None = None

    @property
    def round(self) -> int:
        """The former name of `exchanges`."""
        warnings.warn("bucket.round is now called bucket.exchanges", DeprecationWarning, stacklevel=2)
        return self.exchanges


def joined(bucket: Bucket, key: str, *, create: bool = False, dtype: torch.dtype | None = None) -> Tensor | None:
    """The slots' tensors of that key as one flat tensor, laid out as `bucket.flat`; None where no slot has one.

    They have that `dtype`, or that of `bucket.flat`.

    As long as DDP's buckets stay the same, the slots hold neighbouring views of one tensor, and this only finds it again.
    Otherwise the numbers are brought together in a new one. A slot without the key counts as zeros.
    """
    flat, pieces = bucket.flat, [slot.get(key) for slot in bucket.slots]
    dtype = dtype or flat.dtype
    if not create and all(piece is None for piece in pieces):
        return None
    offsets = [view.storage_offset() - flat.storage_offset() for view in bucket.views]
    first = next((piece for piece in pieces if piece is not None), None)
    if first is not None and all(
        piece is not None
        and (piece.dtype, piece.device) == (dtype, flat.device)
        and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and piece.storage_offset() == offset
        and piece.stride() == view.stride()
        for piece, offset, view in zip(pieces, offsets, bucket.views, strict=True)
    ):
        return first.as_strided(flat.shape, (1,), 0)
    whole = torch.zeros_like(flat, dtype=dtype)
    for slot, piece, view, offset in zip(bucket.slots, pieces, bucket.views, offsets, strict=True):
        slot[key] = whole.as_strided(view.shape, view.stride(), offset)
        if piece is not None:
            slot[key].copy_(piece)
    return whole
