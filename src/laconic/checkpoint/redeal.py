"""Another number of ranks: what each new one gets of what the old ones had.

What all ranks had alike is taken as it is. Of what each had for itself:
- a reducer's own memory, such as residuals of error feedback, and deltas that were outstanding: every new rank gets the mean of
  the old ones, so that the mean over ranks, which is what the model would still have received, stays what it was;
- parameters and optimizer state of replicas that had drifted: their mean; of counters the largest;
- `extra`: that of old rank r mod N;  random generators: none, they go on as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.checkpoint.shards import rewrapped
from laconic.comm.flat_tensors import local
from laconic.run.state import declared, kept_of, owner, upgraded

Path = tuple[str, ...]


def merge(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One tree for every new rank, out of those of all old ranks; without `extra` and `random`."""
    wanted = [{key: value for key, value in tree.items() if key not in ("extra", "random")} for tree in trees]
    wanted = [{**tree, "run": {k: v for k, v in upgraded(tree["run"]).items() if k != "kept"}} for tree in wanted]
    merged: dict[str, Any] = _Merge([tree["run"] for tree in wanted]).combined(wanted, ())
    merged["run"]["kept"] = kept_of(merged["run"]["memory"], merged["run"]["local"]["deltas"])
    if merged["run"]["local"]["deltas"] is None:
        merged["run"]["local"]["drifted"] = False  # the mean of all replicas is the same everywhere
    return merged


class _Merge:
    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._ranks, self._strategy = len(states), str(states[0]["strategy"])
        self._whose = {key: kind for state in states for key, kind in declared(state).items()}

    def combined(self, nodes: Sequence[Any], path: Path) -> Any:
        first = nodes[0]
        if isinstance(first, Tensor):
            return self._tensor(nodes, path)
        if isinstance(first, Mapping):
            # A rank that had nothing to keep for a parameter has no entry.
            keys = list(dict.fromkeys(key for node in nodes for key in node))
            return {key: self.combined([node[key] for node in nodes if key in node], (*path, str(key))) for key in keys}
        if isinstance(first, list | tuple):
            return type(first)([self.combined(each, (*path, str(n))) for n, each in enumerate(zip(*nodes, strict=True))])
        return first

    def _tensor(self, parts: Sequence[Tensor], path: Path) -> Tensor:
        return rewrapped(parts[0], self._merged([local(part) for part in parts], path))

    def _merged(self, tensors: Sequence[Tensor], path: Path) -> Tensor:
        first = tensors[0]
        match path:
            case ("model" | "optimizers", *_):
                if all(torch.equal(first, tensor) for tensor in tensors):
                    return first
                if path[-1] == "step" or not (first.is_floating_point() or first.is_complex()):
                    return torch.stack(list(tensors)).amax(0)
                return _mean(tensors, len(tensors))
            case ("run", "memory", _, key) | ("run", "local", "deltas", "memory", _, key):
                own = owner(key, self._whose, self._strategy) == "own"
                return _mean(tensors, self._ranks) if own else first  # where there is no entry, it counts as zeros
            case ("run", "local", "deltas", "outstanding", _, "deltas", _):
                return _mean(tensors, self._ranks)
        return first


def _mean(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    first = tensors[0]
    wide = torch.complex128 if first.is_complex() else torch.float64
    return torch.stack([tensor.to(wide) for tensor in tensors]).sum(0).div_(ranks).to(first.dtype)
