"""What happens to parameters, buffers and the optimizers' memory between the optimizers' steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.agreement import Roll, alike, roll
from laconic.averaging import ParameterAverager
from laconic.composition import Averaging
from laconic.deltas import DeltaAverager
from laconic.fragments import fragments, launches
from laconic.groups import AIR, Groups
from laconic.moments import Moments
from laconic.probe import Probe, Sync
from laconic.schedules import QSR, Every, Schedule
from laconic.wire import Ledger, TorchGroup, land


class LocalUpdates:
    """Averages by a strategy's `Averaging` after the steps that are due, and all at once when it is asked to.

    Parameter sets are fixed when it is built, and tensors are paired by name: a gradient that is missing on some ranks
    changes nothing.
    """

    def __init__(
        self,
        averaging: Averaging,
        parameters: Mapping[str, Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
        optimizers: Sequence[Optimizer],
        groups: Groups,
        ledger: Ledger,
        control: Ledger,
        device: torch.device,
        step: int,
        probe: Probe,
    ) -> None:
        self.syncs = 0
        self.skipped_before = 0  # by a strategy that this one came after
        self._averaging, self._parameters, self._buffers, self._optimizers = averaging, parameters, buffers, optimizers
        self._groups, self._ledger, self._control, self._device = groups, ledger, control, device
        self._probe = probe
        self.moments = Moments(optimizers, parameters, ledger, control, device)
        self._drifted = False
        self._last, self._rate = step, None  # type: int, float | None
        self._schedules: list[Schedule] = []
        self.deltas: DeltaAverager | None = None
        if averaging.deltas is not None:
            self._schedules = [*launches(averaging)] if averaging.every else [averaging.route.legs[0][0]]
            if step >= averaging.start:
                self._begin()

    @property
    def drifted(self) -> bool:
        """Whether replicas may differ."""
        return self._drifted if self.deltas is None else self.deltas.drifted

    def drift(self) -> None:
        """This replica has made a step of its own."""
        self._drifted = True
        if self.deltas is not None:
            self.deltas.drift()

    def after_step(self, step: int, meet: Callable[[], None]) -> None:
        """Do what is due after `step` completed steps; `meet` is called before all ranks have to be there."""
        averaging = self._averaging
        if averaging.deltas is not None and self.deltas is None and step >= averaging.start:
            self._begin()
            return
        present, group = self._sync_deltas(step, meet) if self.deltas else self._sync_parameters(step, meet)
        if present is not None:
            self.syncs += 1
            self._last, self._rate = step, max(present.rates, default=None)
            self._average_buffers(group, self._ledger)
            if isinstance(averaging.moments, str):
                self.moments.treat(averaging.moments, group)
        if isinstance(averaging.moments, tuple):
            due = [key for key, period in averaging.moments if Every(period, averaging.start).due(step - 1)]
            if due:
                meet()
                self.moments.average(self._groups.world, due)

    def _begin(self) -> DeltaAverager:
        assert self._averaging.deltas is not None
        parts = fragments(self._parameters, self._averaging.deltas.fragments, self._averaging.deltas.order)
        group = self._groups[AIR] if self._averaging.deltas.delay else self._groups.world
        inner = self._inner()
        rates = self._averaging.deltas.outer.needs_rate or self._follows_rate
        self.deltas = DeltaAverager(
            self._parameters,
            parts,
            self._averaging.deltas,
            group,
            self._ledger,
            self._control,
            self._device,
            inner,
            rates,
            self.moments.forget_bad,
            self._probe,
        )
        self.deltas.restart()
        return self.deltas

    @property
    def _follows_rate(self) -> bool:
        return any(isinstance(schedule, QSR) for schedule, _ in self._averaging.route.legs)

    def _sync_deltas(self, step: int, meet: Callable[[], None]) -> tuple[Roll | None, TorchGroup]:
        assert self.deltas is not None
        due = [f for f, schedule in enumerate(self._schedules) if schedule.due(step - 1, self._last, self._rate)]
        if due or self.deltas.airborne:
            meet()
        landed = self.deltas.advance(step, due)
        last = len(self.deltas.fragments) - 1  # the period ends with it
        return next((present for fragment, present in landed if fragment == last), None), self._groups.world

    def _sync_parameters(self, step: int, meet: Callable[[], None]) -> tuple[Roll | None, TorchGroup]:
        world = self._groups.world
        group = self._groups.at(self._averaging.route.at(step - 1, self._last, self._rate))
        if group is None:
            return None, world
        meet()
        rates = [rate() for _, rate in self._inner()] if self._follows_rate else []
        present = land(roll(step, 0.0, rates, group, self._device), group, self._control)
        averager = ParameterAverager(self._parameters, self._ledger)
        moved = averager.average(group, atomic=self._averaging.atomic, measure=self._probe.watching)
        if moved is not None:
            self._probe.syncs.append(Sync(step, moved))
        if group.world == world.world:
            self._drifted = False
        return present, group

    def equalise(self, ledger: Ledger, *, release: bool = False) -> None:
        """Replace every replica by the mean of all, now; all ranks together.

        The outer optimizer has no part in it: a round that is cut short would get the momentum of a whole one. With
        `release`, what error feedback has not sent yet counts as sent.
        """
        if self.deltas is not None:
            self.deltas.land_all()
            if release:
                self.deltas.release()
        self.average_into_place(ledger, atomic=self._averaging.atomic)
        self._drifted = False
        if self.deltas is not None:
            self.deltas.restart()

    @torch.no_grad()
    def discard_outstanding(self) -> None:
        """Complete what is outstanding, and let nothing of it into the parameters; all ranks together."""
        if self.deltas is not None and self.deltas.airborne:
            kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            self.deltas.land_all()
            for name, parameter in self._parameters.items():
                parameter.copy_(kept[name])

    def average_into_place(self, ledger: Ledger, *, atomic: bool) -> None:
        """Parameters and buffers become the mean of the replicas'; nothing else is touched."""
        ParameterAverager(self._parameters, ledger).average(self._groups.world, atomic=atomic)
        self._average_buffers(self._groups.world, ledger)

    def _average_buffers(self, group: TorchGroup, ledger: Ledger) -> None:
        buffers = self._buffers()
        if not buffers or self._averaging.buffers == "local":
            return
        looks = [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()]
        if not land(alike("\n".join(looks), self._device), group, self._control):
            raise ValueError(
                f"the model's buffers have different shapes on different ranks, so they can't be averaged; here they are "
                f"{', '.join(looks)}; a strategy with buffers='local' leaves them alone"
            )
        averager = ParameterAverager(buffers, ledger)
        match self._averaging.buffers:
            case "average":
                averager.average(group)
            case "broadcast":
                averager.adopt_first(group)

    def _inner(self) -> list[tuple[list[str], Callable[[], float]]]:
        """Parameter names by the inner optimizers' groups, with the learning rate of each."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        found: list[tuple[list[str], Callable[[], float]]] = []
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                mine = [names.pop(id(p)) for p in group["params"] if id(p) in names]
                if mine:
                    found.append((mine, lambda o=optimizer, n=number: float(o.param_groups[n]["lr"])))  # type: ignore[misc]
        if names:  # no optimizer moves them, but anchors of all parameters belong to some group
            found.append((list(names.values()), lambda: 0.0))
        return found

    @property
    def skipped(self) -> int:
        """Rounds that moved nothing, because a delta was not finite or out of line."""
        return self.skipped_before + (self.deltas.skipped if self.deltas else 0)

    def replicated(self) -> dict[str, Tensor]:
        """What all ranks have alike at any time: the anchors, and the outer optimizer's memory of them."""
        return self.deltas.replicated() if self.deltas else {}

    # State

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "syncs": self.syncs,
            "skipped": self.skipped_before,
            "last": self._last,
            "rate": self._rate,
            "drifted": self._drifted,
            "deltas": self.deltas.state() if self.deltas else None,
        }

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on where `state` was taken; all ranks together where an exchange was in the air."""
        self.syncs, self.skipped_before = state["syncs"], state["skipped"]
        self._last, self._rate, self._drifted = state["last"], state["rate"], state["drifted"]
        if self.deltas is not None:
            self.deltas.abandon()
            self.deltas = None
        if state["deltas"] is not None:
            self._begin().load(state["deltas"], step)
