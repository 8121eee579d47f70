"""The order of DDP's buckets: seen in its first backward, and taken over by a new DDP from a former one."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.ddp import fire_ready, has_rebuilt_buckets
from laconic.gradients.dispatcher import Dispatcher


def replay(ddp: DistributedDataParallel, order: Sequence[str]) -> bool:
    """Let DDP believe that a backward has made gradients ready in this order; all ranks together.

    DDP rebuilds its buckets once, before its second forward, in the order in which the first backward made gradients ready.
    With three and more ranks the order of summation depends on the buckets, so a run that goes on in a new DDP would sum its
    first step in another order, and end at other bits. Nothing travels here, no gradient changes, no hook of a user's is
    called. Where the layout never changes (find_unused_parameters), or has changed already, where the graph is static or the
    parameters are others, this does nothing, and says so.
    """
    named = dict(ddp.module.named_parameters())
    # DDP numbers the parameters that it averages.
    averaged = [name for name, parameter in named.items() if parameter.requires_grad and name not in ddp.parameters_to_ignore]
    if has_rebuilt_buckets(ddp) or ddp.find_unused_parameters or ddp.static_graph or set(averaged) != set(order):
        return False
    dispatcher = Dispatcher.of(ddp)
    if dispatcher.replayed is not None:  # DDP would add a second order to the first, and fail in its next forward
        return dispatcher.replayed == list(order)
    dispatcher.replayed = list(order)
    indices = [averaged.index(name) for name in order]
    gradients = [parameter.grad for parameter in named.values()]
    with dispatcher.replaying(), torch.enable_grad():
        for parameter in named.values():
            parameter.grad = None
        fire_ready(ddp, indices)
    for parameter, gradient in zip(named.values(), gradients, strict=True):
        parameter.grad = gradient
    return True


class Readiness:
    """The order in which the first backward that is averaged makes gradients ready: what DDP will build its buckets by."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._order: dict[str, None] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, name))
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        ]

    def _ready(self, name: str, parameter: Tensor) -> None:
        self._order.pop(name, None)  # of a backward before, which was not averaged
        self._order[name] = None

    def stop(self) -> list[str]:
        """Look no further; what was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return list(self._order)


class ReadyOrder:
    """The order in which a DDP's first backward made gradients ready: what a new DDP must be told to sum as this one does."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp: DistributedDataParallel | None = ddp  # until `stop`
        self._order: list[str] | None = None  # once it is known
        self._readiness: Readiness | None = None

    def watch(self) -> None:
        """If the first backward that communicates is still to come, see in which order it makes gradients ready."""
        ddp = self._ddp
        if ddp is not None and self._order is None and self._readiness is None and not has_rebuilt_buckets(ddp):
            self._readiness = Readiness(ddp)

    def settle(self) -> None:
        """That backward has been."""
        if self._readiness is not None:
            self._order, self._readiness = self._readiness.stop(), None

    def known(self, layout: Sequence[Sequence[str]]) -> list[str] | None:
        """The order, if it is known by now; `layout`: the buckets of the last backward."""
        if self._order is None and self._ddp is not None and has_rebuilt_buckets(self._ddp):
            return [name for bucket in layout for name in bucket] or None
        return self._order

    def take_over(self, order: Sequence[str]) -> None:
        """Have this DDP build its buckets by the order of a former one, where it can; all ranks together."""
        if self._ddp is not None and replay(self._ddp, order):
            self._look_no_further()
            self._order = list(order)

    def stop(self) -> None:
        """Let go of the DDP; what is known stays."""
        self._look_no_further()
        self._ddp = None

    def _look_no_further(self) -> None:
        if self._readiness is not None:
            self._readiness.stop()
            self._readiness = None
