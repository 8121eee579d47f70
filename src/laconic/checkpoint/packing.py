"""A nested state as named tensors and a skeleton: what is large apart from what is not."""

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MARK = "laconic tensor"
ARRAY = "laconic array"  # NumPy's, as its bytes
PLAIN = (type(None), bool, int, float, complex, str, bytes)


Path = tuple[str, ...]


def _as_is(path: Path, tensor: Tensor) -> Tensor:
    return tensor


def pack(
    tree: object, name: Callable[[Path, Tensor], str], prepared: Callable[[Path, Tensor], Tensor] = _as_is
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a tree of dicts, lists and tuples, by what `name` makes of their paths; and all the rest, as bytes.

    Each is saved as what `prepared` makes of it.

    NumPy's arrays come back as such, its numbers as Python's, and named tuples as tuples. What can't be read back as plain
    data is refused here, with its place: a checkpoint that nobody can load is worth nothing.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: Path) -> object:
        if isinstance(node, Tensor) and node.layout is torch.strided:
            node = prepared(path, node)
            key = name(path, node)
            while key in tensors:  # {"a": {"b": ...}, "a/b": ...}
                key += "'"
            tensors[key] = node.detach()
            return {MARK: key}
        if isinstance(node, Mapping):
            return {_key(key, path): walk(value, (*path, str(key))) for key, value in node.items()}
        if isinstance(node, list | tuple) and not isinstance(node, torch.Size):
            parts = [walk(value, (*path, str(place))) for place, value in enumerate(node)]
            return parts if isinstance(node, list) else tuple(parts)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(node, numpy.number | numpy.bool_):
            return node.item()
        if numpy is not None and type(node) is numpy.ndarray and node.dtype.kind in "biufcmMUS":
            data = torch.frombuffer(bytearray(node.tobytes()), dtype=torch.uint8) if node.nbytes else torch.empty(0)
            return {ARRAY: [node.dtype.str, list(node.shape), walk(data, path)]}
        return _plain(node, path)

    buffer = io.BytesIO()
    torch.save(walk(tree, ()), buffer)
    return tensors, torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _key(key: Any, path: Path) -> Any:
    if key in (MARK, ARRAY):
        raise TypeError(f"{'/'.join(path)} has a key {key!r}, which is a word of the checkpoint's own")
    return _plain(key, path)


def _plain(value: Any, path: Path) -> Any:
    """A value that can be read back."""
    if type(value) in PLAIN:
        return value
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # what pickling raises is up to the value
        raise TypeError(
            f"a checkpoint holds plain data: numbers, texts, tensors, arrays, and dicts, lists and tuples of them; "
            f"{'/'.join(path)} has a {type(value).__module__}.{type(value).__qualname__}, {value!r:.80}"
        ) from error


def skeleton(data: Tensor) -> Any:
    """What `pack` left of a tree. Read as plain data: a file can't make Python run anything."""
    return torch.load(io.BytesIO(bytes(data.tolist())), weights_only=True)


def keys(node: object, path: Path = ()) -> dict[str, Path]:
    """The names of a skeleton's tensors, and where in the tree each is."""
    if isinstance(node, Mapping) and MARK in node:
        return {str(node[MARK]): path}
    parts = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
    return {name: place for key, part in parts for name, place in keys(part, (*path, str(key))).items()}


def unpack(node: object, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again."""
    if isinstance(node, Mapping):
        if MARK in node:
            return tensors[node[MARK]]
        if ARRAY in node:
            import numpy

            dtype, shape, data = node[ARRAY]
            return numpy.frombuffer(bytearray(unpack(data, tensors).numpy()), dtype=dtype).reshape(shape)
        return {key: unpack(value, tensors) for key, value in node.items()}
    if isinstance(node, list | tuple) and not isinstance(node, torch.Size):
        return type(node)([unpack(value, tensors) for value in node])
    return node
