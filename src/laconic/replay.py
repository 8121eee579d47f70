"""A new DDP takes over the bucket layout of a former one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.dispatch import Dispatcher


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
    if ddp._has_rebuilt_buckets or ddp.find_unused_parameters or ddp.static_graph or set(averaged) != set(order):
        return False
    dispatcher = Dispatcher.of(ddp)
    if dispatcher.replayed is not None:  # DDP would add a second order to the first, and fail in its next forward
        return dispatcher.replayed == list(order)
    dispatcher.replayed = list(order)
    indices = [averaged.index(name) for name in order]
    gradients = [parameter.grad for parameter in named.values()]
    reducer: Any = ddp.reducer
    finalize: Any = ddp.finalize_backward if getattr(ddp, "require_manual_backward_finalization", False) else None

    def fire() -> None:
        for index in indices:
            reducer._autograd_hook(index)

    with dispatcher.replaying(), torch.enable_grad():
        for parameter in named.values():
            parameter.grad = None
        reducer.prepare_for_backward([])
        apply: Any = _InBackward.apply
        apply(torch.ones(1, requires_grad=True), fire).sum().backward()
        if finalize is not None:  # since torch 2.15 a DDP may leave that to the user's loop, which knows nothing of this one
            finalize()
    for parameter, gradient in zip(named.values(), gradients, strict=True):
        parameter.grad = gradient
    return True


class _InBackward(torch.autograd.Function):
    """Calls a function from inside a backward, which is where DDP can finish one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradients[0], None


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
