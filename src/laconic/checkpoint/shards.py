"""Shards in a checkpoint: which tensors of a tree have a number for each number of a sharded parameter.

They are saved as what they are parts of, so that another mesh can cut them anew. Everything else of a rank is its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic._torch.fsdp import is_dtensor
from laconic.comm.flat_tensors import local
from laconic.run.engine import Engine
from laconic.run.state import kept_of

Path = tuple[str, ...]


class Shards:
    """The sharded parameters of a model, by the places in a tree where something is kept for each; none, where it is whole."""

    def __init__(self, engine: Engine) -> None:
        self._parameters = {name: one for name, one in engine.module.state_dict().items() if is_dtensor(one)}
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._stepped = {  # by the numbers of an optimizer and of a parameter in its state_dict
            (str(number), str(place)): names.get(id(parameter), "")
            for number, optimizer in enumerate(engine.optimizers)
            for place, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"])
        }

    def parameter_at(self, path: Path) -> Any:
        """The parameter, a DTensor, that a place in the tree is about; None: none that is sharded."""
        match path:
            case ("model", name) | ("run", "memory", name, _):
                return self._parameters.get(name)
            case ("run", "local", "deltas", "anchors", name) | ("run", "local", "deltas", "outer" | "memory", name, _):
                return self._parameters.get(name)
            case ("run", "local", "deltas", "outstanding", _, "deltas", name):
                return self._parameters.get(name)
            case ("optimizers", number, "state", place, _):
                return self._parameters.get(self._stepped.get((number, place), ""))
        return None

    def joined(self, path: Path, tensor: Tensor) -> Tensor:
        """A tensor of the tree, as a part of the whole if it is this rank's shard of something."""
        parameter = self.parameter_at(path)
        if parameter is None or is_dtensor(tensor) or tensor.shape != local(parameter).shape:
            return tensor
        return _shard_of(parameter, tensor)

    def blank(self, path: Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for a tensor of this size: for this rank's shard of it, if it is one of a sharded parameter."""
        parameter = self.parameter_at(path)
        if parameter is None or parameter.shape != size:
            return torch.empty(size, dtype=dtype)
        return _shard_of(parameter, torch.empty(local(parameter).shape, dtype=dtype, device=local(parameter).device))


def _shard_of(parameter: Any, tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    shard: Tensor = DTensor.from_local(
        tensor.detach(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return shard


def copied(tensor: Tensor) -> Tensor:
    """A copy to be written while training goes on: on the CPU, unless it is a shard, whose mesh is on the device."""
    return tensor.clone() if is_dtensor(tensor) else tensor.to("cpu", copy=True)


def rewrapped(like: Tensor, tensor: Tensor) -> Tensor:
    """A rank's shard, as a part of what `like` is a part of."""
    return _shard_of(like, tensor) if is_dtensor(like) else tensor


def own_parts(node: Any) -> Any:
    """A tree of plain data in which every shard is a plain tensor."""
    if isinstance(node, Tensor):
        return local(node) if is_dtensor(node) else node
    if isinstance(node, Mapping):
        return {key: own_parts(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([own_parts(value) for value in node])
    return node


def without_uncut(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """A run's state for another number of shards, and what it lost: memory that is of one shard as a whole, as warm starts.

    What has a number for each of a parameter's was read as this rank's part of the whole, and has the parameter's shape.
    """
    lost: set[str] = set()

    def cut(memory: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        kept: dict[str, dict[str, Tensor]] = {}
        for name, slot in memory.items():
            shape = parameters[name].shape if name in parameters else None
            kept[name] = {key: value for key, value in slot.items() if value.shape == shape}
            lost.update(slot.keys() - kept[name].keys())
        return kept

    memory, deltas = cut(state["memory"]), state["local"]["deltas"]
    if deltas is not None:
        deltas = {**deltas, "memory": cut(deltas["memory"])}
    changed = {"memory": memory, "local": {**state["local"], "deltas": deltas}, "kept": kept_of(memory, deltas)}
    return {**state, **changed}, sorted(lost)
