"""Sharded models: what `attach` takes of them, and what it refuses, before anything is changed."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.fsdp import (
    after_accumulation,
    is_dtensor,
    is_fsdp1,
    is_fully_sharded,
    shard_groups,
    sharding_is_imported,
    with_several_groups,
)
from laconic._torch.process_groups import default_group
from laconic.comm.flat_tensors import local
from laconic.ranks import islands
from laconic.ranks.islands import Ranks
from laconic.reducers.base import Reducer
from laconic.strategies.strategy import Strategy

FORM = (
    'mesh = init_device_mesh(device, (islands, shards), mesh_dim_names=("replicate", "shard")); '
    'fully_shard(model, mesh=mesh["shard"]); laconic.attach(model, optimizer, strategy, mesh=mesh)'
)


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds a part of it alone."""
    if not sharding_is_imported():  # a large model takes a while to go through
        return False
    held = [*model.parameters(), *model.buffers()]
    return any(map(is_dtensor, held)) or any(map(is_fully_sharded, model.modules()))


def ranks_of(model: object, mesh: object, replicate: object) -> Ranks:
    """Who trains a sharded model; all ranks together. Of a mesh that can't be used, all ranks of the job: they will be told."""
    sharded = isinstance(model, nn.Module) and is_sharded(model)
    if sharded and isinstance(mesh, DeviceMesh) and isinstance(replicate, str) and replicate in (mesh.mesh_dim_names or ()):
        return islands.of_mesh(mesh, replicate)
    return islands.whole(default_group())


@dataclass(frozen=True)
class Sharding:
    """A sharded model on its islands."""

    native: bool  # torch itself averages gradients between islands
    refusal: str | None  # why its gradients can't be averaged inside backward, as the end of a sentence; None: they can

    def check(self, strategy: Strategy) -> None:
        """Refuse a strategy that can't be used with it."""
        if strategy.route.communicates and self.refusal:
            raise ValueError(f"{strategy} averages gradients, and {self.refusal}")
        if self.native:
            warnings.warn(f"{strategy} saves nothing in backward: {self.refusal}", stacklevel=5)
        deltas = strategy.averaging.deltas if strategy.averaging else None
        whole = [part for reducer in (strategy.reducer, deltas and deltas.reducer) if reducer for part in _whole(reducer)]
        if whole:
            raise ValueError(
                f"{whole[0]} makes one matrix of all that is in a bucket, and of a sharded model a bucket holds parts of "
                "parameters; use PowerSGD, which works on this rank's rows of each matrix"
            )


def _whole(reducer: Reducer) -> list[str]:
    found = [] if reducer.takes_shards else [type(reducer).__name__]
    return found + [name for part in reducer.inner_reducers() for name in _whole(part)]


def check_sharding(model: nn.Module, mesh: object, replicate: object, ranks: Ranks) -> Sharding:
    """How a model is sharded, or an error that says what can't be used."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError("there is a sharded model inside this DistributedDataParallel; attach the sharded model, without it")
    check_kinds(model)
    if mesh is None:
        raise ValueError(
            f"this {type(model).__name__} is sharded, and attach was given no mesh: it must know which ranks hold one replica "
            f"together, and which hold the same shard of another. Shard over islands: {FORM}"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
    if not mesh.mesh_dim_names:
        raise ValueError(f"the mesh has no names, so that its islands can't be told from its shards; give it some: {FORM}")
    if replicate not in mesh.mesh_dim_names:
        raise ValueError(
            f"the islands are the mesh's dimension {replicate!r}, and the mesh has {', '.join(mesh.mesh_dim_names)}; "
            f"say which of them: attach(..., replicate={mesh.mesh_dim_names[0]!r})"
        )
    _check_order(mesh)
    for parameter in model.parameters():
        _check_order(parameter.device_mesh)  # type: ignore[attr-defined]  # of a DTensor
    native = _check_over(model, str(replicate), ranks)
    if native:
        why = f"torch averages gradients between islands itself, as fully_shard was given a mesh with {replicate!r} in it"
        return Sharding(True, f"{why}. Shard over the island alone: {FORM}")
    return Sharding(False, _refusal(model))


def check_kinds(model: nn.Module) -> None:
    """Refuse a sharded model of which some parts are whole, or have no numbers yet."""
    buffers = [name for name, one in model.named_buffers() if is_dtensor(one)]
    if buffers:
        raise ValueError(f"the buffer {buffers[0]} is a DTensor, and only parameters may be; keep buffers whole on each rank")
    held = dict(model.named_parameters())
    empty = [name for name, one in held.items() if one.is_meta]
    if empty:
        raise ValueError(f"{empty[0]} is on the meta device, without numbers: call to_empty and initialise the model first")
    shards = [name for name, one in held.items() if is_dtensor(one)]
    others = [name for name, one in held.items() if not is_dtensor(one)]
    if shards and others:
        raise ValueError(
            f"{shards[0]} is a DTensor and {others[0]} is not: of a sharded model all parameters must be. Call fully_shard on "
            "the whole model last, or distribute_tensor on those that a tensor-parallel plan leaves out"
        )


def _check_order(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose process groups have another order: FSDP cuts by the rank in a group, a DTensor by the mesh."""
    if any(bool((mesh.mesh.diff(dim=dim) <= 0).any()) for dim in range(mesh.ndim)):
        raise ValueError(
            f"the mesh {mesh.mesh.tolist()} has ranks in falling order, and torch's process groups are in rising order; "
            "build it by init_device_mesh, or with ranks that rise along each dimension"
        )


