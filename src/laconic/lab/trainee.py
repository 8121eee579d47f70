"""What a worker trains: a task's model and optimizer, ready for its first step."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.lab import tasks
from laconic.lab.file_task import TaskError


class Trainee(NamedTuple):
    """What is trained, ready for its first step."""

    task: tasks.Task
    model: nn.Module  # a DistributedDataParallel, or sharded
    optimizer: Optimizer
    mesh: DeviceMesh | None = None  # of the islands over which it is sharded

    @property
    def bare(self) -> nn.Module:
        """The task's own model."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def replicas(self) -> int:
        """So many workers, or islands, have a model each."""
        return dist.get_world_size() if self.mesh is None else self.mesh["replicate"].size()


def build(job: Mapping[str, Any], mesh: DeviceMesh | None = None) -> Trainee:
    """A task's model and optimizer, as its own function `warm` leaves them, or a warm start of the lab's.

    With a mesh of islands, the model is sharded then; its optimizer's memory comes with it.
    """
    task = tasks.load(job["task"])
    torch.manual_seed(job["seed"])
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model)
    task.warm(model.module, optimizer)
    if job.get("start"):
        try:
            state = torch.load(job["start"])
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # whatever a damaged file leads to
            said = f"the warm start {job['start']} can't be used ({type(error).__name__}: {error}); delete it, and run again"
            raise TaskError(said) from error
    if mesh is None:
        return Trainee(task, model, optimizer)
    from laconic.lab.islands import shard, shard_state  # half a second to import: DTensors

    bare = model.module  # in which DDP has made the weights the same on all workers
    shard(bare, mesh)
    sharded = task.optimizer(bare)
    shard_state(optimizer.state_dict(), sharded)
    return Trainee(task, bare, sharded, mesh)


def step(trainee: Trainee, batch: Any) -> None:
    """One step of training, as a user's loop makes it."""
    loss: Any = trainee.task.loss(trainee.model, batch)
    loss.backward()
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()


@contextmanager
def undone(trainee: Trainee) -> Iterator[None]:
    """Steps that are made inside leave no trace: model and optimizer are as they were."""
    model, optimizer = trainee.bare, trainee.optimizer
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    yield
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
