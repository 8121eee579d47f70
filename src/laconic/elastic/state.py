"""What a worker averages between steps, and what another one needs to go on from there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.comm.bucket import RESIDUAL
from laconic.comm.flat_tensors import local
from laconic.comm.inspection import Inspector
from laconic.comm.ledger import Ledger
from laconic.elastic.group import ElasticGroup
from laconic.elastic.healing import HealingError, Looks, State, norm
from laconic.local.agenda import Agenda
from laconic.local.anchors import InnerGroups
from laconic.local.delta_averaging import DeltaAverager
from laconic.local.fragments import fragments
from laconic.local.moments import Moments
from laconic.local.parameter_averaging import ParameterAverager
from laconic.strategies.strategy import Averaging, Strategy

FLOATS = (torch.float32, torch.float64)


class Elastic:
    """A strategy's parts over one model: what is due, what is exchanged, what a peer is sent.

    Averaging is that of a run without torchft, piece by piece (`laconic.local`); what is added here is that everything is
    exchanged before anything is written.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        group: ElasticGroup,
        *,
        fused: bool = False,
    ) -> None:
        assert strategy.averaging is not None, "attach has checked it"
        self.strategy, self.optimizers, self.scaler = strategy, optimizers, scaler
        self.ledger, self._control = Ledger(), Ledger()
        self._averaging: Averaging = strategy.averaging
        self._module, self._parameters, self._group = module, dict(parameters), group
        self._device = torch.device("cpu")
        self._agenda = Agenda(self._averaging)
        self._moments = Moments(optimizers, parameters, self.ledger, self._control, self._device)
        self._deltas = self._new_deltas(fused) if self._averaging.deltas else None
        self._weights: Mapping[int, float] = {}
        self._mark: list[int] = []
        self.mark()

    def _new_deltas(self, fused: bool) -> DeltaAverager:
        deltas = self._averaging.deltas
        assert deltas is not None
        made = DeltaAverager(
            self._parameters,
            fragments(self._parameters, deltas.fragments, deltas.order),
            deltas,
            self._group,
            self._group,
            None,
            self.ledger,
            self._control,
            self._device,
            self._inner(),
            deltas.outer.needs_rate or any(schedule.follows_rate for schedule in self._averaging.route.schedules),
            self._moments.forget_bad,
            Inspector(),
            fused,
        )
        made.restart()
        return made

    def _inner(self) -> InnerGroups:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
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
        look = [f"{kind} {name} of shape {tuple(t.shape)}, {t.dtype}" for kind, name, t in self._held()]
        return [f"strategy {self.strategy}", *look]

    # What is due

    @property
    def fragments(self) -> int:
        """How many there are; 1 where parameters are averaged."""
        return len(self._deltas.fragments) if self._deltas else 1

    @property
    def outstanding(self) -> bool:
        """Whether deltas are on their way while training goes on."""
        return self._deltas is not None and self._deltas.outstanding

    def departures(self, step: int) -> list[int]:
        """What leaves after `step` steps."""
        if self._deltas is not None:
            return self._agenda.departures(step)
        return [0] if step > 0 and self._agenda.scope(step) is not None else []

    def drift(self) -> None:
        """A step has been made."""
        if self._deltas is not None:
            self._deltas.drift()

    # One exchange

    def weigh(self, weights: Mapping[int, float]) -> None:
        """How much this worker counts in the next exchanges, by fragment."""
        self._weights = weights

    @torch.no_grad()
    def exchange(self, step: int, due: Sequence[int], confirm: Callable[[], None]) -> None:
        """Send what is due and complete what is outstanding; `confirm` is called before anything is written, and may raise."""
        if self._deltas is None:
            if due:
                self._average(step, confirm)
            return
        self._deltas.weights = self._weights
        self._deltas.confirm = lambda fragments: self._confirm(fragments, confirm)
        arrived = self._deltas.advance(step, due)
        present = arrived.get(self._agenda.last_fragment)
        if present is not None:
            self._end_period(step, max(present.rates, default=None))

    def _average(self, step: int, confirm: Callable[[], None]) -> None:
        mine = ParameterAverager(self._parameters, self.ledger).exchange(self._group, weight=self._weights.get(0, 1.0))
        buffers = self._exchange_buffers()
        confirm()
        mine()
        buffers()
        self._end_period(step, None)

    def _confirm(self, arrived: Sequence[int], confirm: Callable[[], None]) -> None:
        buffers = self._exchange_buffers() if self._agenda.last_fragment in arrived else _nothing
        confirm()
        buffers()

    def _exchange_buffers(self) -> Callable[[], None]:
        buffers = dict(self._module.named_buffers())
        if not buffers or self._averaging.buffers != "average":
            return _nothing
        return ParameterAverager(buffers, self.ledger).exchange(self._group, weight=self._weights.get(0, 1.0))

    def _end_period(self, step: int, rate: float | None) -> None:
        self._agenda.synced(step, rate)
        assert isinstance(self._averaging.moments, str), "attach has checked it"
        self._moments.treat(self._averaging.moments, self._group)

    def mark(self) -> None:
        """What has been exchanged by now stays exchanged."""
        self._mark = self._deltas.exchanges() if self._deltas else []

    def undo(self) -> list[int]:
        """What was exchanged since came to nothing, for all workers; fragments whose deltas were outstanding."""
        return self._deltas.undo(self._mark) if self._deltas else []

    # Residuals

    def residuals(self) -> dict[str, Tensor]:
        """What error feedback holds, by parameter."""
        memory = self._deltas.memory if self._deltas else {}
        return {f"residual/{name}": slot[RESIDUAL] for name, slot in memory.items() if RESIDUAL in slot}

    @property
    def has_residuals(self) -> bool:
        """Whether the strategy keeps any; the same on all workers."""
        deltas = self._averaging.deltas
        return deltas is not None and RESIDUAL in deltas.reducer.all_memory()

    def residual_norm(self) -> float:
        """Of all of them."""
        return norm(list(self.residuals().values())) if self.has_residuals else 0.0

    def forget_residuals(self) -> None:
        """They are of a state that is no more."""
        for residual in self.residuals().values():
            residual.zero_()

    @torch.no_grad()
    def inherit(self, residuals: Mapping[str, Tensor]) -> None:
        """Those of a worker that leaves are added to this one's."""
        assert self._deltas is not None
        for name, residual in residuals.items():
            slot = self._deltas.memory[name.removeprefix("residual/")]
            if RESIDUAL in slot:
                slot[RESIDUAL].add_(residual.to(slot[RESIDUAL].device))
            else:
                slot[RESIDUAL] = residual.clone()

    def residual_looks(self, name: str) -> Looks | None:
        """What a residual of that name must look like."""
        anchor = self._deltas.anchors.by_name.get(name.removeprefix("residual/")) if self._deltas else None
        return None if anchor is None else ((*FLOATS, torch.bfloat16), [list(anchor.shape)])

    # A peer's state

    def _held(self) -> list[tuple[str, str, Tensor]]:
        parameters = [("parameter", name, local(parameter)) for name, parameter in self._parameters.items()]
        return [*parameters, *(("buffer", name, buffer) for name, buffer in self._module.named_buffers())]

    def state(self, step: int) -> State:
        """Everything that a worker needs to go on from here, but for what is this one's own: moments and residuals."""
        tensors = {f"{kind}/{name}": tensor for kind, name, tensor in self._held()}
        facts: dict[str, Any] = {"step": step, "last": self._agenda.last, "rate": self._agenda.rate}
        if self._deltas is not None:
            plain = self._deltas.state()
            tensors |= {f"anchor/{name}": anchor for name, anchor in plain["anchors"].items()}
            memory = [(name, key, value) for name, known in plain["outer"].items() for key, value in known.items()]
            tensors |= {f"outer/{name}/{key}": value for name, key, value in memory if isinstance(value, Tensor)}
            numbers = [[name, key, value] for name, key, value in memory if not isinstance(value, Tensor)]
            kept = {key: plain[key] for key in ("exchanges", "norms", "skipped")}
            facts["deltas"] = {**kept, "outer_groups": plain["outer_groups"], "outer": numbers}
        return State(facts, tensors)

    def looks_of(self, name: str) -> Looks | None:
        """What a tensor of that name in a peer's state must look like; None: there is no such tensor."""
        kind, _, rest = name.partition("/")
        if kind in ("parameter", "buffer"):
            found = {f"{what}/{called}": tensor for what, called, tensor in self._held()}.get(name)
            return None if found is None else ((found.dtype,), [list(found.shape)])
        known = self._deltas.anchors.by_name if self._deltas else {}
        if kind == "anchor" and rest in known:
            return (known[rest].dtype,), [list(known[rest].shape)]
        owner = rest.rpartition("/")[0]
        if kind == "outer" and owner in known:
            return FLOATS, [list(known[owner].shape), []]
        return None

    @torch.no_grad()
    def adopt(self, state: State, *, carry: bool, sent: Mapping[str, Tensor] | None) -> int:
        """Go on from a peer's state; with `carry`, what this worker has learnt since is added. Returns the step.

        `sent` are the parameters at a sync that the others have committed: what was learnt before it is in their state.
        """
        missing = [f"{kind}/{name}" for kind, name, _ in self._held() if f"{kind}/{name}" not in state.tensors]
        step, last = state.facts.get("step"), state.facts.get("last")
        if missing or not isinstance(step, int) or not isinstance(last, int):
            raise HealingError(f"a peer's state lacks {', '.join(missing[:3]) or 'its clock'}; nothing of it is taken")
        learnt: dict[str, Tensor] = {}
        if carry and self._deltas is not None:
            before = sent or self._deltas.anchors.by_name
            learnt = {name: local(p).detach() - before[name].to(p.device) for name, p in self._parameters.items()}
        if self._deltas is not None:
            self._load_deltas(self._deltas, state, step)
        self._agenda.synced(last, state.facts.get("rate"))
        for kind, name, tensor in self._held():
            tensor.copy_(state.tensors[f"{kind}/{name}"])
        if self._deltas is not None:
            for name, parameter in self._parameters.items():
                there = self._deltas.anchors[name].to(parameter.device)
                local(parameter).copy_(there if name not in learnt else there + learnt[name])
        return step

    def _load_deltas(self, deltas: DeltaAverager, state: State, step: int) -> None:
        facts = state.facts.get("deltas")
        wanted = {f"anchor/{name}" for name in deltas.anchors.by_name}
        if not isinstance(facts, dict) or not wanted <= set(state.tensors):
            raise HealingError("a peer's state lacks anchors; nothing of it is taken")
        outer: dict[str, dict[str, Any]] = {name: {} for name in deltas.anchors.by_name}
        for place, tensor in state.tensors.items():
            if place.startswith("outer/"):
                name, _, key = place.removeprefix("outer/").rpartition("/")
                outer[name][key] = tensor
        for name, key, value in facts["outer"]:
            outer[name][key] = value
        memory = {name: dict(slot) for name, slot in deltas.memory.items()}  # residuals stay this worker's own
        anchors = {name: state.tensors[f"anchor/{name}"] for name in deltas.anchors.by_name}
        plain = {"anchors": anchors, "outer": outer, "memory": memory, "clean": [], "outstanding": []}
        deltas.load({**facts, **plain}, step)

    def snapshot(self) -> dict[str, Tensor]:
        """The parameters as they are now; nothing where they are averaged themselves, and no delta is known."""
        return {name: local(p).detach().clone() for name, p in self._parameters.items()} if self._deltas else {}


def _nothing() -> None:
    """Nothing to write."""
