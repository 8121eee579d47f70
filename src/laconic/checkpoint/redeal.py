"""Another number of ranks: what each new one gets of what the old ones had.

What all ranks had alike is taken as it is. Of what each had for itself:
- residuals of error feedback, and deltas in the air: every new rank gets the mean of the old ones, so that the mean over
  ranks, which is what the model would still have received, stays what it was;
- parameters and optimizer state of replicas that had drifted: their mean; of counters the largest;
- `extra`: that of old rank r mod N;  random generators: none, they go on as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.state import kept_of

Path = tuple[str, ...]


def merge(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One tree for every new rank, out of those of all old ranks; without `extra` and `random`."""
    wanted = [{key: value for key, value in tree.items() if key not in ("extra", "random")} for tree in trees]
    wanted = [{**tree, "run": {key: value for key, value in tree["run"].items() if key != "kept"}} for tree in wanted]
    merged: dict[str, Any] = _combined(wanted, (), len(trees))
    merged["run"]["kept"] = kept_of(merged["run"]["memory"], merged["run"]["local"]["deltas"])
    if merged["run"]["local"]["deltas"] is None:
        merged["run"]["local"]["drifted"] = False  # the mean of all replicas is the same everywhere
    return merged


def _combined(nodes: Sequence[Any], path: Path, ranks: int) -> Any:
    first = nodes[0]
    if isinstance(first, Tensor):
        return _mean(nodes, path, ranks)
    if isinstance(first, Mapping):
        # A rank that had nothing to keep for a parameter has no entry.
        keys = list(dict.fromkeys(key for node in nodes for key in node))
        return {key: _combined([node[key] for node in nodes if key in node], (*path, str(key)), ranks) for key in keys}
    if isinstance(first, list | tuple):
        return type(first)([_combined(each, (*path, str(place)), ranks) for place, each in enumerate(zip(*nodes, strict=True))])
    return first


def _mean(tensors: Sequence[Tensor], path: Path, ranks: int) -> Tensor:
    first = tensors[0]
    match path:
        case ("model" | "optimizers", *_):
            if all(torch.equal(first, tensor) for tensor in tensors):
                return first
            if path[-1] == "step" or not (first.is_floating_point() or first.is_complex()):
                return torch.stack(list(tensors)).amax(0)
            ranks = len(tensors)
        case ("run", "memory", _, "error") | ("run", "local", "deltas", "memory", _, "error"):
            pass  # where there is no entry, there is no error
        case ("run", "local", "deltas", "air", _, "deltas", _):
            pass
        case _:
            return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    return torch.stack([tensor.to(wide) for tensor in tensors]).sum(0).div_(ranks).to(first.dtype)
