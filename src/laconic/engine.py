"""A strategy at work: what happens between the lines of the user's loop."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.agreement import RollCall, UnevenError, gather_texts, pulse
from laconic.averaging import ParameterAverager
from laconic.bucket import Slot
from laconic.clock import Clock
from laconic.composition import Averaging, Strategy, render
from laconic.dispatch import Dispatcher
from laconic.groups import Groups, control_device
from laconic.hook import GradientHook
from laconic.local import LocalUpdates
from laconic.plan import Plan, attached, scopes
from laconic.probe import Probe
from laconic.reducers.base import Reducer
from laconic.reducers.error_feedback import ErrorFeedback, Release
from laconic.replay import Readiness, replay
from laconic.replicas import compare
from laconic.routes import silent
from laconic.state import VERSION, checked, kept_of
from laconic.stats import Counts, Observer
from laconic.wire import CommunicationError, Ledger, TorchGroup, land


class Stop(BaseException):
    """Another rank has run out of batches: leave the block, quietly. Not an Exception, so that no user's handler keeps it."""


class Engine:
    """The parts of a run, and how they work together at each step.

    The optimizers keep it alive, also where the caller drops the run; `stop` takes everything off again.
    """

    def __init__(self, plan: Plan, process_group: dist.ProcessGroup, identity: str) -> None:
        self.strategy = plan.strategy
        self.module, self.parameters, self.optimizers = plan.module, plan.parameters, plan.optimizers
        self.uneven, self.scaler, self._check_every = plan.uneven, plan.scaler, plan.check_every
        self.ddp = plan.ddp  # let go of by `stop`: a dead DDP must not linger beside a new one over the same module
        self.device = control_device(process_group)
        names = {id(parameter): name for name, parameter in plan.module.named_parameters()}
        self.memory: dict[str, Slot] = {name: {} for name in names.values()}
        self.ledger, self.aside, self.control = Ledger(), Ledger(), Ledger()
        members = dist.get_process_group_ranks(process_group)
        self.roll = RollCall(process_group.get_group_store(), identity, process_group.rank(), members)
        self.mesh = plan.mesh
        self.groups = Groups(
            process_group, identity, scopes(plan.strategy), plan.mesh, self.device, self.roll.worry, self.roll.worry_aside
        )
        self.group = self.groups.world
        self._made = 0  # steps since it was attached
        self._brought = Counts()  # what a loaded state had counted, less what was counted here until then
        self._saved_counts = Counts()  # as of the last completed step
        self.probe = Probe()
        self.observers: list[Observer] = []
        self.hook: GradientHook | None = None
        if plan.ddp is not None:
            self.hook = GradientHook(plan.strategy.reducer, self.group, names, self.memory, self.ledger)
            if plan.scaler is not None and plan.scaler.is_enabled():
                self.hook.scale = plan.scaler._get_scale_async  # type: ignore[assignment]  # set before any backward
            self.hook.strategy, self.hook.probe = str(plan.strategy), self.probe
            self._dispatcher = Dispatcher.of(plan.ddp)
            self._dispatcher.target = self.hook
            self._dispatcher.on_forward = weakref.WeakMethod(self._before_forward)
        self._rounds = 0  # of the hook, when residuals of a former strategy were last looked at
        self._order: list[str] | None = None  # in which DDP's first backward made gradients ready, once that is known
        self._readiness: Readiness | None = None
        self._watch_order()
        self.clock = Clock(plan.optimizers, plan.scaler, self._after_step)
        attached.update(plan.optimizers)
        if plan.ddp is None:
            # A DDP starts with the first rank's parameters on all; a bare module may have been built anyhow.
            everything = {**dict(plan.module.named_parameters()), **self.buffers()}
            ParameterAverager(everything, self.control).adopt_first(self.group)
        self.local = self._local_updates()
        self.begin_step()

    # The loop

    def begin_step(self) -> None:
        """Make ready for the step that comes: with whom gradients are averaged in it, if at all."""
        step = self.roll.step = self.clock.step
        if self.hook is not None:
            group = self._partners(step)
            self.hook.step = step
            if (group or self.group) != self.hook.group:
                self.hook.use(self.hook.reducer, group or self.group)
            self._dispatcher.muted, self._dispatcher.apart = group is None, group is not self.group

    def _partners(self, step: int) -> TorchGroup | None:
        """Who averages gradients with this rank in the step after `step` completed ones."""
        return self.groups.at(self.strategy.route.at(step))

    def _after_step(self) -> None:
        step = self.roll.step = self.clock.step
        self._made += 1
        if self._readiness is not None and self.hook is not None and self.hook.rounds:
            self._order, self._readiness = self._readiness.stop(), None
        partners = self._partners(step - 1)
        if (partners.world if partners else 1) < self.group.world:
            self.local.drift()
        before = self.local.syncs
        with self.during("averaging after the step"):
            self.local.after_step(step, self.meet)
        self._drop_release()
        self.begin_step()
        syncs = self.local.syncs if self.strategy.averaging else step
        if self._check_every and syncs > (before if self.strategy.averaging else step - 1) and syncs % self._check_every == 0:
            self.compare_replicas()
        self._saved_counts = self.counts()
        for observer in self.observers:
            observer.stepped()

    def _before_forward(self) -> None:
        syncs = torch.is_grad_enabled() and self.ddp is not None and self.ddp.require_backward_grad_sync
        if syncs and self._partners(self.clock.step) is not None:
            self.meet()

    @property
    def drifted(self) -> bool:
        """Whether this replica may differ from the others."""
        partners = self._partners(self.clock.step)
        alone = (partners.world if partners else 1) < self.group.world
        return self.local.drifted or (self.clock.between and alone)

    def meet(self) -> None:
        """Where ranks may stop at different steps: make sure that all are here, or stop."""
        if self.uneven == "stop" and not all(land(pulse(True, self.device), self.group, self.control)):
            raise Stop

    # What may go wrong

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What fails in here is said to have failed in this phase, and the other ranks are told."""
        try:
            yield
        except CommunicationError as error:
            self.report_failure(error)
            raise CommunicationError(f"{self.strategy}, step {self.clock.step}, {phase}: {error}") from error

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks, if they can be told."""
        if isinstance(error, UnevenError):
            return  # `worry` has reported already
        try:
            self.roll.report(f"failed in step {self.clock.step + 1} with {type(error).__name__}: {error}")
        except RuntimeError as lost:
            error.add_note(f"laconic: the other ranks could not be told: {lost}")

    def agree_on_drift(self) -> bool:
        """Whether any replica may differ; clocks that differ are an error."""
        self.meet()
        rows = land(gather_texts(f"{self.clock.step} {int(self.drifted)}", self.device), self.group, self.control)
        steps, drifted = zip(*(row.split() for row in rows), strict=True)
        if len(set(steps)) > 1 and self.uneven == "error":
            made = ", ".join(f"rank {rank} made {n} steps" for rank, n in zip(self.group.members, steps, strict=True))
            raise UnevenError(f"the ranks are not in step: {made}")
        return "1" in drifted

    def compare_replicas(self) -> None:
        """Whether all ranks have the same bits where they must."""
        with self.during("comparing replicas"):
            parameters: dict[str, Tensor] = {} if self.agree_on_drift() else dict(self.parameters)
            compare({**parameters, **self.local.replicated()}, self.group, self.control, self.device, self.clock.step)

    # Change, and the end

    def become(self, strategy: Strategy, *, equal: bool = False) -> None:
        """Go on by another strategy from the next step; all ranks together, and they agree on which.

        Replicas that have drifted become equal first, unless they are said to be.
        """
        drifted = not equal and (self.agree_on_drift() or self.local.deltas is not None)
        if drifted and (strategy.route.talks or strategy.averaging or self.local.deltas):
            self.local.equalise(self.ledger, release=True)
            if strategy.route.talks:  # equal gradients keep replicas equal only if the optimizers' memory is equal as well
                self.local.moments.equalise(self.group)
                self._equalise_scaler()
        drifted, before = self.drifted and not equal, self.local
        if before.deltas is not None:
            before.deltas.abandon()
        self.strategy = strategy
        self.groups.add(scopes(strategy))
        self.local = self._local_updates()
        self.local.syncs, self.local.skipped_before = before.syncs, before.skipped
        if drifted:
            self.local.drift()
        if self.hook is not None:
            self.hook.use(self._releasing(strategy.reducer), self.group)
            self.hook.strategy = str(strategy)
        self._watch_order()
        self.begin_step()

    def stop(self) -> None:
        """Take everything off again. Asks nobody."""
        self.clock.stop()
        if self._readiness is not None:
            self._readiness.stop()
        attached.difference_update(self.optimizers)
        if self.ddp is not None:
            self._dispatcher.release()
            self.ddp = None
        if self.local.deltas is not None:
            self.local.deltas.abandon()
        self.groups.close()

    # State

    def counts(self) -> Counts:
        """What the run has cost so far, before a resume and since."""
        return self._brought + self.counts_here()

    def counts_here(self) -> Counts:
        """What it has cost since it was attached, whatever was loaded meanwhile."""
        return Counts.of(self._made, self.ledger, self.aside)

    def state(self) -> dict[str, Any]:
        """This rank's communication state, as plain data."""
        if self.hook is not None:
            self.hook.settle()
        local = self.local.state()
        return {
            "version": VERSION,
            "rank": self.group.rank,
            "world": self.group.world,
            "kept": kept_of(self.memory, local["deltas"]),
            "strategy": str(self.strategy),
            "step": self.clock.step,
            "ahead": self.clock.ahead,
            "rounds": self.hook.rounds if self.hook else 0,
            "counts": self._saved_counts.state(),
            "order": self._ready_order(),
            "local": local,
            "memory": {name: dict(slot) for name, slot in self.memory.items() if slot},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; all ranks together. Nothing is changed if it doesn't fit."""
        saved = checked(state, str(self.strategy), self.group.rank, self.parameters, self.memory)
        devices = {name: parameter.device for name, parameter in self.module.named_parameters()}
        for name, slot in self.memory.items():
            slot.clear()
            slot.update({key: value.detach().to(devices[name], copy=True) for key, value in saved.memory.get(name, {}).items()})
        self.clock.set(saved.step, saved.ahead)
        self._brought = saved.counts + -self.counts_here()
        self._saved_counts = saved.counts
        self.local.load(saved.local, saved.step)
        if self.hook is not None:
            self.hook.rounds = saved.rounds
            self.hook.use(self._releasing(self.strategy.reducer), self.group)
        if self.ddp is not None and saved.order and replay(self.ddp, saved.order):
            self._order = saved.order
            if self._readiness is not None:
                self._readiness.stop()
                self._readiness = None
        self.begin_step()

    def _watch_order(self) -> None:
        """If DDP's first backward that talks is still to come, see in which order it makes gradients ready."""
        if self.ddp is None or not self.strategy.route.talks or self.ddp._has_rebuilt_buckets:
            return
        if self._order is None and self._readiness is None:
            self._readiness = Readiness(self.ddp)

    def _ready_order(self) -> list[str] | None:
        """The order that a new DDP must be told of to sum as this one does."""
        if self._order is None and self.hook is not None and self.ddp is not None and self.ddp._has_rebuilt_buckets:
            return [name for bucket in self.hook.layout() for name in bucket] or None
        return self._order

    # Parts

    def buffers(self) -> dict[str, Tensor]:
        """The module's, but for those that DDP is told to leave alone."""
        ignored = set(self.ddp.parameters_to_ignore) if self.ddp else set()
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in ignored}

    def averaged(self) -> dict[str, Tensor]:
        """All that is averaged between steps."""
        return {**self.parameters, **self.buffers()}

    def _local_updates(self) -> LocalUpdates:
        return LocalUpdates(
            self.strategy.averaging or Averaging(silent()),
            self.parameters,
            self.buffers,
            self.optimizers,
            self.groups,
            self.ledger,
            self.control,
            self.device,
            self.clock.step,
            self.probe,
        )

    def _equalise_scaler(self) -> None:
        """A loss scale that moved on one rank alone would scale gradients differently that are now averaged."""
        if self.scaler is not None and self.scaler.is_enabled() and self.scaler._scale is not None:
            state = {"scale": self.scaler._scale, "growth": self.scaler._growth_tracker}
            ParameterAverager({key: value for key, value in state.items() if value is not None}, self.control).adopt_first(
                self.group
            )

    def _releasing(self, reducer: Reducer) -> Reducer:
        """Residuals pass on to a reducer with error feedback; otherwise they go into its next exchange."""
        held = any("error" in slot for slot in self.memory.values())
        takes = any(f"{kind.__name__}(" in render(reducer) for kind in (ErrorFeedback, Release))  # released twice is doubled
        return Release(reducer) if held and not takes else reducer

    def _drop_release(self) -> None:
        """Once the residuals of a former strategy have been sent, go on without the wrapper that sends them.

        Its collectives are those of the reducer inside, so a rank that had none to send may drop it before the others do.
        """
        if self.hook is None or not isinstance(self.hook.reducer, Release) or self.hook.rounds == self._rounds:
            return
        self._rounds = self.hook.rounds
        if any(bool(slot["error"].any()) for slot in self.memory.values() if "error" in slot):
            return  # a mean was not finite: they go into the next exchange
        for slot in self.memory.values():
            slot.pop("error", None)
        self.hook.reducer = self.hook.reducer.inner
