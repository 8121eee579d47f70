"""What happens to parameters, buffers and the optimizers' memory between the optimizers' steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.exchange import complete
from laconic.comm.flat_tensors import local
from laconic.comm.group import TorchGroup
from laconic.comm.inspection import Inspector, Sync
from laconic.comm.ledger import Ledger
from laconic.comm.scopes import HEARTBEATS, OUTSTANDING
from laconic.local.agenda import Agenda
from laconic.local.anchors import InnerGroups
from laconic.local.delta_averaging import DeltaAverager
from laconic.local.fragments import fragments
from laconic.local.moments import Moments
from laconic.local.parameter_averaging import ParameterAverager
from laconic.ranks.agreement import alike
from laconic.ranks.groups import Groups
from laconic.ranks.presence import Heartbeat, heartbeat
from laconic.strategies.strategy import Averaging


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
        inspector: Inspector,
        fused: bool = False,
    ) -> None:
        self.syncs = 0
        self.skipped_before = 0  # by a strategy that this one came after
        self._averaging, self._parameters, self._buffers, self._optimizers = averaging, parameters, buffers, optimizers
        self._groups, self._ledger, self._control, self._device = groups, ledger, control, device
        self._inspector, self._fused = inspector, fused
        self.moments = Moments(optimizers, parameters, ledger, control, device)
        self._drifted = False
        self._agenda = Agenda(averaging, step)
        self.deltas: DeltaAverager | None = None
        if averaging.deltas is not None and step >= averaging.start:
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
            self._agenda.synced(step, max(present.rates, default=None))
            self._average_buffers(group, self._ledger)
            if isinstance(averaging.moments, str):
                self.moments.treat(averaging.moments, group)
        moments = self._agenda.moments(step)
        if moments:
            meet()
            self.moments.average(self._groups.world, moments)

    def _begin(self) -> DeltaAverager:
        assert self._averaging.deltas is not None
        parts = fragments(self._parameters, self._averaging.deltas.fragments, self._averaging.deltas.order)
        delayed = self._averaging.deltas.delay > 0
        inner = self._inner()
        rates = self._averaging.deltas.outer.needs_rate or self._follows_rate
        self.deltas = DeltaAverager(
            self._parameters,
            parts,
            self._averaging.deltas,
            self._groups[OUTSTANDING] if delayed else self._groups.world,
            self._groups[HEARTBEATS] if delayed else self._groups.everyone,
            self._groups.island,
            self._ledger,
            self._control,
            self._device,
            inner,
            rates,
            self.moments.forget_bad,
            self._inspector,
            self._fused,
        )
        self.deltas.restart()
        return self.deltas

    @property
    def _follows_rate(self) -> bool:
        return any(schedule.follows_rate for schedule in self._averaging.route.schedules)

    def _sync_deltas(self, step: int, meet: Callable[[], None]) -> tuple[Heartbeat | None, TorchGroup]:
        assert self.deltas is not None
        departures = self._agenda.departures(step)
        if departures or self.deltas.outstanding:
            meet()
        arrived = self.deltas.advance(step, departures)
        return arrived.get(self._agenda.last_fragment), self._groups.world

    def _sync_parameters(self, step: int, meet: Callable[[], None]) -> tuple[Heartbeat | None, TorchGroup]:
        world = self._groups.world
        group = self._groups.at(self._agenda.scope(step))
        if group is None:
            return None, world
        meet()
        rates = [rate() for _, rate in self._inner()] if self._follows_rate else []
        present = complete(heartbeat(step, 0.0, rates, group, self._device), group, self._control)
        averager = ParameterAverager(self._parameters, self._ledger)
        moved = averager.average(group, atomic=self._averaging.atomic, measure=self._inspector.watching)
        if moved is not None:
            self._inspector.syncs.append(Sync(step, moved))
        if group.world == world.world:
            self._drifted = False
        return present, group

    def equalise(self, ledger: Ledger, *, release: bool = False) -> None:
        """Replace every replica by the mean of all, now; all ranks together.

        The outer optimizer has no part in it: a period that is cut short would get the momentum of a whole one. With
        `release`, what error feedback has not sent yet counts as sent.
        """
        if self.deltas is not None:
            self.deltas.complete_all()
            if release:
                self.deltas.release()
        self.average_into_place(ledger, atomic=self._averaging.atomic)
        self._drifted = False
        if self.deltas is not None:
            self.deltas.restart()

    @torch.no_grad()
    def discard_outstanding(self) -> None:
        """Complete what is outstanding, and let nothing of it into the parameters; all ranks together."""
        if self.deltas is not None and self.deltas.outstanding:
            kept = {name: local(parameter).clone() for name, parameter in self._parameters.items()}
            self.deltas.complete_all()
            for name, parameter in self._parameters.items():
                local(parameter).copy_(kept[name])

    def average_into_place(self, ledger: Ledger, *, atomic: bool) -> None:
        """Parameters and buffers become the mean of the replicas'; nothing else is touched."""
        ParameterAverager(self._parameters, ledger).average(self._groups.world, atomic=atomic)
        self._average_buffers(self._groups.world, ledger)

    def _average_buffers(self, group: TorchGroup, ledger: Ledger) -> None:
        buffers = self._buffers()
        if not buffers or self._averaging.buffers == "local":
            return
        looks = [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()]
        if not complete(alike("\n".join(looks), self._device), group, self._control):
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

    def _inner(self) -> InnerGroups:
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
        """Syncs that moved nothing, because a delta was not finite or out of line."""
        return self.skipped_before + (self.deltas.skipped if self.deltas else 0)

    def replicated(self) -> dict[str, Tensor]:
        """What all ranks have alike at any time: the anchors, and the outer optimizer's memory of them."""
        return self.deltas.anchors.replicated() if self.deltas else {}

    # State

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "syncs": self.syncs,
            "skipped": self.skipped_before,
            "last": self._agenda.last,
            "rate": self._agenda.rate,
            "drifted": self._drifted,
            "deltas": self.deltas.state() if self.deltas else None,
        }

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on where `state` was taken; all ranks together where an exchange was outstanding."""
        self.syncs, self.skipped_before = state["syncs"], state["skipped"]
        self._agenda.synced(state["last"], state["rate"])
        self._drifted = state["drifted"]
        if self.deltas is not None:
            self.deltas.abandon()
            self.deltas = None
        if state["deltas"] is not None:
            self._begin().load(state["deltas"], step)
