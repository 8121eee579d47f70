"""What a run has inside backward: the hook, what DDP or FSDP2 holds of it, and the order of DDP's buckets."""

import weakref
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.comm.group import TorchGroup
from laconic.gradients.dispatcher import Dispatcher, waits_for_buckets_alone
from laconic.gradients.hook import GradientHook
from laconic.gradients.ready_order import ReadyOrder
from laconic.gradients.sharded import ShardedDispatcher


class InBackward:
    """Put onto a DDP, or onto a model that `fully_shard` has sharded; `release` takes it off again."""

    def __init__(self, ddp: DistributedDataParallel | None, module: nn.Module, hook: GradientHook) -> None:
        self.hook = hook
        hook.hands_back = ddp is not None and waits_for_buckets_alone(ddp)
        self.order = ReadyOrder(ddp) if ddp is not None else None
        self._dispatcher = Dispatcher.of(ddp) if ddp is not None else ShardedDispatcher(module)
        self._dispatcher.target = hook

    def on_forward(self, callback: Callable[[], None]) -> None:
        """Have a method called before each forward of a DDP; it is not kept alive."""
        if isinstance(self._dispatcher, Dispatcher):
            self._dispatcher.on_forward = weakref.WeakMethod(callback)

    def prepare(self, step: int, partners: TorchGroup | None, replicas: TorchGroup, *, apart: bool, unscaled: bool) -> None:
        """Make ready for the step after `step` completed ones: with whom it averages gradients, if with anybody."""
        self.hook.step, self.hook.unscaled = step, unscaled
        if (partners or replicas) != self.hook.group:
            self.hook.use(self.hook.reducer, partners or replicas)
        self._dispatcher.muted = partners is None
        if partners is None and isinstance(self._dispatcher, ShardedDispatcher):
            self._dispatcher.give_back()
        self._dispatcher.apart = partners is not replicas or apart

    def watch_order(self) -> None:
        """See in which order DDP makes gradients ready."""
        if self.order is not None:
            self.order.watch()

    def stepped(self) -> None:
        """A step is complete."""
        if isinstance(self._dispatcher, ShardedDispatcher):
            self._dispatcher.check_finished()
        if self.order is not None and self.hook.exchanges:
            self.order.settle()

    def stop(self) -> None:
        """Look no further for the order; what is known stays."""
        if self.order is not None:
            self.order.stop()

    def release(self) -> None:
        """A plain DDP, or plain FSDP2, again."""
        self._dispatcher.release()
