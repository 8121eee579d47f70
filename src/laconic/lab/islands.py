"""Islands: workers of one host that hold one replica of a model together, sharded by fully_shard."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

NOT_CALLED = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so fully_shard refuses them


def island_mesh(size: int) -> DeviceMesh:
    """All workers as islands of so many: `replicate` goes across islands, `shard` within one. All workers together."""
    return init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model over its island, in place: each block of its lists and sequences by itself, then the rest."""
    for blocks in model.children():
        if isinstance(blocks, nn.ModuleList | nn.Sequential):
            for block in blocks.children():
                if not isinstance(block, NOT_CALLED) and any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def shard_state(whole: dict[str, Any], optimizer: Optimizer) -> None:
    """Give an optimizer of a sharded model the state dict of an optimizer of the whole one, the same on all workers.

    What has its parameter's shape is cut as the parameter is; all else, such as a count of steps, is taken as it is.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: _cut(value, parameters[index]) for name, value in memory.items()}
        for index, memory in whole["state"].items()
    }
    optimizer.load_state_dict({**whole, "state": state})


def _cut(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
