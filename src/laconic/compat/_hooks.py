"""The gradient hook behind each of torch's: bound to a DDP at its first bucket."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.bucket import Slot, stored
from laconic.compat._owner import Steps, owner
from laconic.hook import GradientHook, new_future
from laconic.reducers.base import Reducer
from laconic.reducers.exact import Exact
from laconic.wire import Ledger, TorchGroup

Hook: TypeAlias = Callable[[Any, dist.GradBucket], Future[Tensor]]


class Binding:
    """A hook at work for one DDP."""

    def __init__(self, ddp: DistributedDataParallel, memory: dict[str, Slot]) -> None:
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        for name in names.values():
            memory.setdefault(name, {})
        self.ledger = Ledger()
        self.hook = GradientHook(Exact(), TorchGroup(ddp.process_group), names, memory, self.ledger)
        self._ddp = weakref.ref(ddp)
        self._steps = Steps.of(ddp)

    @property
    def ddp(self) -> DistributedDataParallel:
        ddp = self._ddp()
        assert ddp is not None, "its backward is running"
        return ddp

    def belongs_to(self, ddp: DistributedDataParallel) -> bool:
        return self._ddp() is ddp

    def next_step(self) -> bool:
        """A backward begins: whether it is of another optimizer step than the last one."""
        return self._steps.next(self.ddp)

    def use(self, reducer: Reducer, process_group: dist.ProcessGroup | None) -> None:
        """From this backward on; None: the ranks of the DDP itself."""
        wanted = process_group if process_group is not None else self.ddp.process_group
        group = self.hook.group
        assert isinstance(group, TorchGroup)
        self.hook.use(reducer, group if group.process_group is wanted else TorchGroup(wanted))


_stateless: "weakref.WeakKeyDictionary[DistributedDataParallel, Binding]" = weakref.WeakKeyDictionary()


def average(process_group: object, bucket: dist.GradBucket, reducer: Reducer) -> Future[Tensor]:
    """What a hook does that keeps nothing between steps; its state is None or a process group."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"this hook's state must be None or a process group, got {type(process_group).__name__}")
    ddp = owner(bucket, process_group)
    if ddp not in _stateless:
        _stateless[ddp] = Binding(ddp, {})
    if bucket.index() == 0:
        _stateless[ddp].use(reducer, process_group)
    return _stateless[ddp].hook.arrive(bucket)


def traffic(ddp: DistributedDataParallel) -> Ledger:
    """What a hook without state has sent so far."""
    return _stateless[ddp].ledger


def landed(tensor: Tensor) -> Future[Tensor]:
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
        if "error" in slot and slot["error"].shape != parameters[name].shape:
            raise ValueError(
                f"this state's error of {name!r} has the shape {tuple(slot['error'].shape)}, "
                f"the model's parameter {tuple(parameters[name].shape)}"
            )
