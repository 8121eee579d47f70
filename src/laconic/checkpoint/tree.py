"""A nested state as named tensors and a skeleton: what is large apart from what is not."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

MARK = "laconic tensor"


def pack(tree: object, name: Callable[[tuple[str, ...]], str]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a tree of dicts, lists and tuples, by what `name` makes of their paths; and all the rest, as bytes."""
    tensors: dict[str, Tensor] = {}

    def walk(node: object, path: tuple[str, ...]) -> object:
        if isinstance(node, Tensor):
            key = name(path)
            assert key not in tensors, f"two tensors are called {key}"
            tensors[key] = node.detach()
            return {MARK: key}
        if isinstance(node, Mapping):
            return {key: walk(value, (*path, str(key))) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)([walk(value, (*path, str(place))) for place, value in enumerate(node)])
        return node

    buffer = io.BytesIO()
    torch.save(walk(tree, ()), buffer)
    return tensors, torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def skeleton(data: Tensor) -> Any:
    """What `pack` left of a tree. Read as plain data: a file can't make Python run anything."""
    return torch.load(io.BytesIO(bytes(data.tolist())), weights_only=True)


def keys(node: object) -> list[str]:
    """The names of a skeleton's tensors."""
    return [str(leaf) for leaf in _leaves(node)]


def _leaves(node: object) -> list[object]:
    if isinstance(node, Mapping):
        return [node[MARK]] if MARK in node else [leaf for value in node.values() for leaf in _leaves(value)]
    return [leaf for value in node for leaf in _leaves(value)] if isinstance(node, list | tuple) else []


def unpack(node: object, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again."""
    if isinstance(node, Mapping):
        return tensors[node[MARK]] if MARK in node else {key: unpack(value, tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([unpack(value, tensors) for value in node])
    return node
