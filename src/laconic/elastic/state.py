"""Where a run is: what a worker that joins, or has missed a sync, needs of one that has not, and how it goes on from there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.flat_tensors import local
from laconic.elastic.facts import Known, check_facts
from laconic.elastic.healing import HealingError, Looks, State
from laconic.elastic.optimizer_memory import KIND as MOMENT
from laconic.elastic.parts import FLOATS, Parts
from laconic.local.delta_averaging import DeltaAverager


def state_of(parts: Parts, step: int, *, first: bool) -> State:
    """Everything that a worker needs to go on from here, but for what is this one's own: residuals.

    With `first`, for a worker that has just come: with what is not trained, and what the optimizers remember.
    """
    held = {**parts.held(), **(parts.untrained() if first else {})}
    # Where deltas are sent, parameters begin at their anchors.
    tensors = {name: one for name, one in held.items() if parts.deltas is None or not name.startswith("parameter/")}
    facts: dict[str, Any] = {"step": step, "last": parts.agenda.last, "rate": parts.agenda.rate}
    if parts.deltas is not None:
        plain = parts.deltas.state()
        tensors |= {f"anchor/{name}": anchor for name, anchor in plain["anchors"].items()}
        memory = [(name, key, value) for name, known in plain["outer"].items() for key, value in known.items()]
        tensors |= {f"outer/{name}/{key}": value for name, key, value in memory if isinstance(value, Tensor)}
        numbers = [[name, key, value] for name, key, value in memory if not isinstance(value, Tensor)]
        for name, slot in parts.deltas.memory.items():  # that all workers have alike, such as PowerSGD's factors
            tensors |= {f"memory/{name}/{key}": slot[key] for key in parts.shared if key in slot}
        kept = {key: plain[key] for key in ("exchanges", "norms", "skipped")}
        facts["deltas"] = {**kept, "outer_groups": _plain(plain["outer_groups"]), "outer": numbers}
    if first and parts.optimizer_memory is not None:
        moments, facts["moments"] = parts.optimizer_memory.held(parts.parameters)
        tensors |= {f"{MOMENT}/{place}": tensor for place, tensor in moments.items()}
    return State(facts, tensors)


def looks_of(parts: Parts) -> Callable[[str], Looks | None]:
    """What a tensor of a name in a peer's state must look like; None: there is no such tensor."""
    held = {**parts.held(), **parts.untrained()}
    anchors = parts.deltas.anchors if parts.deltas else None

    def looks(name: str) -> Looks | None:
        if name in held:
            # Nobody trains buffers: infinities in them are the model's own.
            return Looks((held[name].dtype,), list(held[name].shape), infinite=not name.startswith("parameter/"))
        kind, _, rest = name.partition("/")
        if kind == MOMENT and parts.optimizer_memory is not None:
            return parts.optimizer_memory.looks(rest)
        if anchors is None:
            return None
        if kind == "anchor" and rest in anchors.by_name:
            return Looks((anchors[rest].dtype,), list(anchors[rest].shape))
        owner, _, key = rest.rpartition("/")
        if owner not in anchors.by_name:
            return None
        if kind == "outer":
            like = anchors.memory_like(owner).get(key)
            return Looks((like.dtype,), list(like.shape)) if isinstance(like, Tensor) else None
        if kind == "memory" and key in parts.shared:
            return Looks(FLOATS, None)  # of any shape: a reducer's own matter
        return None

    return looks


def check(parts: Parts, state: State, *, first: bool) -> None:
    """Refuse what can't be adopted; nothing has been written then."""
    needed = [*_needed(parts), *(parts.untrained() if first else [])]
    lacking = [name for name in needed if name not in state.tensors]
    if lacking:
        raise HealingError(f"{state.who} sent a state that lacks {', '.join(lacking[:3])}; nothing of it is taken")
    known = None
    if parts.deltas is not None:
        anchors = parts.deltas.anchors
        known = Known(len(parts.deltas.fragments), _plain(anchors.state()["outer_groups"]), anchors.memory_like)
    check_facts(state.facts, known, state.who)
    if parts.deltas is not None:
        _check_memory(parts.deltas, state)
    if parts.optimizer_memory is not None:
        parts.optimizer_memory.check(_moments(state), state.facts.get("moments", []), state.who)


