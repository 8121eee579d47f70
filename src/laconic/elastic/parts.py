"""What a worker averages between steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic._torch.fsdp import reshard
from laconic.comm.bucket import RESIDUAL
from laconic.comm.flat_tensors import local, squared_norm
from laconic.comm.inspection import Inspector, Sync
from laconic.comm.ledger import Ledger
from laconic.elastic.group import ElasticGroup
from laconic.elastic.healing import Looks
from laconic.elastic.island import Island
from laconic.elastic.optimizer_memory import OptimizerMemory
from laconic.local.agenda import Agenda
from laconic.local.anchors import InnerGroups
from laconic.local.delta_averaging import DeltaAverager
from laconic.local.fragments import fragments
from laconic.local.moments import Moments
from laconic.local.parameter_averaging import ParameterAverager
from laconic.run.state import memory_of
from laconic.strategies.strategy import Averaging, Strategy

FLOATS = (torch.float32, torch.float64)
Confirm: TypeAlias = Callable[[Sequence[int]], None]
"""Asked before anything of these fragments is written; it may raise."""


class Parts:
    """A strategy's parts over one model: what is due, and what is exchanged.

    Averaging is that of a run without torchft, piece by piece (`laconic.local`); what is added here is that everything is
    exchanged before anything is written.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        group: ElasticGroup,
        island: Island,
        *,
        sharded: bool,
        hand_over: bool = True,
        fused: bool = False,
    ) -> None:
        assert strategy.averaging is not None, "attach has checked it"
        self.strategy, self.optimizers, self.scaler = strategy, optimizers, scaler
        self.ledger, self._control, self.inspector = Ledger(), Ledger(), Inspector()
        self._averaging: Averaging = strategy.averaging
        self.module, self._group, self._island, self._sharded = module, group, island, sharded
        self.shared = [key for key, whose in memory_of(strategy).items() if whose == "shared"]
        everything = dict(module.named_parameters())
        trained = {name: p for name, p in everything.items() if p.requires_grad}
        self._frozen = {name: p for name, p in everything.items() if not p.requires_grad}
        self.device = next(iter(trained.values())).device
        self._control_device = torch.device("cpu") if self.device.type == "cpu" else self.device
        # Of a sharded model, each rank of an island has a part of every parameter; of a whole one, some of the parameters.
        whole = [list(trained)] * island.size
        self._dealt = whole if sharded else island.deal({name: p.numel() for name, p in trained.items()})
        self.parameters = {name: trained[name] for name in self._dealt[island.rank]}
        self._trained = trained
        self.agenda = Agenda(self._averaging)
        self._moments = Moments(optimizers, trained, self.ledger, self._control, self._control_device)
        # What is handed over to a worker that joins.
        self.optimizer_memory = OptimizerMemory(optimizers, trained) if hand_over else None
        self.deltas = self._new_deltas(fused) if self._averaging.deltas else None
        self._weights: Mapping[int, float] = {}
        self.rate: float | None = None  # of all workers, at this sync
        self._residual_world = 0  # of how many workers' mean the residuals are a part
        self._mark = self.deltas.mark() if self.deltas else None

    def _new_deltas(self, fused: bool) -> DeltaAverager:
        deltas = self._averaging.deltas
        assert deltas is not None
        parts = fragments(self._trained, deltas.fragments, deltas.order)
        made = DeltaAverager(
            self.parameters,
            [[name for name in part if name in self.parameters] for part in parts],
            deltas,
            self._group,
            self._group,
            self._island.group,
            self.ledger,
            self._control,
            self._control_device,
            self._inner(),
            deltas.outer.needs_rate or any(schedule.follows_rate for schedule in self._averaging.route.schedules),
            self._moments.forget_bad,
            self.inspector,
            fused,
        )
        if self._island.group is not None:
            made.replica_squares = self._island.sums
        made.restart()
        return made

    def _inner(self) -> InnerGroups:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        found: list[tuple[list[str], Callable[[], float]]] = []
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                mine = [names.pop(id(p)) for p in group["params"] if id(p) in names]
                if mine:
                    found.append((mine, lambda o=optimizer, n=number: float(o.param_groups[n]["lr"])))  # type: ignore[misc]
        if names:
            found.append((list(names.values()), lambda: 0.0))
        return found

    def facts(self) -> list[str]:
        """What all workers must have alike."""
        held = {**self.held(), **self.untrained()}
        looks = [
            f"{name.replace('/', ' ', 1)} of shape {tuple(one.shape)}, {one.dtype}"
            + ("" if one.is_contiguous() else f", strides {one.stride()}")
            for name, one in held.items()
        ]
        looks += [f"optimizer group {number}: {', '.join(names)}" for number, (names, _) in enumerate(self._inner())]
        looks += self.optimizer_memory.facts() if self.optimizer_memory is not None else []
        return [f"strategy {self.strategy.compared}", f"island of {self._island.size} ranks", *looks]

    # What is due

    @property
    def fragments(self) -> int:
        """How many there are; 1 where parameters are averaged."""
        return len(self.deltas.fragments) if self.deltas else 1

    @property
    def outstanding(self) -> bool:
        """Whether deltas are on their way while training goes on."""
        return self.deltas is not None and self.deltas.outstanding

    def departures(self, step: int) -> list[int]:
        """What leaves after `step` steps."""
        if self.deltas is not None:
            return self.agenda.departures(step)
        return [0] if step > 0 and self.agenda.scope(step) is not None else []

    def drift(self) -> None:
        """A step has been made."""
        if self.deltas is not None:
            self.deltas.drift()

    # One exchange

    def weigh(self, weights: Mapping[int, float]) -> None:
        """How much this worker counts in the next exchanges, by fragment."""
        self._weights = weights

    @torch.no_grad()
    def exchange(self, step: int, due: Sequence[int], confirm: Confirm) -> None:
        """Send what is due and complete what is outstanding; `confirm` is called before anything is written, and may raise."""
        if self.deltas is None:
            if due:
                self._average(step, confirm)
            return
        self.deltas.weights = self._weights
        self.deltas.confirm = lambda fragments: self._confirm(fragments, confirm)
        arrived = self.deltas.advance(step, due)
        present = arrived.get(self.agenda.last_fragment)
        if present is not None:
            self._end_period(step, max(present.rates, default=None))

    def _average(self, step: int, confirm: Confirm) -> None:
        write = ParameterAverager(self.parameters, self.ledger).exchange(self._group, weight=self._weights.get(0, 1.0))
        write_buffers = self._exchange_buffers()
        confirm([0])
        moved = write(measure=self.inspector.watching)
        write_buffers()
        if self.inspector.watching:
            self.inspector.syncs.append(Sync(step, moved))
        self._end_period(step, self.rate)

    def _confirm(self, arrived: Sequence[int], confirm: Confirm) -> None:
        buffers = self._exchange_buffers() if self.agenda.last_fragment in arrived else _nothing
        confirm(arrived)
        buffers()

    def _exchange_buffers(self) -> Callable[[], object]:
        buffers = self._buffers()
        if not buffers or self._averaging.buffers != "average":
            return _nothing
        return ParameterAverager(buffers, self.ledger).exchange(self._group, weight=self._weights.get(0, 1.0))

    def _end_period(self, step: int, rate: float | None) -> None:
        self.agenda.synced(step, rate)
        assert isinstance(self._averaging.moments, str), "attach has checked it"
        self._moments.treat(self._averaging.moments, self._group)

    def wrote(self) -> None:
        """This rank's part has been written: the other ranks of the island get it, too; all of them together."""
        if self._sharded:
            reshard(self.module)
        else:
            self._island.spread([{name: self._trained[name] for name in names} for names in self._dealt])
            if self._island.size > 1:
                none: dict[str, Tensor] = {}
                self._island.spread([dict(self.module.named_buffers()), *[none] * (self._island.size - 1)])

    def took_over(self, *, moments: bool) -> None:
        """A peer's state has been adopted: the other ranks of the island get this rank's part, too; all of them together."""
        self.wrote()
        if moments and self.optimizer_memory is not None and not self._sharded and self._island.size > 1:
            self.optimizer_memory.spread(self._island, self._dealt)

    def mark(self) -> None:
        """What has been exchanged by now stays exchanged."""
        self._mark = self.deltas.mark() if self.deltas else None

    def undo(self) -> list[int]:
        """What was exchanged since came to nothing, for all workers; fragments whose deltas were outstanding."""
        return self.deltas.undo(self._mark) if self.deltas and self._mark else []

    # Residuals

    def residuals(self) -> dict[str, Tensor]:
        """What error feedback holds, by parameter."""
        memory = self.deltas.memory if self.deltas else {}
        return {f"residual/{name}": slot[RESIDUAL] for name, slot in memory.items() if RESIDUAL in slot}

    @property
    def has_residuals(self) -> bool:
        """Whether the strategy keeps any; the same on all workers."""
        deltas = self._averaging.deltas
        return deltas is not None and RESIDUAL in deltas.reducer.all_memory()

    def residual_square(self) -> float:
        """The square of the norm of all of them that this rank has."""
        return squared_norm(self.residuals().values()) if self.has_residuals else 0.0

    @torch.no_grad()
    def share_residuals(self, world: int) -> None:
        """The mean is over so many workers from now on: what residuals add to it stays what it was.

        A residual e of one of N workers is e / N of the mean that the model has not received yet.
        """
        if self._residual_world not in (0, world):
            for residual in self.residuals().values():
                residual.mul_(world / self._residual_world)
        self._residual_world = world

    def forget_residuals(self) -> None:
        """They are of a state that is no more."""
        for residual in self.residuals().values():
            residual.zero_()

    @torch.no_grad()
    def inherit(self, residuals: Mapping[str, Tensor]) -> None:
        """Those of a worker that leaves are added to this one's."""
        assert self.deltas is not None
        for name, residual in residuals.items():
            slot = self.deltas.memory[name.removeprefix("residual/")]
            held = slot.get(RESIDUAL)
            slot[RESIDUAL] = residual.clone() if held is None else held.add_(residual.to(held.device, held.dtype))

    def residual_looks(self, name: str) -> Looks | None:
        """What a residual of that name must look like."""
        anchor = self.deltas.anchors.by_name.get(name.removeprefix("residual/")) if self.deltas else None
        return None if anchor is None else Looks((*FLOATS, torch.bfloat16), list(anchor.shape))

    # What it is over

    def _buffers(self) -> dict[str, Tensor]:
        """Those that this rank averages: of a whole model, the first rank of an island."""
        return dict(self.module.named_buffers()) if self._sharded or self._island.rank == 0 else {}

    def held(self) -> dict[str, Tensor]:
        """What this rank writes at a sync, by kind and name."""
        parameters = {f"parameter/{name}": local(parameter) for name, parameter in self.parameters.items()}
        return {**parameters, **{f"buffer/{name}": buffer for name, buffer in self._buffers().items()}}

    def untrained(self) -> dict[str, Tensor]:
        """What nobody trains: a worker that joins may have been built with other numbers."""
        return {f"frozen/{name}": local(parameter) for name, parameter in self._frozen.items()}

    @torch.no_grad()
    def lend(self) -> dict[str, Tensor]:
        """The parameters become the anchors; what they were."""
        if self.deltas is None:
            raise RuntimeError(
                f"{self.strategy} averages parameters and keeps no model of the last sync; evaluate right after a sync, when "
                "run.version has changed, or use diloco(period, outer_lr=1.0, outer_momentum=0.0), which keeps one"
            )
        before = self.snapshot()
        self._write_parameters(self.deltas.anchors.by_name)
        return before

    def take_back(self, before: Mapping[str, Tensor]) -> None:
        """The parameters are again what they were."""
        self._write_parameters(before)

    @torch.no_grad()
    def _write_parameters(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            local(parameter).copy_(values[name])
        self.wrote()

    def snapshot(self, fragments: Sequence[int] | None = None) -> dict[str, Tensor]:
        """The parameters, of these fragments, as they are now; nothing where they are averaged themselves."""
        if self.deltas is None:
            return {}
        numbers = range(self.fragments) if fragments is None else fragments
        return {name: local(self.parameters[name]).clone() for number in numbers for name in self.deltas.fragments[number]}

    def largest_rate(self) -> float:
        """Of the learning rates of this worker."""
        return max(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)


def _nothing() -> None:
    """Nothing to write."""
