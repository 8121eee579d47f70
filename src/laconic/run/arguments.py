"""What a run is made of: the arguments of `attach`, checked before anything is changed."""

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic._torch.ddp import has_learnt_graph
from laconic._torch.fsdp import is_dtensor, reshard
from laconic.comm.scopes import HEARTBEATS, OUTSTANDING, Scope
from laconic.gradients.dispatcher import Dispatcher
from laconic.kernels.compiling import Fused
from laconic.kernels.compiling import checked as fuses
from laconic.local.fragments import fragments
from laconic.ranks.groups import check_scopes
from laconic.ranks.islands import Ranks
from laconic.run.sharding import Sharding, check_sharding, is_sharded, looks, own_facts, refuse_fsdp1
from laconic.strategies.outer import Outer
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Strategy

attached: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers that a run counts the steps of."""


@dataclass(frozen=True)
class Arguments:
    """What `attach` was given, checked."""

    module: nn.Module  # what the user wrote, without DDP around it
    ddp: DistributedDataParallel | None
    parameters: dict[str, nn.Parameter]  # those that are trained now, but for the ones that DDP was told to ignore
    optimizers: list[Optimizer]
    scaler: torch.amp.GradScaler | None
    strategy: Strategy
    uneven: str
    mesh: DeviceMesh | None
    check_every: int  # syncs between two comparisons of the replicas; 0: never
    fused: Fused
    ranks: Ranks
    sharding: Sharding | None  # None: each rank holds a whole replica

    @property
    def place(self) -> "Place":
        """What a strategy must fit."""
        return Place(self.ddp, self.parameters, self.mesh, self.sharding)

    def facts(self) -> list[str]:
        """What all ranks must have alike."""
        kind = "a sharded module" if self.sharding else "a bare module"
        return [
            f"strategy {self.strategy.compared}",
            f"uneven={self.uneven!r}",
            f"check_every={self.check_every}",
            f"{len(self.optimizers)} optimizers",
            "a GradScaler" if self.scaler else "no GradScaler",
            "a DistributedDataParallel" if self.ddp else kind,
            f"a mesh of {self.mesh.shape}" if self.mesh else "no mesh",
            *(f"parameter {name} of {_looks(parameter)}" for name, parameter in self.parameters.items()),
            # (The buffers of a DDP are its own affair: it has sent the first rank's to all.)
            *(f"buffer {name} of {_looks(b)}" for name, b in self.module.named_buffers() if self.ddp is None),
        ]

    def own_facts(self) -> list[str]:
        """What the ranks that average with this one must have alike, beyond that."""
        return own_facts(self.parameters) if self.sharding else []


class Place(NamedTuple):
    """The model that a strategy is attached to, and where it is."""

    ddp: DistributedDataParallel | None
    parameters: Mapping[str, Tensor]
    mesh: DeviceMesh | None
    sharding: Sharding | None


def _looks(tensor: Tensor) -> str:
    if is_dtensor(tensor):
        return looks(tensor)
    order = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}{order}"


def check_route(strategy: Strategy, place: Place, world: int) -> None:
    """Refuse a strategy that doesn't fit the model or its `world` replicas."""
    ddp, parameters, sharding = place.ddp, place.parameters, place.sharding
    check_scopes(scopes(strategy), world, place.mesh, sharded=sharding is not None)
    averaging = strategy.averaging
    if averaging and not averaging.route.scopes & {"world", world}:
        largest, who = averaging.route.legs[0][1], "islands" if sharding else "ranks"
        raise ValueError(f"the last group must hold all {world} {who}, or replicas never become equal; got {largest!r}")
    if averaging and averaging.deltas:
        odd = [name for name, parameter in parameters.items() if not parameter.is_floating_point()]
        if odd:
            raise ValueError(f"{strategy} sends deltas of floats, and {odd[0]} is {parameters[odd[0]].dtype}; use local_sgd()")
        fragments(parameters, averaging.deltas.fragments, averaging.deltas.order)
        _check_outer(averaging.deltas.outer)
    if ddp is not None and ddp.find_unused_parameters and strategy.route.scopes - {"world"}:
        raise ValueError(
            f"{strategy} averages gradients within subgroups, and DDP with find_unused_parameters=True communicates with all "
            "ranks in every backward; use subgroup='none', or build the DDP without it"
        )
    if sharding is not None:
        sharding.check(strategy)
    elif strategy.route.communicates and ddp is None:
        raise ValueError(
            f"{strategy} averages gradients, which needs a DistributedDataParallel; wrap the model before you attach: "
            "model = DistributedDataParallel(model)"
        )


