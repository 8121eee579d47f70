"""Attaching a strategy to a model that trains among workers which may change."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.elastic.membership import Membership
from laconic.elastic.run import ElasticRun, Late, Weights
from laconic.elastic.state import Elastic
from laconic.kernels.compiling import prepare
from laconic.run.arguments import Place, attached, check_route, unwrapped
from laconic.run.sharding import is_sharded
from laconic.run.state import kernels_of
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Strategy


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str,
    manager: Membership | None = None,
    *,
    min_replicas: int = 1,
    weights: Weights = "steps",
    late: Late = "carry",
    leave_seconds: float = 30.0,
    scaler: torch.amp.GradScaler | None = None,
    fused: bool | Literal["auto"] = "auto",
) -> ElasticRun:
    """Train this model together with the workers that are there; they may change between two syncs.

    Each worker is one process with a whole model, and needs no process group of its own. The strategy is one of local updates:
    `local_sgd`, `diloco`, `streaming_diloco`, `sparseloco`, ... Returns when this worker has a state to start from: the first
    worker's at the start of a run, and that of a peer, at their next sync, where a run is under way.

    `manager`: this worker's place among the others; without one, `Membership()`, which finds $TORCHFT_LIGHTHOUSE.
    `min_replicas`: with fewer, a sync is dropped; training goes on.
    `weights`: in the mean, a worker counts by the "steps" that it brings along, or all count "equal" that bring any.
    `late`: a worker that missed a sync takes its peers' state; with "carry", what it has learnt meanwhile is added to it and
    goes out with the next deltas, with "drop", it is lost. (A strategy that averages parameters has no delta to carry.)
    `leave_seconds`: how long a worker that was sent SIGTERM waits for the sync in which it hands over what it holds.

    Bytes: those of the strategy, and 200 or so a worker and sync. A worker that joins is sent the model once or twice more:
    parameters, and anchors with the outer optimizer's memory.

    >>> import laconic.elastic
    >>> with laconic.elastic.attach(model, optimizer, "diloco(period=16)") as run:  # doctest: +SKIP
    ...     for batch in loader:
    ...         loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    """
    chosen = _checked(model, strategy)
    if min_replicas < 1:
        raise ValueError(f"min_replicas must be a number of workers, at least 1, got {min_replicas!r}")
    for name, value, known in (("weights", weights, get_args(Weights)), ("late", late, get_args(Late))):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if manager is not None and not isinstance(manager, Membership):
        raise TypeError(
            f"manager must be a laconic.elastic.Membership, got {type(manager).__name__}; it has torchft's manager server in it"
        )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters that are trained; there is nothing to average")
    check_route(chosen, Place(None, parameters, None, None), 1)
    optimizers = [unwrapped(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(one).__name__}")
        if one in attached:
            raise ValueError(f"this {type(one).__name__} is attached to a run already; call its detach() first")
    if not optimizers:
        raise ValueError("optimizer is an empty list; the run's clock counts optimizer steps, so it needs one")
    compiled = prepare(kernels_of(chosen), fused, next(iter(parameters.values())).device)
    membership = manager or Membership()
    parts = Elastic(chosen, model, parameters, optimizers, scaler, membership.group, fused=compiled)
    attached.update(optimizers)
    try:
        return ElasticRun(parts, membership, min_replicas=min_replicas, weights=weights, late=late, leave_seconds=leave_seconds)
    except BaseException:
        attached.difference_update(optimizers)
        raise


def _checked(model: object, strategy: Strategy | str) -> Strategy:
    if isinstance(model, DistributedDataParallel) and dist.get_world_size(model.process_group) > 1:
        raise ValueError(
            "model is a DistributedDataParallel over several ranks, and a worker of laconic.elastic is one process with a "
            "whole model; attach the module inside of it, in one process a worker"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if is_sharded(model):
        raise ValueError("a sharded model can't be trained by laconic.elastic yet; a worker is one process with a whole model")
    chosen = read(strategy)
    averaging = chosen.averaging
    if averaging is None or chosen.route.communicates or averaging.start > 0:
        raise ValueError(
            f"{chosen} averages gradients in some steps, for which all workers must be there; choose a strategy of local "
            "updates without a warm-up, such as diloco(period=16), sparseloco(period=16) or local_sgd(period=16)"
        )
    if averaging.route.scopes != {"world"}:
        raise ValueError(
            f"{chosen} averages within subgroups, and workers that come and go are in one group; use 'world' alone"
        )
    if not isinstance(averaging.moments, str) or averaging.moments == "average":
        raise ValueError(
            f"{chosen} averages the optimizers' moments, which a worker that joins has none of; use moments='keep'"
        )
    if chosen.second_moment != "local":
        raise ValueError(f"{chosen} keeps Adam's second moment alike on all workers; use one whose second_moment is 'local'")
    return chosen
