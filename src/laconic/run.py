"""The live object: a strategy at work on a model."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.agreement import agree, pulse
from laconic.averaging import ParameterAverager
from laconic.bucket import local
from laconic.composition import Strategy
from laconic.dispatch import in_buffers
from laconic.engine import Engine, Stop
from laconic.groups import ASIDE, control_device
from laconic.plan import attached, check, check_route, check_sharded, unwrapped
from laconic.probe import Probe
from laconic.spec import saved
from laconic.spec import strategy as read
from laconic.state import checked, tied_to_strategy, without_averaging
from laconic.stats import Counts, Observer, Stats
from laconic.variable import explain_unread
from laconic.wire import CommunicationError, TorchGroup, land


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str,
    *,
    scaler: torch.amp.GradScaler | None = None,
    uneven: Literal["error", "stop"] = "error",
    mesh: DeviceMesh | None = None,
    check_every: int = 0,
) -> "Run":
    """Train `model` by `strategy`, with the loop as it is.

    All ranks call this together; they compare what they were given, and any difference is an error on all of them.
    `model` is a DistributedDataParallel, or any module where the strategy never averages gradients; such a module starts on
    all ranks with the first one's numbers, as a DistributedDataParallel does. With a `scaler`, steps
    that it skips are counted too. `uneven="stop"` lets ranks run out of batches at different steps: all stop together
    then, for the price of a one-byte collective before each exchange; otherwise that is an error that names them. The
    dimensions of a `mesh` can be named as subgroups. With `check_every=K` replicas are compared after every K-th sync, or
    every K-th step where there are none: see `check_replicas`.

    >>> import torch, laconic
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "bf16()") as run:
    ...     for batch in torch.ones(3, 8, 4):
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> run.stats().steps, run.stats().payload_bytes
    (3, 60)
    >>> torch.distributed.destroy_process_group()
    """
    explain_unread()
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; start with torchrun and call torch.distributed.init_process_group() first"
        )
    process_group = dist.distributed_c10d._get_default_group()
    if isinstance(model, DistributedDataParallel):
        process_group = model.process_group
    group, device = TorchGroup(process_group), control_device(process_group)
    try:
        plan = check(model, optimizer, strategy, scaler, uneven, mesh, group.world, check_every)
    except (TypeError, ValueError) as problem:
        agree([], problem, group, device)
        raise
    identity = agree(plan.facts(), None, group, device)
    return Run(Engine(plan, process_group, identity))


class Run:
    """A strategy attached to a model; made by `attach`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live, self._in_consensus = True, False
        self._failure: str | None = None
        self._may_differ = False  # it ends so, and that is the user's wish
        self._last_task: Callable[[bool], object] | None = None

    @property
    def strategy(self) -> Strategy:
        """By which it goes on from here."""
        return self._engine.strategy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not self._live:
            return False
        engine = self._engine
        if error is not None and not isinstance(error, Stop):
            self.fail(error)
            if in_buffers(error):
                phase = "DDP's broadcast of buffers"
                raise CommunicationError(f"{self.strategy}, step {self.step + 1}, {phase}: {error}") from error
            return False
        failed = True
        try:
            stop = engine.uneven == "stop"
            if stop and error is None and (engine.strategy.route.talks or engine.strategy.averaging):
                land(pulse(False, engine.device), engine.group, engine.control)
            if engine.roll.leave(drifted=engine.drifted, may_differ=stop):
                with engine.during("making replicas equal"):
                    restored = engine.roll.restored()
                    if any(restored):
                        engine.local.discard_outstanding()
                    if not any(restored) or all(restored):
                        engine.local.equalise(engine.ledger)
                    else:
                        self._may_differ = True
            self.warn_if_still_warming_up()
            # The store lives in one rank's process: nobody goes before all have read it.
            land(pulse(False, engine.device), engine.group, engine.control)
            failed = False
            return isinstance(error, Stop)
        finally:
            self._end(failed)

    def fail(self, error: BaseException) -> None:
        """An exception ends it: the other ranks are told, and nobody is waited for."""
        if self._live:
            self._failure = f"{type(error).__name__}: {error}"
            self._engine.report_failure(error)
            self._end(failed=True)

    # What a user asks for

    def stats(self) -> Stats:
        """Counts of the whole run, always on: a run that resumes goes on counting where its state was taken."""
        engine, counts = self._engine, self._engine.counts()
        return Stats(
            steps=engine.clock.step,
            rounds=engine.hook.rounds if engine.hook else 0,
            syncs=engine.local.syncs,
            collectives=counts.total.collectives,
            payload_bytes=counts.total.payload_bytes,
            wire_bytes=counts.total.wire_bytes,
            wait_seconds=counts.wait_seconds,
            skipped=engine.local.skipped,
            aside_bytes=counts.aside_bytes,
            work_seconds=counts.work_seconds,
            wire_bytes_by_kind={kind: cost.wire_bytes for kind, cost in counts.kinds.items()},
            collectives_by_kind={kind: cost.collectives for kind, cost in counts.kinds.items()},
            counted_steps=counts.steps,
        )

    def counts_here(self) -> Counts:
        """What it has cost since it was attached, whatever was loaded meanwhile: for differences from step to step."""
        return self._engine.counts_here()

    def layout(self) -> list[list[str]]:
        """DDP's buckets as they are, by parameter name. DDP rebuilds them once, after the first backward."""
        buckets = self._engine.hook.layout() if self._engine.hook else []
        if not buckets:
            raise RuntimeError("no bucket has been seen: run a backward first, or call predict() without buckets")
        return buckets

    def sync(self) -> None:
        """Make every replica equal, if steps were taken apart: the mean of all. All ranks call it together."""
        self.require_live("sync")
        with self._engine.during("making replicas equal"):
            if self._engine.agree_on_drift():
                self._engine.local.equalise(self._engine.ledger)

    @contextmanager
    def consensus(self, of: Literal["mean", "anchor"] = "mean") -> Iterator[None]:
        """Inside, the parameters are the mean of the replicas; after, the local ones again, bit for bit. All ranks together.

        With "anchor" they are the outer optimizer's instead, as of the last sync: no bytes, where a strategy has one.
        """
        self.require_live("consensus")
        anchors = self._engine.local.deltas.anchors if self._engine.local.deltas else None
        if of not in ("mean", "anchor") or (of == "anchor" and anchors is None):
            known = "'mean' or 'anchor'" if anchors else f"'mean': {self.strategy} has no anchor (yet)"
            raise ValueError(f"consensus is of {known}, got {of!r}")
        if of == "mean" and not self._engine.agree_on_drift():
            yield
            return
        tensors = [local(tensor) for tensor in self._engine.averaged().values()]
        kept = [tensor.clone() for tensor in tensors]
        self._in_consensus = True
        try:
            if of == "anchor" and anchors is not None:
                for name, parameter in self._engine.parameters.items():
                    local(parameter).copy_(anchors[name])
            else:
                with self._engine.during("taking the mean of the replicas"):
                    self._engine.local.average_into_place(self._engine.aside, atomic=False)  # what was there is kept
            yield
        finally:
            for tensor, mine in zip(tensors, kept, strict=True):
                tensor.copy_(mine)
            self._in_consensus = False

    def swap(self, strategy: Strategy | str) -> None:
        """Go on by another strategy from the next step; all ranks call it together, between steps."""
        self.require_live("swap")
        engine = self._engine
        engine.meet()
        try:
            chosen = read(strategy)
            check_route(chosen, engine.ddp, engine.parameters, engine.group.world, engine.mesh)
            check_sharded(chosen, engine.optimizers)
        except (TypeError, ValueError) as problem:
            agree([], problem, engine.group, engine.device)
            raise
        agree([f"strategy {chosen}", f"step {engine.clock.step}"], None, engine.group, engine.device)
        with engine.during(f"going over to {chosen}"):
            engine.become(chosen)

    def detach(self) -> None:
        """Take everything off again: a plain DDP, plain optimizers. Asks nobody; calling it twice is harmless."""
        self._end(failed=sys.exc_info()[0] is not None)

    def _end(self, failed: bool) -> None:
        if not self._live:
            return
        self._live = False
        task, self._last_task = self._last_task, None
        try:
            if task is not None:
                task(failed)
        finally:
            for observer in self._engine.observers:
                observer.ended(self._failure)
            drifted = self._engine.drifted
            self._engine.stop()
        if drifted and not failed and not self._may_differ:
            warnings.warn("detached while replicas differ; call sync() first to make them equal", stacklevel=3)

    # What a checkpoint needs

    @property
    def model(self) -> nn.Module:
        """What it is attached to."""
        return self._engine.module if self._engine.ddp is None else self._engine.ddp

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those whose steps it counts."""
        return self._engine.optimizers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The one that it was given."""
        return self._engine.scaler

    @property
    def step(self) -> int:
        """Attempted optimizer steps so far."""
        return self._engine.clock.step

    @property
    def group(self) -> TorchGroup:
        """All its ranks."""
        return self._engine.group

    @property
    def device(self) -> torch.device:
        """Where its group's small messages live."""
        return self._engine.device

    @property
    def lockstep(self) -> bool:
        """Whether every rank has the same parameters and optimizer state after every step."""
        return self.strategy.averaging is None and self.strategy.route.scopes == {"world"} and not self._engine.drifted

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Count the steps of another one over the same model; all ranks alike. If it shares parameters, it replaces."""
        self.require_live("add_optimizer")
        optimizer = unwrapped(optimizer)
        if any(optimizer is known for known in self._engine.optimizers):
            raise ValueError(f"the run counts the steps of this {type(optimizer).__name__} already; each would count as two")
        self._engine.optimizers.append(optimizer)
        self._engine.clock.add(optimizer)
        attached.add(optimizer)

    def warn_if_still_warming_up(self) -> None:
        """At the end: the strategy that was asked for has done nothing."""
        if 0 < self.step <= self.strategy.warmup:
            warnings.warn(
                f"{self.strategy} never began: its warm-up of {self.strategy.warmup} steps lasted for all {self.step}",
                stacklevel=3,
            )

    def before_detach(self, task: Callable[[bool], object]) -> None:
        """Have this done last, while its process groups are still there, instead of what was to be done before.

        It is told whether an exception ends the run.
        """
        self._last_task = task

    def during(self, phase: str) -> AbstractContextManager[None]:
        """A collective that fails in here is said to have failed in this phase, and the other ranks are told."""
        return self._engine.during(phase)

    def observe(self, observer: Observer) -> Probe:
        """Have it told of every step and of the end; the probe is what it can look through."""
        self.require_live("observe")
        self._engine.observers.append(observer)
        return self._engine.probe

    def aside(self) -> TorchGroup:
        """All its ranks on a gloo group that nobody else uses; all ranks ask for it together."""
        self._engine.groups.add([ASIDE])
        return self._engine.groups[ASIDE]

    def state_dict(self) -> dict[str, Any]:
        """This rank's communication state, as plain data that `torch.load` takes by default."""
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` was taken; all ranks together. Nothing is changed if it doesn't fit.

        The state of another strategy is refused, or, with `strict=False`, loaded as if the run had been by that strategy
        until now and is swapped here.
        """
        self.check_state(state, strict=strict)
        state = self.respelt(state)
        former, chosen = str(state["strategy"]), str(self.strategy)
        if former == chosen:
            self._engine.load(state)
            return
        unused = tied_to_strategy(state)
        if self._fits(former):
            self._engine.become(saved(former), equal=True)  # as good as: what differs is about to be overwritten
            self._engine.load(state)
            self.swap(chosen)
        else:
            self._engine.load(without_averaging(state, chosen))
            self._engine.local.drift()
            self.sync()
            unused += ["residuals of deltas"] if state["local"]["deltas"] is not None else []
        warnings.warn(
            f"the state is of {former}, and the run goes on by {chosen}: clock and residuals are taken over"
            + (f"; not used: {', '.join(unused)}" if unused else ""),
            stacklevel=2,
        )

    def check_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Raise if `load_state_dict` would; nothing is changed."""
        self.require_live("load_state_dict")
        engine, chosen, state = self._engine, str(self.strategy), self.respelt(state)
        former = chosen if strict else str(state.get("strategy"))
        checked(state, former, engine.group.rank, engine.parameters, engine.memory)
        if former != chosen:
            saved(former)  # says what is wrong with it

    def respelt(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state with the text that its strategy has today.

        Texts of the same strategy may differ: a class of the user's own was written `Name(...)` before it had a place.
        """
        try:
            former = saved(str(state.get("strategy")))
        except ValueError:
            return state  # to be refused, unless it is the text of what is attached
        return {**state, "strategy": str(self.strategy if former == self.strategy else former)}

    def _fits(self, former: str) -> bool:
        """Whether this world can go by it."""
        try:
            engine, strategy = self._engine, saved(former)
            check_route(strategy, engine.ddp, engine.parameters, engine.group.world, engine.mesh)
            check_sharded(strategy, engine.optimizers)
        except ValueError:
            return False
        return True

    @property
    def unequal(self) -> bool:
        """Whether it has ended with replicas that differ, because only some ranks had loaded parameters since the last step."""
        return self._may_differ

    def keep_restored(self) -> None:
        """Say before `__exit__` that this rank's parameters were loaded by the user since the last step.

        Nothing of the steps before goes into them any more. If all ranks say so, replicas become their mean; if only some do,
        each keeps its own: the user has yet to send them to the others.
        """
        self._engine.roll.mark_restored()

    def await_loads(self) -> None:
        """Before a `load_state_dict` in mid-run that other ranks may not know of: an error on all where some don't."""
        self.require_live("load_state_dict")
        self._engine.roll.await_loads()

    def adopt_first(self) -> None:
        """Every replica becomes the first rank's; all ranks together."""
        self.require_live("adopt_first")
        ParameterAverager(self._engine.averaged(), self._engine.control).adopt_first(self._engine.group)

    def require_live(self, what: str) -> None:
        """Refuse what needs a run at work."""
        if not self._live:
            raise RuntimeError(f"{what}() needs a run that is attached; this one has been detached")
        if self._in_consensus:
            raise RuntimeError(f"{what}() can't be called inside consensus(): the parameters there are on loan")


def check_replicas(run: Run) -> None:
    """Raise `ReplicaError` where what must be the same on all ranks is not; all ranks together.

    That is the parameters, unless steps have been taken apart, and the anchors with the outer optimizer's memory of them.
    Bytes: (N-1) * 16 a tensor.
    """
    run.require_live("check_replicas")
    run._engine.compare_replicas()
