"""Buckets: a flat run of numbers, the parameters inside it, and each parameter's memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK = 1 << 16

Slot: TypeAlias = dict[str, Tensor]
"""One parameter's memory, as `state[p]` is in torch.optim. Two reducers never share a key."""


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
    round: int = 0  # exchanges done before: alternate by this
    scale: float | Tensor = 1.0  # what the loss was multiplied by: memory is kept in units of the unscaled loss
    feedback: bool = False  # somebody will read `Reduced.error`; else it needn't be worked out


def joined(bucket: Bucket, key: str, *, create: bool = False) -> Tensor | None:
    """The slots' tensors of that key as one flat tensor, laid out as `bucket.flat`; None where no slot has one.

    As long as DDP's buckets stay the same, the slots hold neighbouring views of one tensor, and this only finds it again.
    Otherwise the numbers are brought together in a new one. A slot without the key counts as zeros.
    """
    flat, pieces = bucket.flat, [slot.get(key) for slot in bucket.slots]
    if not create and all(piece is None for piece in pieces):
        return None
    offsets = [view.storage_offset() - flat.storage_offset() for view in bucket.views]
    first = next((piece for piece in pieces if piece is not None), None)
    if first is not None and all(
        piece is not None
        and (piece.dtype, piece.device) == (flat.dtype, flat.device)
        and piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and piece.storage_offset() == offset
        and piece.stride() == view.stride()
        for piece, offset, view in zip(pieces, offsets, bucket.views, strict=True)
    ):
        return first.as_strided(flat.shape, (1,), 0)
    whole = torch.zeros_like(flat)
    for slot, piece, view, offset in zip(bucket.slots, pieces, bucket.views, offsets, strict=True):
        slot[key] = whole.as_strided(view.shape, view.stride(), offset)
        if piece is not None:
            slot[key].copy_(piece)
    return whole


def local(parameter: Tensor) -> Tensor:
    """The storage of a parameter that this rank may read and write in place."""
    return parameter.detach()


def stored(tensor: Tensor) -> Tensor | None:
    """A tensor's numbers as one flat view, in the order in which they lie in memory; None where they have gaps there."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    dense = 1
    for stride, size in strides:
        if stride != dense:
            return None
        dense *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """The sum of all squares, in fp64: differences of two such sums mean something.

    Chunk by chunk, so that what is cast stays in the cache: a whole copy in fp64 cost as much as the exchange itself.

    >>> squared_norm([torch.ones(5000), torch.full((2, 2), 2.0)])
    5016.0
    """
    total = None
    for tensor in tensors:
        flat = stored(tensor)
        for chunk in torch.split(tensor.reshape(-1) if flat is None else flat, CHUNK):
            precise = chunk.double()
            square = precise.dot(precise)
            total = square if total is None else total + square.to(total.device)  # a model may lie on several
    return 0.0 if total is None else float(total)


def flatten(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors of one dtype and device into one flat tensor; returns it and its views."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat, unflatten(flat, tensors)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into `flat`, shaped as `like` one after the other."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def pack(tensors: Sequence[Tensor], cap_bytes: int) -> list[list[int]]:
    """Group tensors, by index, into runs of one dtype and device of at most `cap_bytes` (or one tensor)."""
    runs: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        lists = runs.setdefault(kind, [])
        if not lists or sizes[kind] + tensor.nbytes > cap_bytes:
            lists.append([])
            sizes[kind] = 0
        lists[-1].append(index)
        sizes[kind] += tensor.nbytes
    return [run for lists in runs.values() for run in lists]