def _check_memory(deltas: DeltaAverager, state: State) -> None:
    """Of each anchor, all that the outer optimizer keeps, or, before its first step, nothing."""
    there: dict[str, set[str]] = {name: set() for name in deltas.anchors.by_name}
    for place in state.tensors:
        kind, _, rest = place.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "outer":
            there[name].add(key)
    for name, key, _ in state.facts["deltas"]["outer"]:
        there[name].add(key)
    for name, keys in there.items():
        lacking = sorted(set(deltas.anchors.memory_like(name)) - keys) if keys else []
        if lacking:
            raise HealingError(f"{state.who} sent an outer memory of {name} that lacks {lacking[0]}; nothing of it is taken")


@torch.no_grad()
def adopt(parts: Parts, state: State, *, carry: bool, sent: Mapping[str, Tensor] | None) -> int:
    """Go on from a peer's state, which has been checked; with `carry`, what this worker has learnt since is added.

    `sent` are the parameters at a sync that the others have committed: what was learnt before it is in their state.
    Returns the step.
    """
    facts = state.facts
    learnt: dict[str, Tensor] = {}
    if carry and parts.deltas is not None:
        before = {**parts.deltas.anchors.by_name, **(sent or {})}
        learnt = {name: local(p) - before[name].to(p.device) for name, p in parts.parameters.items()}
    parts.agenda.synced(facts["last"], facts.get("rate"))
    for name, tensor in {**parts.held(), **parts.untrained()}.items():
        if name in state.tensors:
            tensor.copy_(state.tensors[name])
    if parts.deltas is not None:
        parts.deltas.load(_loaded(parts, parts.deltas, facts["deltas"], state.tensors), facts["step"])
        for name, parameter in parts.parameters.items():
            there = parts.deltas.anchors[name].to(parameter.device)
            local(parameter).copy_(there if name not in learnt else there + learnt[name])
    if parts.optimizer_memory is not None and "moments" in facts:
        parts.optimizer_memory.forget(parts.parameters)
        parts.optimizer_memory.load(_moments(state), facts["moments"])
    step: int = facts["step"]
    return step


def _moments(state: State) -> dict[str, Tensor]:
    """What it has of the optimizers' memory, by place."""
    kind = f"{MOMENT}/"
    return {name.removeprefix(kind): tensor for name, tensor in state.tensors.items() if name.startswith(kind)}


def _needed(parts: Parts) -> list[str]:
    """What no peer's state may lack."""
    if parts.deltas is None:
        return list(parts.held())
    return [*(name for name in parts.held() if name.startswith("buffer/")), *map("anchor/{}".format, parts.parameters)]


def _loaded(parts: Parts, deltas: DeltaAverager, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a `DeltaAverager`, out of a peer's and of what is this worker's own."""
    outer: dict[str, dict[str, Any]] = {name: {} for name in deltas.anchors.by_name}
    memory = {name: {k: v for k, v in slot.items() if k not in parts.shared} for name, slot in deltas.memory.items()}
    for place, tensor in tensors.items():
        kind, _, rest = place.partition("/")
        name, _, key = rest.rpartition("/")
        if kind in ("outer", "memory"):
            (outer if kind == "outer" else memory)[name][key] = tensor
    for name, key, value in facts["outer"]:
        outer[name][key] = value
    anchors = {name: tensors[f"anchor/{name}"] for name in deltas.anchors.by_name}
    kept = {key: facts[key] for key in ("exchanges", "norms", "skipped", "outer_groups")}
    return {**kept, "anchors": anchors, "outer": outer, "memory": memory, "clean": [], "outstanding": []}


def _plain(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's groups in numbers that JSON knows."""
    return [{key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()} for group in groups]
