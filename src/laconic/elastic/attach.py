"""Attaching a strategy to a model that trains among workers which may change."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic._torch.process_groups import default_group
from laconic.comm.flat_tensors import local, stored
from laconic.elastic.healing import DTYPES
from laconic.elastic.island import Island
from laconic.elastic.membership import Membership
from laconic.elastic.parts import Parts
from laconic.elastic.run import ElasticRun
from laconic.elastic.sync import JoinerMoments, Late, Options, Weights
from laconic.kernels.compiling import CompilerError, prepare
from laconic.ranks.agreement import agree
from laconic.run.arguments import Place, attached, check_route, unwrapped
from laconic.run.sharding import Sharding, check_kinds, is_sharded, refuse_fsdp1
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
    moments: JoinerMoments = "peer",
    leave_seconds: float = 30.0,
    start_with: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    fused: bool | Literal["auto"] = "auto",
) -> ElasticRun:
    """Train this model together with the workers that are there; they may change between two syncs.

    A worker is one process with a whole model, which needs no process group of its own; or an island of several ranks, with a
    DistributedDataParallel over them, or a model that `fully_shard` has sharded over all of them: then every rank calls this.
    It returns when this worker has a state to start from: the first worker's at the start of a run, and that of a peer, at
    their next sync, where a run is under way. So loop until `run.step` is reached, which counts the steps of the run.

    A sync that any worker can't complete is dropped by all, and training goes on; what it would have sent leaves with the next
    one. After a sync, all who took part have the same bits.

    Bytes: those of the strategy, and 200 or so a worker and sync; in an island, divided by its ranks. A worker that joins is
    sent its state once: parameters, or anchors with the outer optimizer's memory, and a peer's moments.

    Memory: that of the strategy; in an island, a rank keeps its share of the anchors.

    Not: strategies that average gradients, have a warm-up or subgroups, or average the optimizer's moments, are refused.
    `laconic.checkpoint` doesn't save elastic runs. Batches are yours to deal. Nothing is encrypted. It has not run on a GPU.

    Arguments:
      `model`: a module; a DistributedDataParallel over the ranks of this worker; or a model that is sharded over them.
      `optimizer`: the optimizer over its parameters, or a list of several. A step is complete when each has made one.
      `strategy`: one of local updates, such as `laconic.diloco(16)`, `local_sgd`, `streaming_diloco`, `sparseloco`; or its
        text.
      `manager`: this worker's place among the others. Default None: `Membership()`, which finds $TORCHFT_LIGHTHOUSE.
      `min_replicas`: with fewer workers, a sync is dropped. Default 1.
      `weights`: in the mean, a worker counts by the "steps" that it brings along, or all count "equal" that bring any.
        Default "steps".
      `late`: a worker that missed a sync takes its peers' state. "carry": what it has learnt meanwhile is added to it and goes
        out with the next deltas. "drop": it is lost. (Where parameters are averaged, there is no delta to carry.)
        Default "carry".
      `moments`: what the optimizer of a worker that joins remembers. "peer": what a peer's does, such as Adam's moments, so
        that the first steps are not those of a new optimizer at a high learning rate. "own": what it has itself; nothing, if
        it has just been built. Default "peer".
      `leave_seconds`: how long a worker that was sent SIGTERM waits for the sync in which it hands over what it holds.
        Default 30.0.
      `start_with`: at the very start of a run, it waits up to a minute for so many workers. Default 1.
      `scaler`: the GradScaler, if the loop has one: steps that it skips are counted, too. Default None.
      `fused`: whether encoding and decoding run compiled, as in `laconic.attach`. Default "auto".

    It raises a TypeError or ValueError for what can't be used, on all ranks of the worker; an ImportError without torchft; a
    ConnectionError where no lighthouse answers; a MembershipError where the others train something else; and a
    CommunicationError where it could not join for `quorum_seconds` of the Membership.

    >>> import torch, laconic.elastic
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.elastic.lighthouse() as address:  # as a rule, in a process of its own
    ...     manager = laconic.elastic.Membership(lighthouse=address, name="first")
    ...     with laconic.elastic.attach(model, optimizer, "diloco(2)", manager) as run:
    ...         while run.step < 4:
    ...             model(torch.ones(8, 4)).sum().backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    >>> run.step, run.stats().syncs, run.stats().workers
    (4, 3, ('first',))
    """
    island = Island(_island_of(model))
    problem: Exception | None = None
    facts: list[str] = []
    try:
        given = _checked(model, optimizer, strategy, island, manager)
        options = Options(min_replicas, weights, late, moments, leave_seconds, start_with)
        _check_options(options)
        facts = [f"strategy {given.strategy.compared}", *(f"{name} {value}" for name, value in options._asdict().items())]
        compiled = prepare(kernels_of(given.strategy), fused, given.device)
    except (TypeError, ValueError, CompilerError) as error:
        problem = error
    if island.group is not None:
        agree(facts, problem, island.group, island.device)
    if problem is not None:
        raise problem
    membership = manager or Membership()
    parts = Parts(
        given.strategy,
        given.module,
        given.optimizers,
        scaler,
        membership.group,
        island,
        sharded=given.sharded,
        hand_over=moments == "peer",
        fused=compiled,
    )
    attached.update(given.optimizers)
    try:
        membership.open(island, given.device)
        return ElasticRun(parts, membership, island, options)
    except BaseException:
        membership.leave()
        attached.difference_update(given.optimizers)
        raise


class _Given(NamedTuple):
    """What the user gave, checked."""

    strategy: Strategy
    module: nn.Module
    optimizers: list[Optimizer]
    device: torch.device
    sharded: bool


def _island_of(model: object) -> dist.ProcessGroup | None:
    """The ranks that train one replica together; None: this one alone."""
    if isinstance(model, DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group
    if not isinstance(model, nn.Module) or not is_sharded(model):
        return None
    meshes = [mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None]
    return meshes[0].get_group() if meshes and meshes[0].ndim == 1 else default_group()


def _checked(model: object, optimizer: object, strategy: Strategy | str, island: Island, manager: Membership | None) -> _Given:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if manager is not None and not isinstance(manager, Membership):
        raise TypeError(
            f"manager must be a laconic.elastic.Membership, got {type(manager).__name__}; it has torchft's manager server in it"
        )
    refuse_fsdp1(model)
    module, sharded = model.module if isinstance(model, DistributedDataParallel) else model, is_sharded(model)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters that are trained; there is nothing to average")
    chosen = _checked_strategy(strategy)
    check_route(chosen, Place(None, parameters, None, None), 1)
    if sharded:
        check_kinds(module)
        Sharding(native=False, refusal=None).check(chosen)
    elif len(parameters) < island.size:
        raise ValueError(
            f"{type(module).__name__} has {len(parameters)} parameters, and each of this island's {island.size} ranks averages "
            "one at least; use fewer ranks, or fully_shard"
        )
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        if tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{name} is of {tensor.dtype}, which a worker that joins can't be sent; known are {', '.join(DTYPES)}"
            )
    gaps = [name for name, p in {**parameters, **dict(module.named_buffers())}.items() if stored(local(p)) is None]
    if gaps and island.size > 1:
        raise ValueError(f"{gaps[0]} has gaps in memory; make it contiguous before you attach")
    return _Given(
        chosen, module, _checked_optimizers(optimizer, parameters.values()), next(iter(parameters.values())).device, sharded
    )


def _checked_optimizers(optimizer: object, parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    optimizers = [unwrapped(one) for one in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(one).__name__}")
        if one in attached:
            raise ValueError(f"this {type(one).__name__} is attached to a run already; call its detach() first")
    mine = set(map(id, parameters))
    for number, one in enumerate(optimizers):
        if one in optimizers[:number]:
            raise ValueError(f"this {type(one).__name__} is given twice; name each optimizer once")
        if not any(id(p) in mine for group in one.param_groups for p in group["params"]):
            raise ValueError(f"this {type(one).__name__} has no parameter of the model; give the optimizer that trains it")
    if not optimizers:
        raise ValueError("optimizer is an empty list; the run's clock counts optimizer steps, so it needs one")
    return optimizers


def _check_options(given: Options) -> None:
    for name, count in (("min_replicas", given.min_replicas), ("start_with", given.start_with)):
        value: object = count
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a number of workers, at least 1, got {count!r}")
    seconds: object = given.leave_seconds
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"leave_seconds must be a number of seconds above 0, got {seconds!r}")
    for name, word, known in (
        ("weights", given.weights, get_args(Weights)),
        ("late", given.late, get_args(Late)),
        ("moments", given.moments, get_args(JoinerMoments)),
    ):
        if word not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {word!r}")


def _checked_strategy(strategy: Strategy | str) -> Strategy:
    chosen = read(strategy)
    averaging = chosen.averaging
    if averaging is None and not chosen.route.communicates:
        raise ValueError(f"{chosen} never averages while it trains; choose one that does, such as diloco(period=16)")
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
