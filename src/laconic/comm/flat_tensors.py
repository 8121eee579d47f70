"""Tensors seen as flat runs of numbers: where they lie, how they are joined and cut."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 16


def local(parameter: Tensor) -> Tensor:
    """The storage of a parameter that this rank may read and write in place: of a DTensor, this rank's shard."""
    if not hasattr(parameter, "to_local"):
        return parameter.detach()
    with torch.no_grad():
        shard: Tensor = parameter.to_local()
    return shard.detach()


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
