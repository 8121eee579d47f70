"""What DDP doesn't tell its hook: whose bucket it is, and whether an optimizer has stepped."""

import gc
import weakref

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
    """Counts optimizer steps from where only backwards are seen: one has been made where the parameters have changed.

    Without `no_sync`, a step of several accumulated backwards calls the hook in each of them, and still is one step.
    """

    def __init__(self) -> None:
        self._versions: int | None = None
        self._sums: Tensor | None = None

    def stepped(self, ddp: DistributedDataParallel) -> bool:
        """Whether this backward is the first one, or the first since the parameters changed."""
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        versions, known = sum(parameter._version for parameter in parameters), self._versions
        self._versions = versions
        if versions != known:
            self._sums = None
            return True
        # No in-place write that torch knows of: accumulation, or an optimizer that goes through `.data`.
        old, self._sums = self._sums, torch.stack([parameter.detach().double().sum().cpu() for parameter in parameters])
        return old is not None and not torch.equal(old, self._sums)
