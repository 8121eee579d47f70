"""The dispatcher: the one communication hook that a DDP will ever have."""

# DDP refuses hooks whose annotations are strings: no `from __future__ import annotations` here.

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.ddp import comm_hooks, failed_in_buffers
from laconic.comm.bucket import Slot
from laconic.comm.group import TorchGroup, is_lost
from laconic.comm.ledger import Ledger
from laconic.gradients.handing_back import new_future
from laconic.gradients.hook import GradientHook
from laconic.reducers.exact import Exact


class Dispatcher:
    """Registered once, because DDP takes one registration for ever; `target` is re-pointed instead.

    Without a run it averages as DDP does. It is held by DDP's C++ half, where no garbage collector looks: it must not
    lead back to the DDP or to the run.
    """

    _of: ClassVar["weakref.WeakKeyDictionary[DistributedDataParallel, Dispatcher]"] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.target: GradientHook | None = None
        self.muted = False  # a local phase: no collective in forward or backward
        self.apart = False  # a phase of gradients within subgroups: no broadcast of buffers over all
        self.on_forward: weakref.WeakMethod[Callable[[], None]] | None = None
        self._plain: GradientHook | None = None
        self.replayed: list[str] | None = None  # the order that DDP was made to believe in
        self._replaying = False
        self._flags: tuple[bool, bool] | None = None  # DDP's own, while a muted forward runs

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> "Dispatcher":
        """The dispatcher of a DDP, registered now if it is the first time."""
        if ddp not in cls._of:
            dispatcher = cls()
            names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
            memory: dict[str, Slot] = {name: {} for name in names.values()}
            dispatcher._plain = GradientHook(Exact(), TorchGroup(ddp.process_group), names, memory, Ledger())
            dispatcher._plain.hands_back = waits_for_buckets_alone(ddp)
            ddp.register_comm_hook(None, dispatcher.dispatch)
            ddp.register_forward_pre_hook(dispatcher.before_forward)
            ddp.register_forward_hook(dispatcher.after_forward, always_call=True)
            cls._of[ddp] = dispatcher
        return cls._of[ddp]

    @classmethod
    def knows(cls, ddp: DistributedDataParallel) -> bool:
        """Whether this DDP has one already."""
        return ddp in cls._of

    @classmethod
    def refusal(cls, ddp: DistributedDataParallel) -> str | None:
        """Why this DDP can't be given a dispatcher, or None."""
        if ddp in cls._of:
            return "this DDP is attached to a run already; call its detach() first" if cls._of[ddp].target else None
        foreign = [hook for hook, _ in comm_hooks(ddp) if not isinstance(getattr(hook, "__self__", None), Dispatcher)]
        if foreign:
            name = getattr(foreign[0], "__qualname__", repr(foreign[0]))
            return f"this DDP has the communication hook {name} already, and DDP takes one for ever; build a new DDP without it"
        if ddp.mixed_precision is not None:
            return "a DDP built with mixed_precision= runs a communication hook of its own; use torch.autocast instead"
        return None

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, a backward sends nothing."""
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False

    def dispatch(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        if self._replaying:
            future = new_future(bucket.buffer().device)
            future.set_result(bucket.buffer())
            return future
        target = self.target or self._plain
        assert target is not None, "a copy of a dispatcher is registered with no DDP"
        return target.arrive(bucket)

    def before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None:
        callback = self.on_forward() if self.on_forward else None
        if callback is not None:
            callback()
        self._flags = (ddp.require_backward_grad_sync, ddp.forward_sync_buffers)
        if self.muted:
            # DDP decides in forward whether the backward will communicate. So its flags are put down for just as long, and
            # `no_sync`, which saves and restores one of them, never sees ours. They stop the all-reduce of
            # `find_unused_parameters` and the broadcast of buffers, too.
            ddp.require_backward_grad_sync = False
        if self.muted or self.apart:
            ddp.forward_sync_buffers = False

    def after_forward(self, ddp: DistributedDataParallel, inputs: object, output: object) -> None:
        if self._flags is not None:
            ddp.require_backward_grad_sync, ddp.forward_sync_buffers = self._flags
            self._flags = None

    def release(self) -> None:
        """Plain DDP again."""
        if self.target is not None:
            self.target.settle()
        self.target = self.on_forward = None
        self.muted = self.apart = False

    def __deepcopy__(self, memo: object) -> "Dispatcher":
        return _copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, ()


def waits_for_buckets_alone(ddp: DistributedDataParallel) -> bool:
    """Whether DDP can be left to wait by itself: with these options it waits for a collective of its own, too."""
    return not ddp.find_unused_parameters and not ddp.static_graph


def in_buffers(error: BaseException) -> bool:
    """Whether a collective of DDP's own failed, in forward: it broadcasts buffers there, and says no more than its backend."""
    return is_lost(error) and failed_in_buffers(error)


def _copy() -> Dispatcher:
    warnings.warn("a copied or unpickled DistributedDataParallel is a plain one, attached to no laconic run", stacklevel=3)
    return Dispatcher()
