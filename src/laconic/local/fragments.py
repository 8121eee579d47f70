"""Fragments: which parameters take their turn together, and in which buckets they travel."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from laconic.comm.flat_tensors import pack

BUCKET_BYTES = 25 << 20


def fragments(parameters: Mapping[str, Tensor], count: int, order: str) -> list[list[str]]:
    """Parameter names in `count` fragments, the same on every rank that has the same model.

    By layer, "strided" (layer i goes to fragment i modulo `count`) or "contiguous"; or in runs of about equal "bytes". A
    layer is everything below one number in the names, such as blocks.3, or what shares the first part of its name.

    >>> import torch
    >>> names = ["in.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "out.weight"]
    >>> model = {name: torch.empty(4) for name in names}
    >>> fragments(model, 2, "strided")[0]
    ['in.weight', 'blocks.1.weight', 'blocks.1.bias']
    >>> fragments(model, 2, "bytes")[0]
    ['in.weight', 'blocks.0.weight', 'blocks.0.bias']
    """
    units: dict[str, list[str]] = {}
    for name in parameters:
        units.setdefault(name if order == "bytes" else _layer(name), []).append(name)
    if count > len(units):
        what = "parameters" if order == "bytes" else "layers (or use order='bytes')"
        raise ValueError(f"{count} fragments can't be made of {len(units)} {what}; ask for {len(units)} at most")
    parts: list[list[str]] = [[] for _ in range(count)]
    sizes = [sum(parameters[name].nbytes for name in names) for names in units.values()]
    for index, (names, part) in enumerate(zip(units.values(), _parts(sizes, count), strict=True)):
        parts[index % count if order == "strided" else part] += names
    return parts


def _layer(name: str) -> str:
    path = name.split(".")
    number = next((place for place, word in enumerate(path) if word.isdecimal()), 0)
    return ".".join(path[: number + 1])


def _parts(sizes: Sequence[int], count: int) -> list[int]:
    """For each unit the part it falls into, such that parts are runs, none is empty, and all are about as large."""
    parts: list[int] = []
    total, before = sum(sizes) or 1, 0
    for index, size in enumerate(sizes):
        middle = int((before + size / 2) * count / total)
        lowest = parts[-1] if parts else 0
        # Not past the next part, and never so few units left that a later part would be empty.
        parts.append(max(min(middle, lowest + bool(parts)), lowest, count - (len(sizes) - index)))
        before += size
    return parts


def buckets(parameters: Mapping[str, Tensor], names: Sequence[str]) -> list[list[str]]:
    """A fragment's parameters in buckets of one dtype and device, `BUCKET_BYTES` at most each, or one parameter."""
    return [[names[index] for index in run] for run in pack([parameters[name] for name in names], BUCKET_BYTES)]
