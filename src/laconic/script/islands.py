"""Islands for a script that calls `fully_shard` and knows nothing of laconic: it is given the mesh of one island."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.script.messages import log

REPLICATE, SHARD = "replicate", "shard"


class Islands:
    """The islands of a job, made when the script first asks for a mesh; `size` ranks each, or as many as a node has."""

    def __init__(self, size: str) -> None:
        self._size = size
        self.mesh: DeviceMesh | None = None
        self.replicate = REPLICATE

    def shard_mesh(self, asked: DeviceMesh | None) -> DeviceMesh:
        """What to shard over, where the script has asked for this mesh; None: it leaves it to torch, which takes all ranks."""
        if not dist.is_initialized():
            dist.init_process_group()  # as fully_shard does
        world = dist.get_world_size()
        size = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if self._size == "node" else int(self._size)
        if world % size:
            raise ValueError(f"{world} ranks can't be divided into islands of {size}")
        if asked is not None and asked.ndim == 2 and tuple(asked.shape) == (world // size, size) and asked.mesh_dim_names:
            return self._use(asked, *asked.mesh_dim_names)
        if asked is not None and (asked.ndim != 1 or asked.size() != world):
            raise ValueError(
                f"the script calls fully_shard with a mesh of {tuple(asked.shape)}, and --island-size {self._size} makes "
                f"islands of a mesh of all {world} ranks, or of one of {(world // size, size)}, islands and shards, that has "
                "names; call laconic.attach in the script, with the mesh of its islands"
            )
        if self.mesh is None:
            kind = asked.device_type if asked is not None else _default_device()
            self.mesh = init_device_mesh(kind, (world // size, size), mesh_dim_names=(REPLICATE, SHARD))
            log(f"fully_shard is given {world // size} islands of {size} ranks, where the script shards over all {world}")
        return self.mesh[SHARD]

    def _use(self, mesh: DeviceMesh, replicate: str, shard: str) -> DeviceMesh:
        if self.mesh is None:
            islands, size = mesh.shape
            log(f"the script's mesh is taken for {islands} islands of {size}: torch no longer averages gradients between them")
        self.mesh, self.replicate = mesh, replicate
        return mesh[shard]


def _default_device() -> str:
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def around_fully_shard(islands: Islands, saw: Callable[[nn.Module], None]) -> None:
    """Have `fully_shard` shard over one island, and `saw` called with what it has sharded."""
    from torch.distributed import fsdp

    shard: Any = fsdp.fully_shard

    @functools.wraps(shard)
    def shard_one_island(module: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["mesh"] = islands.shard_mesh(kwargs.get("mesh"))
        result = shard(module, *args, **kwargs)
        for one in module if isinstance(module, list | tuple) else [module]:
            saw(one)
        return result

    fsdp.fully_shard = shard_one_island