def _check_over(model: nn.Module, replicate: str, ranks: Ranks) -> bool:
    """Refuse a model that is sharded over several islands; whether torch replicates it over them itself."""
    mates = set(ranks.mates)
    native = False
    for name, parameter in model.named_parameters():
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]  # of a DTensor
        over = set(mesh.mesh.flatten().tolist())
        if over <= mates:
            continue
        if not _replicated(parameter, over - mates, mates):
            raise ValueError(
                f"{name} is sharded over ranks {', '.join(map(str, sorted(over)))}, and mesh[{replicate!r}] puts these into "
                f"several islands: this rank's is {', '.join(map(str, sorted(mates)))}. Shard over one island: {FORM}"
            )
        native = True
    return native


def _refusal(model: nn.Module) -> str | None:
    """Why gradients can't be averaged inside backward, as the end of a sentence; None: they can."""
    several = with_several_groups(model)
    if several is not None:
        return (
            f"fully_shard made several groups of parameters in {several}, by a mesh for each parameter, where torch takes no "
            "hook. Shard these modules apart, or use a strategy that averages between steps, such as local_sgd()"
        )
    groups = shard_groups(model)
    covered = {id(parameter) for group in groups for parameter in group.parameters}
    free = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in covered]
    if free:
        return (
            f"{free[0]} is in no fully_shard, so nothing says when its gradient is ready. Call fully_shard on the whole model, "
            "or use a strategy that averages between steps, such as local_sgd()"
        )
    hooked = [group.name for group in groups if group.hook is not None]
    if hooked:
        return f"{hooked[0]} has an all-reduce hook already; take it off with set_all_reduce_hook(None)"
    early = [name for name, one in model.named_parameters() if after_accumulation(one)]
    if early:
        return f"{early[0]} has a post-accumulate-grad hook, which would see the gradient before it is averaged; take it off"
    return None


def _replicated(parameter: Any, others: set[int], mates: set[int]) -> bool:
    """Whether a DTensor's mesh leaves the island only along dimensions in which it is replicated."""
    ranks = parameter.device_mesh.mesh
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            along = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])
            if any(set(line) & mates and set(line) & others for line in along.tolist()):
                return False
    return True


def looks(parameter: Tensor) -> str:
    """What a shard is of, as all ranks of all islands have it."""
    dtensor: Any = parameter
    placed = ", ".join(map(str, dtensor.placements))
    return f"shape {tuple(parameter.shape)}, {parameter.dtype}, {placed} over a mesh of {tuple(dtensor.device_mesh.shape)}"


def own_facts(parameters: Mapping[str, Tensor]) -> list[str]:
    """What the ranks that hold the same shard must have alike."""
    found = []
    for name, parameter in parameters.items():
        dtensor: Any = parameter
        places = zip(dtensor.device_mesh.get_coordinate() or (), dtensor.placements, strict=True)
        at = tuple(place for place, placement in places if not placement.is_replicate())
        found.append(f"of {name} the shard at {at} of its mesh, of shape {tuple(local(parameter).shape)}")
    return found


def refuse_fsdp1(model: nn.Module) -> None:
    """FSDP's first form keeps a flat parameter of its own, which has no names."""
    if any(map(is_fsdp1, model.modules())):
        raise ValueError(
            f"this {type(model).__name__} has a FullyShardedDataParallel, and laconic works with its successor: shard with "
            f"torch.distributed.fsdp.fully_shard instead. {FORM}"
        )
