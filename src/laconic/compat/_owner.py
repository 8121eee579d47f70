"""What DDP doesn't tell its hook: whose bucket it is, and whether an optimizer has stepped."""

import gc
import weakref
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_found: dict[int, tuple["weakref.ref[Tensor]", "weakref.ref[DistributedDataParallel]"]] = {}


def owner(bucket: dist.GradBucket, state: object) -> DistributedDataParallel:
    """The DDP that filled a bucket.

    A hook is handed a state and a bucket, neither of which knows the model; but only the model knows the parameters' names,
    and memory is kept by name. So the DDP is looked up once among the live objects, and remembered for as long as it lives.
    """
    parameter = bucket.parameters()[0]
    known = _found.get(id(parameter))
    ddp = known[1]() if known is not None and known[0]() is parameter else None
    if ddp is None or not _has(ddp, state):
        ddp = _search(parameter, state)
        _found[id(parameter)] = weakref.ref(parameter), weakref.ref(ddp)
    return ddp


def _search(parameter: Tensor, state: object) -> DistributedDataParallel:
    ddps: list[DistributedDataParallel] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)
    ]
    # One that is being built, or was built in vain, has no module yet.
    ddps = [
        ddp for ddp in ddps if any(each is parameter for part in ddp._modules.values() if part for each in part.parameters())
    ]
    ddps.sort(key=lambda ddp: _has(ddp, state))
    if not ddps:
        raise RuntimeError(
            "this communication hook can't find the DistributedDataParallel that it works for, because the garbage collector "
            "doesn't list it; call gc.unfreeze() before the first backward, or use laconic.attach instead"
        )
    return ddps[-1]


def _has(ddp: DistributedDataParallel, state: object) -> bool:
    return any(given is state for _, given in ddp._comm_hooks)


class Steps:
    """Tells optimizer steps apart where only forwards and backwards are seen.

    Without `no_sync`, a step of several accumulated backwards calls the hook in each of them, and still is one step. A backward
    goes on with the step of the one before where, since then, neither parameters have changed nor gradients been reset.
    """

    _of: ClassVar["weakref.WeakKeyDictionary[DistributedDataParallel, Steps]"] = weakref.WeakKeyDictionary()

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._reset = True
        self._versions = -1
        ddp.register_forward_pre_hook(self._before_forward)

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> "Steps":
        """Those of a DDP."""
        if ddp not in cls._of:
            cls._of[ddp] = cls(ddp)
        return cls._of[ddp]

    def next(self, ddp: DistributedDataParallel) -> bool:
        """A backward begins: whether it is of another step than the last one."""
        versions = _versions(ddp)
        new = self._reset or versions != self._versions
        self._reset, self._versions = False, versions
        return new

    def _before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None:
        # Where parameters have changed, nothing need be known of gradients: reading them would stall an accelerator.
        if torch.is_grad_enabled() and _versions(ddp) == self._versions:
            gradients = [parameter.grad for parameter in ddp.module.parameters()]
            self._reset = not any(gradient is not None and gradient.any() for gradient in gradients)


def _versions(ddp: DistributedDataParallel) -> int:
    """A number that changes with each in-place write of a parameter."""
    return sum(parameter._version for parameter in ddp.module.parameters())