def _check_outer(outer: Outer) -> None:
    """Refuse an outer optimizer of the user's own that builds none; known before a warm-up has been trained."""
    name = type(outer).__name__
    built: object = outer.build([{"params": [torch.zeros(1, 1)], "rate": 1.0}])
    if not isinstance(built, Optimizer):
        raise TypeError(f"{name}.build must return a torch.optim.Optimizer over the groups that it is given, got {built!r:.80}")
    if len(built.param_groups) != 1:
        raise ValueError(f"{name}.build must keep the groups that it is given: of one, it made {len(built.param_groups)}")


def check_sharded(strategy: Strategy, optimizers: Sequence[Optimizer]) -> None:
    """Refuse local steps by an optimizer that sends its own shard of the parameters to all after each of them."""
    local = strategy.averaging is not None or strategy.route.scopes != {"world"} or not strategy.route.communicates
    # Its import compiles torch's functional optimizers, 0.15 s: whoever has one has imported it.
    if not local or "torch.distributed.optim.zero_redundancy_optimizer" not in sys.modules:
        return
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if any(isinstance(one, ZeroRedundancyOptimizer) for one in optimizers):
        raise ValueError(
            f"{strategy} takes steps apart, and a ZeroRedundancyOptimizer has each rank step a shard for all: every shard "
            "would see one rank's gradients alone. Use a strategy that averages gradients in every step, or another optimizer"
        )


def scopes(strategy: Strategy) -> set[Scope]:
    """All groups of ranks that a strategy communicates with."""
    averaging = strategy.averaging
    between = averaging.route.scopes if averaging else set()
    outstanding = {OUTSTANDING, HEARTBEATS} if averaging and averaging.deltas and averaging.deltas.delay else set()
    return {*strategy.route.scopes, *between, *outstanding}


def check(
    model: object,
    optimizer: object,
    strategy: object,
    scaler: object,
    uneven: object,
    mesh: object,
    replicate: object,
    ranks: Ranks,
    check_every: object,
    fused: object,
) -> Arguments:
    """The plan that these arguments of `attach` make, or an error that says which one is wrong."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    refuse_fsdp1(model)
    if is_sharded(model):
        reshard(model)  # a forward without a backward leaves the root gathered
    ddp = model if isinstance(model, DistributedDataParallel) else None
    module: nn.Module = ddp.module if ddp else model
    if ddp is None and any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError(f"there is a DistributedDataParallel inside this {type(model).__name__}; attach that one")
    chosen = read(strategy)  # type: ignore[arg-type]  # it says itself what it wants
    ignored: set[str] = set(ddp.parameters_to_ignore) if ddp else set()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters that are trained; there is nothing to average")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
    sharding = check_sharding(model, mesh, replicate, ranks) if is_sharded(model) else None
    check_route(chosen, Place(ddp, parameters, mesh, sharding), ranks.islands)
    if uneven not in ("error", "stop"):
        raise ValueError(f"uneven must be 'error' or 'stop', got {uneven!r}")
    if not isinstance(check_every, int) or check_every < 0:
        raise ValueError(f"check_every must be a number of syncs, or 0 for never, got {check_every!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    optimizers = [_check_optimizer(unwrapped(one), parameters) for one in given]
    if not optimizers:
        raise ValueError("optimizer is an empty list; the run's clock counts optimizer steps, so it needs one")
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise ValueError("an optimizer is given twice; each of its steps would count as two")
    check_sharded(chosen, optimizers)
    if ddp is not None:
        _check_ddp(ddp, chosen)
    return Arguments(
        module, ddp, parameters, optimizers, scaler, chosen, str(uneven), mesh, check_every, fuses(fused), ranks, sharding
    )


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in a framework's wrapper, where the wrapper has no memory of its own.

    Accelerate's and Lightning's pass the inner optimizer's `state` on as theirs. One with a state of its own, such as a
    Lookahead, is the optimizer to attach.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and getattr(optimizer, "state", None) is inner.state:
        return unwrapped(inner)
    return optimizer


def _check_ddp(ddp: DistributedDataParallel, strategy: Strategy) -> None:
    refusal = Dispatcher.refusal(ddp)
    if refusal:
        raise ValueError(refusal)
    sparse = [name for name, part in ddp.module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse and strategy.route.communicates:
        raise ValueError(f"{', '.join(sparse)} makes sparse gradients, and only dense ones can be averaged; set sparse=False")
    if ddp.static_graph and not has_learnt_graph(ddp) and strategy.route.at(0) is None:
        raise ValueError(
            f"DDP with static_graph=True learns the graph in a first step that communicates, and {strategy} has none; "
            "attach ddp() for a step and swap then, or build the DDP without static_graph"
        )


def _check_optimizer(optimizer: object, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}")
    if optimizer in attached:
        raise ValueError(f"this {type(optimizer).__name__} is attached to a run already; call its detach() first")
    ours = {id(parameter) for parameter in parameters.values()}
    if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(f"this {type(optimizer).__name__} steps none of the model's parameters; is it another model's?")
    return optimizer
