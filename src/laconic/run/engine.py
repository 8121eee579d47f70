"""A strategy at work: what happens between the lines of the user's loop."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic._torch.fsdp import reshard
from laconic._torch.optimizers import loss_scale
from laconic._torch.process_groups import control_device, store_of
from laconic.comm.bucket import Slot
from laconic.comm.exchange import complete
from laconic.comm.group import CommunicationError, TorchGroup
from laconic.comm.inspection import Inspector
from laconic.comm.lending import await_return
from laconic.comm.scopes import BACKGROUND
from laconic.gradients.hook import GradientHook
from laconic.gradients.in_backward import InBackward
from laconic.gradients.ready_order import ReadyOrder
from laconic.kernels.compiling import prepare
from laconic.local.parameter_averaging import ParameterAverager
from laconic.local.updates import LocalUpdates
from laconic.ranks.agreement import agree, gather_texts
from laconic.ranks.groups import Groups
from laconic.ranks.presence import Presence, UnevenError, still_training
from laconic.ranks.replicas import ReplicaError, compare
from laconic.run.arguments import Arguments, attached, scopes, unwrapped
from laconic.run.clock import Clock
from laconic.run.residuals import Residuals
from laconic.run.second_moment import SecondMoment
from laconic.run.state import kernels_of, memory_of
from laconic.run.stats import Advice, Counter, Observer
from laconic.strategies.routes import silent
from laconic.strategies.strategy import Averaging


class Stop(BaseException):
    """Another rank has run out of batches: leave the block, quietly. Not an Exception, so that no user's handler keeps it."""


