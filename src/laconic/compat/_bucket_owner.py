"""What DDP doesn't tell its hook: whose bucket it is, and whether an optimizer has stepped."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic._torch.ddp import comm_hooks, has_run_forward, is_joined, module_of
from laconic._torch.tensors import version

_known: dict[int, list["Watch"]] = {}  # by parameter: those of the DDPs that have it
_watching: Any = None  # the handle of the hook that sees every optimizer step


class Watch:
    """What has happened to a DDP since its last backward.

    Without `no_sync`, a step of several accumulated backwards calls the hook in each of them, and still is one step. So a
    backward goes on with the step of the one before, unless since then an optimizer has stepped, parameters have been
    written, or gradients been reset before a forward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = weakref.ref(ddp)
        self.forwarded: bool = has_run_forward(ddp)  # a forward has run, so that a backward may come
        self.blind = False  # forwards are not seen (a compiled DDP keeps the hooks that it was compiled with)
        self.open = False  # a backward has begun, and not all of its buckets have arrived
        self._stepped = True
        self._versions = -1
        ddp.register_forward_pre_hook(self._before_forward)

    def stepped(self) -> None:
        """An optimizer has stepped some of its parameters."""
        self._stepped = True

    def next_step(self) -> bool:
        """A backward begins: whether it is of another step than the last one."""
        ddp = self.ddp()
        assert ddp is not None, "its backward is running"
        versions = _versions(ddp)
        # Where loaders are uneven, a rank that has joined shadows the others' backwards and steps nothing itself.
        new = self._stepped or versions != self._versions or is_joined(ddp)
        self._stepped, self._versions, self.forwarded = False, versions, False
        return new

    def _before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None:
        self.forwarded = True
        # Where a step is known of, nothing need be known of gradients: reading them would stall an accelerator.
        if torch.is_grad_enabled() and not self._stepped and _versions(ddp) == self._versions:
            gradients = [parameter.grad for parameter in ddp.module.parameters()]
            self._stepped = not any(gradient is not None and gradient.any() for gradient in gradients)

    def __deepcopy__(self, memo: object) -> "_Copied":
        return _Copied()

    def __reduce__(self) -> tuple[type["_Copied"], tuple[()]]:
        return _Copied, ()


class _Copied:
    """The watch of a copied or unpickled DDP: it watches nothing, for the copy has no hook."""

    def _before_forward(self, ddp: DistributedDataParallel, inputs: object) -> None: ...


def watch(bucket: dist.GradBucket, state: object) -> Watch:
    """The watch of the DDP that filled a bucket.

    A hook is handed a state and a bucket, neither of which knows the model; but only the model knows the parameters' names,
    and memory is kept by name. So the DDP is looked up among the live objects when its first bucket arrives, and remembered.
    Of several DDPs around one module it is the one that has run a forward.
    """
    parameter = bucket.parameters()[0]
    known = [each for each in _known.get(id(parameter), []) if each.ddp() is not None]
    if known and bucket.index() > 0:
        known.sort(key=lambda each: each.open)
    elif any(_expects(each) for each in known):
        known.sort(key=_expects)
    else:
        before, known = known, _search(parameter, state)
        known[-1].blind = known[-1] in before
    found = known[-1]
    found.open = not bucket.is_last()
    return found


def _expects(each: Watch) -> bool:
    ddp = each.ddp()
    return each.forwarded or each.blind or (ddp is not None and is_joined(ddp))


def _search(parameter: Tensor, state: object) -> list[Watch]:
    """Those of all DDPs that have the parameter; in the end one that is new, or was registered with this state."""
    ddps = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    ddps = [ddp for ddp in ddps if any(each is parameter for each in _parameters(ddp))]
    if not ddps:
        raise RuntimeError(
            "this communication hook can't find the DistributedDataParallel that it works for, because the garbage collector "
            "doesn't list it; call gc.unfreeze() before the first backward, or use laconic.attach instead"
        )
    ddps.sort(key=lambda ddp: (has_run_forward(ddp), any(given is state for _, given in comm_hooks(ddp))))
    fresh = [ddp for ddp in ddps if all(each.ddp() is not ddp for each in _known.get(id(parameter), []))]
    for ddp in fresh:
        _remember(ddp)
    watches = {id(each.ddp()): each for each in _known[id(parameter)]}
    return [watches[id(ddp)] for ddp in [*(ddp for ddp in ddps if ddp not in fresh), *fresh]]


def _remember(ddp: DistributedDataParallel) -> None:
    global _watching
    if _watching is None:
        _watching = register_optimizer_step_post_hook(_after_any_step)
    mine = Watch(ddp)
    for parameter in _parameters(ddp):
        alive = [each for each in _known.get(id(parameter), []) if each.ddp() is not None]
        # A parameter that has gone may have had the same id.
        _known[id(parameter)] = [*(each for each in alive if any(p is parameter for p in _parameters(each.ddp()))), mine]


def _after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    # Fused optimizers don't count as writes of the parameters; so every optimizer's steps are looked at.
    touched = {each for group in optimizer.param_groups for p in group["params"] for each in _known.get(id(p), [])}
    for each in touched:
        each.stepped()


def _parameters(ddp: DistributedDataParallel | None) -> Iterable[Tensor]:
    module = module_of(ddp) if ddp is not None else None
    return module.parameters() if module is not None else []


def _versions(ddp: DistributedDataParallel) -> int:
    """A number that changes with each in-place write of a parameter that torch knows of."""
    return sum(version(parameter) for parameter in ddp.module.parameters())
