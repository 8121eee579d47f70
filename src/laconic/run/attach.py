"""Attaching a strategy to a model and its optimizers."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic._torch.process_groups import backend_name, control_device
from laconic.comm.group import TorchGroup
from laconic.kernels.compiling import CompilerError, prepare
from laconic.ranks.agreement import agree, agree_apart
from laconic.ranks.islands import whole
from laconic.run.arguments import check
from laconic.run.engine import Engine
from laconic.run.environment import explain_unread, warn_of_restarts
from laconic.run.run import Run, engine_of
from laconic.run.sharding import ranks_of
from laconic.run.state import kernels_of
from laconic.run.stats import Observer
from laconic.strategies.naming import own
from laconic.strategies.strategy import Advised, Strategy

own()  # imports every reducer and recipe: here, with all other imports, and not in the first step of a training


class Pilot(Observer, Protocol):
    """Who chooses the strategy of a run while it is trained; one on each rank."""

    def begin(self, run: Run) -> None:
        """The run is attached, and its first step is to come."""
        ...


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str,
    *,
    scaler: torch.amp.GradScaler | None = None,
    uneven: Literal["error", "stop"] = "error",
    mesh: DeviceMesh | None = None,
    replicate: str = "replicate",
    check_every: int = 0,
    fused: bool | Literal["auto"] = "auto",
    advisor: Callable[[Advised], Pilot] | None = None,
) -> Run:
    """As `laconic.attach`, which knows an advisor.

    Arguments:
      `advisor`: who makes a pilot for a strategy that leaves the choice to it, such as `auto()`. Default None: that is refused.

    All other arguments are those of `laconic.attach`.
    """
    explain_unread()
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; start with torchrun and call torch.distributed.init_process_group() first"
        )
    ddp = model if isinstance(model, DistributedDataParallel) else None
    ranks = whole(ddp.process_group) if ddp else ranks_of(model, mesh, replicate)
    everyone, device = TorchGroup(ranks.everyone, places=ranks.places), control_device(ranks.everyone)
    try:
        given = check(model, optimizer, strategy, scaler, uneven, mesh, replicate, ranks, check_every, fused)
        pilot = _pilot(given.strategy, advisor)
        if given.fused is True:
            prepare(kernels_of(given.strategy), given.fused, next(iter(given.parameters.values())).device)
    except (TypeError, ValueError, CompilerError) as problem:
        agree([], problem, everyone, device)
        raise
    identity = agree(given.facts(), None, everyone, device)
    warn_of_restarts(backend_name(ranks.everyone, device))
    if ranks.sharded:
        agree_apart(given.own_facts(), TorchGroup(ranks.replicas, places=ranks.places), everyone, device)
    run = Run(Engine(given, identity))
    if pilot is not None:
        engine_of(run).pilot = pilot
        pilot.begin(run)
    return run


def _pilot(strategy: Strategy, advisor: Callable[[Advised], Pilot] | None) -> Pilot | None:
    if strategy.advised is None:
        return None
    if advisor is None:
        raise ValueError(f"{strategy} leaves the choice to the advisor, and laconic.run knows none; call laconic.attach")
    return advisor(strategy.advised)


def check_replicas(run: Run) -> None:
    """Compare what must be the same on all ranks; all ranks call it together.

    That is the parameters, unless steps have been taken apart, and the anchors with the outer optimizer's memory of them.
    `attach(..., check_every=10)` calls it after every tenth sync.

    Maths: for each tensor two sums of its 32-bit words, one plain, one weighted by position, modulo 2^64.

    Bytes: (N-1) * 16 a tensor, which `run.stats()` doesn't count.

    Not: buffers, the optimizers' state and residuals, which may differ.

    Arguments:
      `run`: what `laconic.attach` returned, still attached.

    Every rank raises a ReplicaError that names the first tensor that differs and the ranks in the minority.

    >>> import torch, laconic
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "diloco(2)") as run:
    ...     laconic.check_replicas(run)
    >>> torch.distributed.destroy_process_group()
    """
    engine = engine_of(run)
    engine.require_live("check_replicas")
    engine.compare_replicas()