class Engine:
    """The parts of a run, and how they work together at each step.

    `Run` is what a user sees of it. The packages above this one (checkpoint, meter, script) get it by `engine_of(run)`. For
    them are what the user gave (`strategy`, `module`, `ddp`, `optimizers`, `scaler`, `place`), `ranks`, `group` (all ranks),
    `replicas` (those that average with this one), `device`, `counter`, `during`, `wrote`, and what is under "For the packages
    above"; the rest is for the modules of this package.

    The optimizers keep it alive, also where the caller drops the run; `end` takes everything off again.
    """

    def __init__(self, given: Arguments, identity: str) -> None:
        self.strategy, self.place, self.ranks = given.strategy, given.place, given.ranks
        self.module, self.parameters, self.optimizers = given.module, given.parameters, given.optimizers
        self.uneven, self.scaler, self.mesh, self._check_every = given.uneven, given.scaler, given.mesh, given.check_every
        self.ddp = given.ddp  # let go of by `end`: a dead DDP must not linger beside a new one over the same module
        self.device, self._fused = control_device(given.ranks.everyone), given.fused
        names = {id(parameter): name for name, parameter in given.module.named_parameters()}
        self.memory: dict[str, Slot] = {name: {} for name in names.values()}
        self.residuals = Residuals(self.memory)
        self.whose = memory_of(given.strategy)  # by key of the memory; keys of strategies before this one stay
        self.counter = Counter()
        everyone = TorchGroup(given.ranks.everyone, places=given.ranks.places)
        presence = self.presence = Presence(store_of(everyone.process_group), identity, everyone.rank, everyone.names)
        checks = presence.check_peers, presence.check_peers_in_background
        self.groups = Groups(given.ranks, identity, scopes(given.strategy), given.mesh, self.device, *checks)
        self.group, self.replicas = self.groups.everyone, self.groups.world  # all ranks; those that this one averages with
        self.inspector = Inspector()
        self.observers: list[Observer] = []
        self.pilot: Observer | None = None  # who chooses the strategy, where that is left to an advisor; told last, may swap
        self.advised_by = given.strategy if given.strategy.advised is not None else None
        self.advice: Advice | None = None
        self.paused_seconds = 0.0  # in which the pilot probed and chose: no part of any step
        self.live, self.in_consensus = True, False
        self.unequal = False  # it has ended, or is to end, with replicas that differ, and that is the user's wish
        self._failure: str | None = None
        self._last_task: Callable[[bool], object] | None = None
        self._forward: RemovableHandle | None = None  # a hook on the forward of a sharded model
        self._in_backward: InBackward | None = None
        if given.ddp is not None or (given.sharding is not None and given.sharding.refusal is None):
            hook = GradientHook(given.strategy.reducer, self.replicas, names, self.memory, self.counter.training)
            if given.scaler is not None and given.scaler.is_enabled():
                hook.scale = loss_scale(given.scaler)
            hook.strategy, hook.inspector, hook.island = str(given.strategy), self.inspector, self.groups.island
            self._in_backward = InBackward(given.ddp, given.module, hook)
            self._in_backward.on_forward(self._before_forward)
        if given.sharding is not None and given.uneven == "stop":
            self._forward = given.module.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True)
        self.watch_order()
        self.clock = Clock(given.optimizers, given.scaler, self._after_step)
        self.second_moment = SecondMoment(given.optimizers)
        attached.update(given.optimizers)
        if given.ddp is None:
            # A DDP starts with the first rank's parameters on all; a bare module may have been built anyhow.
            everything = {**dict(given.module.named_parameters()), **self.buffers()}
            ParameterAverager(everything, self.counter.control).adopt_first(self.replicas)
        self.local = self.new_local_updates()
        self.begin_step()

    # The loop

    def begin_step(self) -> None:
        """Make ready for the step that comes: with whom gradients are averaged in it, if at all."""
        step = self.presence.step = self.clock.step
        group = self._partners(step)
        if self.strategy.second_moment == "local" or step >= self.strategy.warmup:
            self.second_moment.prepare(self.strategy.second_moment, step, synchronous=self._all_average(group))
        if self._in_backward is not None:
            apart = self._replicas_apart(step)
            unscaled = self._scales_differ and apart
            self._in_backward.prepare(step, group, self.replicas, apart=apart, unscaled=unscaled)

    def _partners(self, step: int) -> TorchGroup | None:
        """Who averages gradients with this rank in the step after `step` completed ones."""
        return self.groups.at(self.strategy.route.at(step))

    def _all_average(self, partners: TorchGroup | None) -> bool:
        return partners is not None and partners.world == self.replicas.world

    def _replicas_apart(self, step: int) -> bool:
        """Whether ranks may differ, by their parameters or their optimizers' memory, after `step` completed steps."""
        return self._first_apart is not None and step > self._first_apart

    @property
    def _scales_differ(self) -> bool:
        """Whether a loss scale may move on one rank alone."""
        return self.scaler is not None and self.scaler.is_enabled()

    def _steps_apart(self, step: int) -> bool:
        """Whether the step after `step` completed ones may differ between ranks: by gradients, or by the optimizers' memory."""
        if self.replicas.world == 1:
            return False
        return not self._all_average(self._partners(step)) or self._replicas_apart(step)

    def _after_step(self) -> None:
        step = self.presence.step = self.clock.step
        self.counter.step()
        if self._in_backward is not None:
            self._in_backward.stepped()
        if self._all_average(self._partners(step - 1)):
            self.second_moment.synchronised(step)
        if self._steps_apart(step - 1):
            self.local.drift()
        before = self.local.syncs
        with self.during("averaging after the step"):
            self.local.after_step(step, self.ensure_all_training)
        self.wrote()
        if self.hook is not None:
            self.residuals.drop_release(self.hook)
        self.begin_step()
        syncs = self.local.syncs if self.strategy.averaging else step
        if self._check_every and syncs > (before if self.strategy.averaging else step - 1) and syncs % self._check_every == 0:
            self.compare_replicas()
        self.counter.note()
        for observer in self.observers:
            observer.stepped()
        self.inspector.syncs.clear()
        if self.pilot is not None:
            began = time.perf_counter()
            self.pilot.stepped()
            self.paused_seconds += time.perf_counter() - began

    def _before_forward(self) -> None:
        if self.ddp is None:
            syncs = torch.is_grad_enabled()  # each forward of a sharded model is a collective of its island
        else:
            averages = self._partners(self.clock.step) is not None
            syncs = torch.is_grad_enabled() and self.ddp.require_backward_grad_sync and averages
        if syncs:
            self.ensure_all_training()

    @property
    def drifted(self) -> bool:
        """Whether this replica may differ from the others."""
        return self.local.drifted or (self.clock.between and self._steps_apart(self.clock.step))

    def ensure_all_training(self) -> None:
        """Where ranks may stop at different steps: make sure that all are here, or stop."""
        if self.uneven == "stop" and not all(complete(still_training(True, self.device), self.group, self.counter.control)):
            raise Stop

    def wrote(self) -> None:
        """Parameters may have been written: what `fully_shard` has gathered of them is old."""
        if self.place.sharding is not None:
            reshard(self.module)

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
            return  # `check_peers` has reported already
        try:
            self.presence.report(f"failed in step {self.clock.step + 1} with {type(error).__name__}: {error}")
        except RuntimeError as lost:
            error.add_note(f"laconic: the other ranks could not be told: {lost}")

    def agree_on_drift(self) -> bool:
        """Whether any replica may differ; clocks that differ are an error."""
        self.ensure_all_training()
        mine = gather_texts(f"{self.clock.step} {int(self.drifted)}", self.device)
        steps, drifted = zip(*(row.split() for row in complete(mine, self.group, self.counter.control)), strict=True)
        if len(set(steps)) > 1 and self.uneven == "error":
            made = ", ".join(f"{rank} made {n} steps" for rank, n in zip(self.group.names, steps, strict=True))
            raise UnevenError(f"the ranks are not in step: {made}")
        return "1" in drifted

    def compare_replicas(self) -> None:
        """Whether all ranks have the same bits where they must."""
        with self.during("comparing replicas"):
            parameters: dict[str, Tensor] = {} if self.agree_on_drift() else dict(self.parameters)
            expected = {**parameters, **self.local.replicated()}
            problem: Exception | None = None
            try:
                compare(expected, self.replicas, self.counter.control, self.device, self.clock.step)
            except ReplicaError as error:
                problem = error
            if self.group is not self.replicas:  # the ranks of other shards have found nothing
                agree([], problem, self.group, self.device)
            if problem is not None:
                raise problem

    # The end

    def end(self, failed: bool) -> None:
        """The run is over: the last task is done, observers are told, everything is taken off. Asks nobody."""
        if not self.live:
            return
        self.live = False
        task, self._last_task = self._last_task, None
        try:
            if task is not None:
                task(failed)
        finally:
            for observer in [*self.observers, *([self.pilot] if self.pilot is not None else [])]:
                observer.ended(self._failure)
            drifted = self.drifted
            self._stop()
        if drifted and not failed and not self.unequal:
            warnings.warn("detached while replicas differ; call sync() first to make them equal", stacklevel=3)

    def _stop(self) -> None:
        self.clock.stop()
        self.second_moment.release()
        if self._in_backward is not None:
            self._in_backward.stop()
        attached.difference_update(self.optimizers)
        if self._forward is not None:
            self._forward.remove()
        if self._in_backward is not None:
            self._in_backward.release()
            self.ddp, self.place = None, self.place._replace(ddp=None)
        if self.local.deltas is not None:
            self.local.deltas.abandon()
        await_return()  # before a group may be freed
        self.groups.close()

    # For the packages above

    @property
    def model(self) -> nn.Module:
        """What it is attached to."""
        return self.module if self.ddp is None else self.ddp

    @property
    def name(self) -> str:
        """What a person calls this rank."""
        return self.group.names[self.group.rank]

    @property
    def step(self) -> int:
        """Attempted optimizer steps so far."""
        return self.clock.step

    @property
    def lockstep(self) -> bool:
        """Whether every rank has the same parameters and optimizer state after every step."""
        return self.strategy.averaging is None and self.strategy.route.scopes == {"world"} and not self.drifted

    def require_live(self, what: str) -> None:
        """Refuse what needs a run at work."""
        if not self.live:
            raise RuntimeError(f"{what}() needs a run that is attached; this one has been detached")
        if self.in_consensus:
            raise RuntimeError(f"{what}() can't be called inside consensus(): the parameters there are on loan")

    def observe(self, observer: Observer) -> Inspector:
        """Have it told of every step and of the end; the inspector is what it can look through."""
        self.require_live("observe")
        self.observers.append(observer)
        return self.inspector

    def background_group(self) -> TorchGroup:
        """All its ranks on a gloo group that nobody else uses; all ranks ask for it together."""
        self.groups.add([BACKGROUND])
        return self.groups[BACKGROUND]

    def before_detach(self, task: Callable[[bool], object]) -> None:
        """Have this done last, while its process groups are still there, instead of what was to be done before.

        It is told whether an exception ends the run.
        """
        self._last_task = task

    def fail(self, error: BaseException) -> None:
        """An exception ends it: the other ranks are told, and nobody is waited for."""
        if self.live:
            self._failure = f"{type(error).__name__}: {error}"
            self.report_failure(error)
            self.end(failed=True)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Count the steps of another one over the same model; all ranks alike. If it shares parameters, it replaces."""
        self.require_live("add_optimizer")
        optimizer = unwrapped(optimizer)
        if any(optimizer is known for known in self.optimizers):
            raise ValueError(f"the run counts the steps of this {type(optimizer).__name__} already; each would count as two")
        self.optimizers.append(optimizer)
        self.clock.add(optimizer)
        attached.add(optimizer)

    def adopt_first(self) -> None:
        """Every replica becomes the first rank's; all ranks together."""
        self.require_live("adopt_first")
        ParameterAverager(self.averaged(), self.counter.control).adopt_first(self.replicas)
        self.wrote()

    def await_loads(self) -> None:
        """Before a load in mid-run that other ranks may not know of: an error on all where some don't."""
        self.require_live("load_state_dict")
        self.presence.await_loads()

    def keep_restored(self) -> None:
        """Say before it ends that this rank's parameters were loaded by the user since the last step.

        Nothing of the steps before goes into them any more. If all ranks say so, replicas become their mean; if only some do,
        each keeps its own, and `unequal` is set: the user has yet to send them to the others.
        """
        self.presence.mark_restored()

    # Parts

    def buffers(self) -> dict[str, Tensor]:
        """The module's, but for those that DDP is told to leave alone."""
        ignored = set(self.ddp.parameters_to_ignore) if self.ddp else set()
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in ignored}

    def averaged(self) -> dict[str, Tensor]:
        """All that is averaged between steps."""
        return {**self.parameters, **self.buffers()}

    def new_local_updates(self) -> LocalUpdates:
        """Averaging between steps by the strategy of now, from this step on."""
        start = self.strategy.averaging.start if self.strategy.averaging else 0
        steps = range(start, start + (self.strategy.cycle or 1))
        self._first_apart = next((step for step in steps if not self._all_average(self._partners(step))), None)
        return LocalUpdates(
            self.strategy.averaging or Averaging(silent()),
            self.parameters,
            self.buffers,
            self.optimizers,
            self.groups,
            self.counter.training,
            self.counter.control,
            self.device,
            self.clock.step,
            self.inspector,
            self.fuse(),
        )

    def fuse(self) -> bool:
        """Whether the strategy of now may use compiled kernels; those that are missing get compiled."""
        device = next(iter(self.parameters.values())).device
        fused = prepare(kernels_of(self.strategy), self._fused, device)
        if self.hook is not None:
            self.hook.fused = fused
        return fused

    def watch_order(self) -> None:
        """If gradients will be averaged, see in which order DDP makes them ready."""
        if self._in_backward is not None and self.strategy.route.communicates:
            self._in_backward.watch_order()

    @property
    def hook(self) -> GradientHook | None:
        """What averages gradients; None, where that can't be done inside backward."""
        return None if self._in_backward is None else self._in_backward.hook

    @property
    def order(self) -> ReadyOrder | None:
        """The order of DDP's buckets; None, where there is no DDP."""
        return None if self._in_backward is None else self._in_backward.order
