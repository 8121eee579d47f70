"""The gradient hook behind each of torch's: bound to a DDP at its first bucket."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.tensors import at_end_of_backward
from laconic.comm.bucket import RESIDUAL, Slot
from laconic.comm.collectives import AllReduce
from laconic.comm.flat_tensors import stored
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.compat._bucket_owner import Watch, watch
from laconic.gradients.handing_back import new_future
from laconic.gradients.hook import GradientHook
from laconic.reducers.base import Reducer
from laconic.reducers.exact import Exact

Hook: TypeAlias = Callable[[Any, dist.GradBucket], Future[Tensor]]


class Binding:
    """A hook at work for one DDP."""

    def __init__(self, watched: Watch, memory: dict[str, Slot]) -> None:
        self.watch = watched
        ddp = self.ddp
        if ddp.skip_all_reduce_unused_params:
            raise ValueError(
                "a DDP with skip_all_reduce_unused_params=True leaves buckets out, and this hook needs all of them"
            )
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        for name in names.values():
            memory.setdefault(name, {})
        self.ledger = Ledger()
        self.group = TorchGroup(ddp.process_group)
        self.hook = GradientHook(Exact(), self.group, names, memory, self.ledger)

    @property
    def ddp(self) -> DistributedDataParallel:
        ddp = self.watch.ddp()
        assert ddp is not None, "its backward is running"
        return ddp

    def average(self, bucket: dist.GradBucket, reducer: Reducer, process_group: dist.ProcessGroup | None) -> Future[Tensor]:
        """Average a bucket; None: over the ranks of the DDP itself."""
        wanted = process_group if process_group is not None else self.ddp.process_group
        if self.group.process_group is not wanted:
            self.group = TorchGroup(wanted)
        if reducer == Exact():
            # One collective, so nothing has to be put in order: each bucket's future is done when the bucket is.
            collective = AllReduce(bucket.buffer())
            self.ledger.launch(collective, self.group.world)
            return self.group.launch(collective).future()
        if bucket.buffer().is_sparse:
            raise TypeError(f"{reducer} can't compress sparse gradients; build the layer with sparse=False")
        if self.hook.idle:
            if (reducer, self.group) != (self.hook.reducer, self.hook.group):
                self.hook.use(reducer, self.group)
            self._finish_with_the_backward()
        elif reducer != self.hook.reducer:
            raise ValueError(
                f"the buckets of one backward can't be averaged by {self.hook.reducer} and by {reducer}, because their "
                "messages have to leave in one order; use one hook for all"
            )
        return self.hook.arrive(bucket)

    def _finish_with_the_backward(self) -> None:
        """If another hook is given the last bucket, ours are still completed."""
        try:
            at_end_of_backward(self.hook.finish)
        except RuntimeError as error:
            if "during backward pass" not in str(error):  # DDP's join hands over all buckets without one
                raise


_stateless: "weakref.WeakKeyDictionary[DistributedDataParallel, Binding]" = weakref.WeakKeyDictionary()


def average(process_group: object, bucket: dist.GradBucket, reducer: Reducer) -> Future[Tensor]:
    """What a hook does that keeps nothing between steps; its state is None or a process group."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"this hook's state must be None or a process group, got {type(process_group).__name__}")
    watched = watch(bucket, process_group)
    ddp = watched.ddp()
    assert ddp is not None
    if ddp not in _stateless:
        _stateless[ddp] = Binding(watched, {})
    watched.forwarded = False
    return _stateless[ddp].average(bucket, reducer, process_group)


def traffic(ddp: DistributedDataParallel) -> Ledger:
    """What a hook without state has sent so far."""
    return _stateless[ddp].ledger


def completed(tensor: Tensor) -> Future[Tensor]:
    """A future that is there already."""
    future = new_future(tensor.device)
    future.set_result(tensor)
    return future


def gradients(bucket: dist.GradBucket, flat: Tensor) -> list[Tensor]:
    """Each parameter's part of `flat`, laid out and typed as the parameter is.

    Not `bucket.gradients()`: DDP writes a dense parameter's gradient in the order in which the parameter lies in memory
    (channels_last, say), and those views are read as if it were contiguous.
    """
    parameters = bucket.parameters()
    pieces = torch.split(flat.detach(), [parameter.numel() for parameter in parameters])
    return [_as(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


def _as(piece: Tensor, parameter: Tensor) -> Tensor:
    if stored(parameter.detach()) is None:
        view = piece.view(parameter.shape)
    else:
        view = piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return view.to(parameter.dtype)


def checked_memory(memory: Mapping[str, Slot], ddp: DistributedDataParallel) -> None:
    """Refuse memory that is of another model."""
    parameters = dict(ddp.module.named_parameters())
    for name, slot in memory.items():
        if slot and name not in parameters:
            raise ValueError(f"this state has memory of a parameter {name!r} that the model doesn't have")
        if RESIDUAL in slot and slot[RESIDUAL].shape != parameters[name].shape:
            raise ValueError(
                f"this state's error of {name!r} has the shape {tuple(slot[RESIDUAL].shape)}, "
                f"the model's parameter {tuple(parameters[name].shape)}"
            )
