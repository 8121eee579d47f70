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

    Arguments:
      `flat`: the numbers, one-dimensional and contiguous.
      `views`: each parameter's part of `flat`, in the parameter's shape.
      `names`: the parameters' names, in the same order.
      `slots`: the reducer's memory of each parameter, in the same order; found by name, so that buckets may change.
      `rank`: this rank's number in the group, from 0.
      `world`: how many ranks the group has.
      `step`: steps that were completed before: warm up by this. Default 0.
      `exchanges`: exchanges of this bucket before this one: alternate by this. Default 0.
      `scale`: what the loss was multiplied by: memory is kept in units of the unscaled loss. Default 1.0.
      `feedback`: whether somebody will read `Reduced.error`; else it needn't be worked out. Default False.
      `fused`: whether compiled kernels may be used, where they are there. Default False.
      `residual`: for a reducer with `writes_residual`: error feedback's residual, laid out as `flat`, which has it already. The
        reducer writes its error there in `Reduced.finish`, where `Reduced.good` is true, which saves passes over memory. None:
        it can't. Default None.

    >>> import torch, laconic
    >>> flat = torch.arange(6.0)
    >>> views, names = [flat[:4].view(2, 2), flat[4:]], ["weight", "bias"]
    >>> bucket = laconic.Bucket(flat, views, names, [{}, {}], rank=0, world=1)
    >>> [tuple(view.shape) for view in bucket.views]
    [(2, 2), (2,)]
    """

    flat: Tensor
    views: Sequence[Tensor]
    names: Sequence[str]
    slots: Sequence[Slot]
    rank: int
    world: int
    step: int = 0
    exchanges: int = 0
    scale: float | Tensor = 1.0
    feedback: bool = False
    fused: bool = False
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
