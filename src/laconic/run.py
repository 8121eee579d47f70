"""The live object: a strategy at work on a model."""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.agreement import RollCall, UnevenError, agree, gather_texts, pulse
from laconic.averaging import ParameterAverager
from laconic.bucket import Slot, local
from laconic.clock import Clock
from laconic.composition import Averaging, Strategy, render
from laconic.dispatch import Dispatcher
from laconic.groups import ASIDE, Groups, control_device
from laconic.hook import GradientHook
from laconic.local import LocalUpdates
from laconic.plan import Plan, attached, check, check_route, check_sharded, scopes
from laconic.probe import Probe
from laconic.reducers.base import Reducer
from laconic.reducers.error_feedback import Release
from laconic.replay import Readiness, replay
from laconic.replicas import compare
from laconic.routes import silent
from laconic.spec import strategy as read
from laconic.state import VERSION, checked
from laconic.stats import Observer, Stats
from laconic.wire import CommunicationError, Ledger, TorchGroup, land


class _Stop(BaseException):
    """Another rank has run out of batches: leave the block, quietly. Not an Exception, so that no user's handler keeps it."""


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
    return Run(plan, process_group, identity)


class Run:
    """A strategy attached to a model; made by `attach`."""

    def __init__(self, plan: Plan, process_group: dist.ProcessGroup, identity: str) -> None:
        self.strategy = plan.strategy
        self._module, self._parameters, self._optimizers = plan.module, plan.parameters, plan.optimizers
        self._uneven, self._scaler, self._check_every = plan.uneven, plan.scaler, plan.check_every
        self._ddp = plan.ddp  # let go of by `detach`: a dead DDP must not linger beside a new one over the same module
        self._device = control_device(process_group)
        names = {id(parameter): name for name, parameter in plan.module.named_parameters()}
        self._memory: dict[str, Slot] = {name: {} for name in names.values()}
        self._ledger, self._aside, self._control = Ledger(), Ledger(), Ledger()
        members = dist.get_process_group_ranks(process_group)
        self._roll = RollCall(process_group.get_group_store(), identity, process_group.rank(), members)
        self._mesh = plan.mesh
        self._groups = Groups(process_group, identity, scopes(plan.strategy), plan.mesh, self._device, self._roll.worry)
        self._group = self._groups.world
        self._in_consensus = False
        self._last_tasks: list[Callable[[], object]] = []
        self._live = True
        self._failure: str | None = None
        self._probe, self._observers = Probe(), []  # type: Probe, list[Observer]
        self._hook: GradientHook | None = None
        if plan.ddp is not None:
            self._hook = GradientHook(plan.strategy.reducer, self._group, names, self._memory, self._ledger)
            if plan.scaler is not None and plan.scaler.is_enabled():
                self._hook.scale = plan.scaler._get_scale_async  # type: ignore[assignment]  # set before any backward
            self._hook.strategy, self._hook.probe = str(plan.strategy), self._probe
            self._dispatcher = Dispatcher.of(plan.ddp)
            self._dispatcher.target = self._hook
            self._dispatcher.on_forward = weakref.WeakMethod(self._before_forward)
        self._order: list[str] | None = None  # in which DDP's first backward made gradients ready, once that is known
        self._readiness: Readiness | None = None
        if plan.ddp is not None and plan.strategy.route.talks and not plan.ddp._has_rebuilt_buckets:
            self._readiness = Readiness(plan.ddp)
        # From here on the optimizers keep the run alive, also where the caller drops it.
        self._clock = Clock(plan.optimizers, plan.scaler, self._after_step)
        attached.update(plan.optimizers)
        if plan.ddp is None:
            # A DDP starts with the first rank's parameters on all; a bare module may have been built anyhow.
            everything = {**dict(plan.module.named_parameters()), **self._buffers()}
            ParameterAverager(everything, self._control).adopt_first(self._group)
        self._local = self._local_updates()
        self._set_up_step()

    # The loop

    def _set_up_step(self) -> None:
        step = self._roll.step = self._clock.step
        if self._hook is not None:
            group = self._partners(step)
            self._hook.step = step
            self._hook.use(self._hook.reducer, group or self._group)
            self._dispatcher.muted, self._dispatcher.apart = group is None, group is not self._group

    def _partners(self, step: int) -> TorchGroup | None:
        """Who averages gradients with this rank in the step after `step` completed ones."""
        return self._groups.at(self.strategy.route.at(step))

    def _after_step(self) -> None:
        step = self._roll.step = self._clock.step
        if self._readiness is not None and self._hook is not None and self._hook.rounds:
            self._order, self._readiness = self._readiness.stop(), None
        partners = self._partners(step - 1)
        if (partners.world if partners else 1) < self._group.world:
            self._local.drift()
        before = self._local.syncs
        with self._during("averaging after the step"):
            self._local.after_step(step, self._meet)
        self._set_up_step()
        syncs = self._local.syncs if self.strategy.averaging else step
        if self._check_every and syncs > (before if self.strategy.averaging else step - 1) and syncs % self._check_every == 0:
            check_replicas(self)
        for observer in self._observers:
            observer.stepped()

    def _before_forward(self) -> None:
        syncs = torch.is_grad_enabled() and self._ddp is not None and self._ddp.require_backward_grad_sync
        if syncs and self._partners(self._clock.step) is not None:
            self._meet()

    @property
    def _drifted(self) -> bool:
        """Whether this replica may differ from the others."""
        partners = self._partners(self._clock.step)
        alone = (partners.world if partners else 1) < self._group.world
        return self._local.drifted or (self._clock.between and alone)

    def _meet(self) -> None:
        """Where ranks may stop at different steps: make sure that all are here, or stop."""
        if self._uneven == "stop" and not all(land(pulse(True, self._device), self._group, self._control)):
            raise _Stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not self._live:
            return False
        try:
            if error is not None and not isinstance(error, _Stop):
                self._failure = f"{type(error).__name__}: {error}"
                self._report_failure(error)
                return False
            stop = self._uneven == "stop"
            if stop and error is None and (self.strategy.route.talks or self.strategy.averaging):
                land(pulse(False, self._device), self._group, self._control)
            if self._roll.leave(drifted=self._drifted, may_differ=stop):
                self._local.equalise(self._ledger)
            self.warn_if_still_warming_up()
            # The store lives in one rank's process: nobody goes before all have read it.
            land(pulse(False, self._device), self._group, self._control)
            return isinstance(error, _Stop)
        finally:
            self.detach()

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        """What fails in here is said to have failed in this phase, and the other ranks are told."""
        try:
            yield
        except CommunicationError as error:
            self._report_failure(error)
            raise CommunicationError(f"{self.strategy}, step {self._clock.step}, {phase}: {error}") from error

    def _report_failure(self, error: BaseException) -> None:
        if isinstance(error, UnevenError):
            return  # `worry` has reported already
        try:
            self._roll.report(f"failed in step {self._clock.step + 1} with {type(error).__name__}: {error}")
        except RuntimeError as lost:
            error.add_note(f"laconic: the other ranks could not be told: {lost}")

    # What a user asks for

    def stats(self) -> Stats:
        """Counts since the run was attached; always on."""
        total = self._ledger.total
        return Stats(
            steps=self._clock.step,
            rounds=self._hook.rounds if self._hook else 0,
            syncs=self._local.syncs,
            collectives=total.collectives,
            payload_bytes=total.payload_bytes,
            wire_bytes=total.wire_bytes,
            wait_seconds=self._ledger.wait_seconds,
            skipped=self._local.skipped,
            aside_bytes=self._aside.total.wire_bytes,
            work_seconds=self._ledger.work_seconds,
            wire_bytes_by_kind={kind: cost.wire_bytes for kind, cost in self._ledger.kinds.items()},
        )

    def layout(self) -> list[list[str]]:
        """DDP's buckets as they are, by parameter name. DDP rebuilds them once, after the first backward."""
        buckets = self._hook.layout() if self._hook else []
        if not buckets:
            raise RuntimeError("no bucket has been seen: run a backward first, or call predict() without buckets")
        return buckets

    def sync(self) -> None:
        """Make every replica equal, if steps were taken apart: the mean of all. All ranks call it together."""
        self._require_live("sync")
        with self._during("making replicas equal"):
            if self._agree_on_drift():
                self._local.equalise(self._ledger)

    @contextmanager
    def consensus(self, of: Literal["mean", "anchor"] = "mean") -> Iterator[None]:
        """Inside, the parameters are the mean of the replicas; after, the local ones again, bit for bit. All ranks together.

        With "anchor" they are the outer optimizer's instead, as of the last sync: no bytes, where a strategy has one.
        """
        self._require_live("consensus")
        anchors = self._local.deltas.anchors if self._local.deltas else None
        if of not in ("mean", "anchor") or (of == "anchor" and anchors is None):
            known = "'mean' or 'anchor'" if anchors else f"'mean': {self.strategy} has no anchor (yet)"
            raise ValueError(f"consensus is of {known}, got {of!r}")
        if of == "mean" and not self._agree_on_drift():
            yield
            return
        tensors = [local(tensor) for tensor in self._averaged().values()]
        kept = [tensor.clone() for tensor in tensors]
        self._in_consensus = True
        try:
            if of == "anchor" and anchors is not None:
                for name, parameter in self._parameters.items():
                    local(parameter).copy_(anchors[name])
            else:
                self._local.average_into_place(self._aside, atomic=False)  # what was there is kept
            yield
        finally:
            for tensor, mine in zip(tensors, kept, strict=True):
                tensor.copy_(mine)
            self._in_consensus = False

    def swap(self, strategy: Strategy | str) -> None:
        """Go on by another strategy from the next step; all ranks call it together, between steps."""
        self._require_live("swap")
        self._meet()
        try:
            chosen = read(strategy)
            check_route(chosen, self._ddp, self._parameters, self._group.world, self._mesh)
            check_sharded(chosen, self._optimizers)
        except (TypeError, ValueError) as problem:
            agree([], problem, self._group, self._device)
            raise
        agree([f"strategy {chosen}", f"step {self._clock.step}"], None, self._group, self._device)
        drifted = self._agree_on_drift() or self._local.deltas is not None
        if drifted and (chosen.route.talks or chosen.averaging or self._local.deltas):
            self._local.equalise(self._ledger, release=True)
            if chosen.route.talks:  # equal gradients keep replicas equal only if the optimizers' memory is equal as well
                self._local.moments.equalise(self._group)
                self._equalise_scaler()
        drifted, syncs = self._drifted, self._local.syncs
        self.strategy = chosen
        self._groups.add(scopes(chosen))
        self._local = self._local_updates()
        self._local.syncs = syncs
        if drifted:
            self._local.drift()
        if self._hook is not None:
            self._hook.use(self._releasing(chosen.reducer), self._group)
            self._hook.strategy = str(chosen)
        self._set_up_step()

    def detach(self) -> None:
        """Take everything off again: a plain DDP, plain optimizers. Asks nobody; calling it twice is harmless."""
        if not self._live:
            return
        if sys.exc_info()[0] is None:
            for task in self._last_tasks:
                task()
        self._live = False
        for observer in self._observers:
            observer.ended(self._failure)
        drifted = self._drifted
        self._clock.stop()
        if self._readiness is not None:
            self._readiness.stop()
        attached.difference_update(self._optimizers)
        if self._ddp is not None:
            self._dispatcher.release()
            self._ddp = None
        if self._local.deltas is not None:
            self._local.deltas.abandon()
        self._groups.close()
        if drifted and sys.exc_info()[0] is None:
            warnings.warn("detached while replicas differ; call sync() first to make them equal", stacklevel=2)

    # What a checkpoint needs

    @property
    def model(self) -> nn.Module:
        """What it is attached to."""
        return self._module if self._ddp is None else self._ddp

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those whose steps it counts."""
        return self._optimizers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The one that it was given."""
        return self._scaler

    @property
    def step(self) -> int:
        """Attempted optimizer steps so far."""
        return self._clock.step

    @property
    def group(self) -> TorchGroup:
        """All its ranks."""
        return self._group

    @property
    def device(self) -> torch.device:
        """Where its group's small messages live."""
        return self._device

    @property
    def lockstep(self) -> bool:
        """Whether every rank has the same parameters and optimizer state after every step."""
        return self.strategy.averaging is None and self.strategy.route.scopes == {"world"} and not self._drifted

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Count the steps of another one over the same model; all ranks alike. If it shares parameters, it replaces."""
        self._require_live("add_optimizer")
        self._optimizers.append(optimizer)
        self._clock.add(optimizer)
        attached.add(optimizer)

    def warn_if_still_warming_up(self) -> None:
        """At the end: the strategy that was asked for has done nothing."""
        if 0 < self._clock.step <= self.strategy.warmup:
            warnings.warn(
                f"{self.strategy} never began: its warm-up of {self.strategy.warmup} steps lasted for all {self._clock.step}",
                stacklevel=3,
            )

    def before_detach(self, task: Callable[[], object]) -> None:
        """Have this done, unless an exception ends the run, while its process groups are still there."""
        self._last_tasks = [task]

    def observe(self, observer: Observer) -> Probe:
        """Have it told of every step and of the end; the probe is what it can look through."""
        self._require_live("observe")
        self._observers.append(observer)
        return self._probe

    def aside(self) -> TorchGroup:
        """All its ranks on a gloo group that nobody else uses; all ranks ask for it together."""
        self._groups.add([ASIDE])
        return self._groups[ASIDE]

    def state_dict(self) -> dict[str, Any]:
        """This rank's communication state, as plain data that `torch.load` takes by default."""
        if self._hook is not None:
            self._hook.settle()
        return {
            "version": VERSION,
            "rank": self._group.rank,
            "world": self._group.world,
            "kept": [f"{name}: {key}" for name, slot in self._memory.items() for key in slot],
            "strategy": str(self.strategy),
            "step": self._clock.step,
            "rounds": self._hook.rounds if self._hook else 0,
            "order": self._ready_order(),
            "local": self._local.state(),
            "memory": {name: dict(slot) for name, slot in self._memory.items() if slot},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` was taken; all ranks together. Nothing is changed if it doesn't fit.

        The state of another strategy is refused, or, with `strict=False`, loaded as if the run had been by that strategy
        until now and is swapped here.
        """
        self._require_live("load_state_dict")
        former, chosen = state.get("strategy"), str(self.strategy)
        if not strict and former is not None and former != chosen:
            self.swap(str(former))
            self.load_state_dict(state)
            self.swap(chosen)
            return
        saved = checked(state, str(self.strategy), self._group.rank, self._parameters, self._memory)
        devices = {name: parameter.device for name, parameter in self._module.named_parameters()}
        for name, slot in self._memory.items():
            slot.clear()
            slot.update({key: value.detach().to(devices[name], copy=True) for key, value in saved.memory.get(name, {}).items()})
        self._clock.step = saved.step
        self._local.load(saved.local, saved.step)
        if self._hook is not None:
            self._hook.rounds = saved.rounds
        self._order = saved.order
        if self._ddp is not None and saved.order:
            replay(self._ddp, saved.order)
        self._set_up_step()

    def adopt_first(self) -> None:
        """Every replica becomes the first rank's; all ranks together."""
        self._require_live("adopt_first")
        ParameterAverager(self._averaged(), self._control).adopt_first(self._group)

    # Parts of the above

    def _ready_order(self) -> list[str] | None:
        """The order that a new DDP must be told of to sum as this one does."""
        if self._order is None and self._hook is not None and self._ddp is not None and self._ddp._has_rebuilt_buckets:
            return [name for bucket in self._hook.layout() for name in bucket] or None
        return self._order

    def _local_updates(self) -> LocalUpdates:
        return LocalUpdates(
            self.strategy.averaging or Averaging(silent()),
            self._parameters,
            self._buffers,
            self._optimizers,
            self._groups,
            self._ledger,
            self._control,
            self._device,
            self._clock.step,
            self._probe,
        )

    def _equalise_scaler(self) -> None:
        """A loss scale that moved on one rank alone would scale gradients differently that are now averaged."""
        if self._scaler is not None and self._scaler._scale is not None:
            state = {"scale": self._scaler._scale, "growth": self._scaler._growth_tracker}
            ParameterAverager({key: value for key, value in state.items() if value is not None}, self._control).adopt_first(
                self._group
            )

    def _buffers(self) -> dict[str, Tensor]:
        ignored = set(self._ddp.parameters_to_ignore) if self._ddp else set()
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in ignored}

    def _averaged(self) -> dict[str, Tensor]:
        return {**self._parameters, **self._buffers()}

    def _releasing(self, reducer: Reducer) -> Reducer:
        """Residuals pass on to a reducer with error feedback; otherwise they go into its next exchange."""
        held = any("error" in slot for slot in self._memory.values())
        return Release(reducer) if held and "ErrorFeedback(" not in render(reducer) else reducer

    def _agree_on_drift(self) -> bool:
        """Whether any replica may differ; clocks that differ are an error."""
        self._meet()
        rows = land(gather_texts(f"{self._clock.step} {int(self._drifted)}", self._device), self._group, self._control)
        steps, drifted = zip(*(row.split() for row in rows), strict=True)
        if len(set(steps)) > 1 and self._uneven == "error":
            made = ", ".join(f"rank {rank} made {n} steps" for rank, n in zip(self._group.members, steps, strict=True))
            raise UnevenError(f"the ranks are not in step: {made}")
        return "1" in drifted

    def _require_live(self, what: str) -> None:
        if not self._live:
            raise RuntimeError(f"{what}() needs a run that is attached; this one has been detached")
        if self._in_consensus:
            raise RuntimeError(f"{what}() can't be called inside consensus(): the parameters there are on loan")


def check_replicas(run: Run) -> None:
    """Raise `ReplicaError` where what must be the same on all ranks is not; all ranks together.

    That is the parameters, unless steps have been taken apart, and the anchors with the outer optimizer's memory of them.
    Bytes: (N-1) * 16 a tensor.
    """
    run._require_live("check_replicas")
    parameters: dict[str, Tensor] = {} if run._agree_on_drift() else dict(run._parameters)
    compare({**parameters, **run._local.replicated()}, run._group, run._control, run._device, run._clock.step)
