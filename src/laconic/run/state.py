"""What a run saves: plain data, checked before any of it is used."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from laconic.comm.bucket import RESIDUAL
from laconic.comm.flat_tensors import local
from laconic.kernels.kernel import Kernel
from laconic.reducers.base import Memory
from laconic.run.stats import Counts
from laconic.strategies.parsing import saved
from laconic.strategies.strategy import Strategy

VERSION = 5


class State(NamedTuple):
    """One rank's communication state."""

    step: int
    ahead: list[int]  # steps that optimizers have made beyond the clock's
    exchanges: int  # of all gradients
    order: list[str] | None  # in which DDP's first backward made gradients ready
    memory: dict[str, dict[str, Tensor]]  # of the gradients' reducer, by parameter name
    local: dict[str, Any]  # what averaging between steps keeps
    counts: Counts  # of the run until then; none, in a state of before there were any
    whose: dict[str, Memory]  # whose each key of the reducers' memory is, as the reducers declared it
    second_moment: dict[str, Any]  # when all ranks last averaged gradients


def upgraded(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of an earlier version, in today's words; anything else as it is."""
    if state.get("version") != 4:
        return state
    try:
        local, deltas = dict(state["local"]), state["local"]["deltas"]
        if deltas is not None:
            renamed = {"rounds": "exchanges", "air": "outstanding"}
            local["deltas"] = {"outer_groups": [], **{renamed.get(key, key): value for key, value in deltas.items()}}
        kept = [name.replace("in the air: ", "outstanding: ") for name in state["kept"]]
        slots = [*state["memory"].values(), *(deltas["memory"].values() if deltas is not None else ())]
        whose = {key: "shared" for slot in slots for key in slot if key != RESIDUAL}
        new = {**state, "version": VERSION, "exchanges": state["rounds"], "local": local, "kept": kept, "whose": whose}
        if "counts" in state:
            new["counts"] = {**state["counts"], "background_bytes": state["counts"]["aside_bytes"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the state is damaged: {type(error).__name__}: {error}") from error
    return {key: value for key, value in new.items() if key != "rounds"}


def checked(
    state: Mapping[str, Any], strategy: str, rank: int, parameters: Mapping[str, Tensor], known: Container[str]
) -> State:
    """The state that a `state_dict` holds, or an error that says why it can't be used here."""
    version = state.get("version")
    if version != VERSION:
        raise ValueError(f"can read state of versions 4 and {VERSION}, got {version!r}; is it a laconic run's state_dict?")
    try:
        text, step, exchanges = str(state["strategy"]), int(state["step"]), int(state["exchanges"])
        ahead = [int(count) for count in state["ahead"]]
        order = None if state["order"] is None else [str(name) for name in state["order"]]
        memory = {name: dict(slot) for name, slot in state["memory"].items()}
        between = {key: state["local"][key] for key in ("syncs", "skipped", "last", "rate", "drifted", "deltas")}
        counts = Counts.load(state["counts"]) if "counts" in state else Counts()
        promised, kept = list(state["kept"]), kept_of(memory, between["deltas"])
        whose = {str(key): _checked_owner(value) for key, value in state["whose"].items()}
        last = state.get("second_moment", {"last": None})["last"]  # a state from before there was one has none
        second = {"last": None if last is None else int(last)}
        if between["deltas"] is not None:
            _check_deltas(between["deltas"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if state.get("rank") != rank:
        raise ValueError(
            f"this is the state of rank {state.get('rank')}, and here is rank {rank}: each rank has its own; "
            "in a torch.distributed.checkpoint, which keeps one for all, save laconic.checkpoint.RankState(run)"
        )
    if sorted(kept) != sorted(promised):
        raise ValueError(
            f"of {len(promised)} tensors that this rank kept, {len(kept)} are here; a torch.distributed.checkpoint "
            "loads only what it finds a place for: save laconic.checkpoint.RankState(run)"
        )
    if text != strategy:
        raise ValueError(f"the state is of the strategy {text}, attached is {strategy}")
    check_tensors(memory)
    check_tensors((between["deltas"] or {}).get("memory", {}))
    for name in memory:
        if name not in known:
            raise ValueError(f"the state has memory of a parameter {name!r} that this model doesn't have")
    for name, parameter in parameters.items() if between["deltas"] is not None else ():
        anchor = between["deltas"]["anchors"].get(name)
        wanted = local(parameter).shape
        if not isinstance(anchor, Tensor) or anchor.shape != wanted:
            found = f"one of shape {tuple(anchor.shape)}" if isinstance(anchor, Tensor) else "none; was it frozen then?"
            raise ValueError(f"{name!r} needs an anchor of shape {tuple(wanted)}, and the state has {found}")
    return State(step, ahead, exchanges, order, memory, between, counts, whose, second)


def check_tensors(memory: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse memory that could not be read back."""
    for name, slot in memory.items():
        for key, value in slot.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"a reducer's memory must be tensors, and {key!r} of {name!r} is {value!r:.60}")


def kept_of(memory: Mapping[str, Mapping[str, Tensor]], deltas: Mapping[str, Any] | None) -> list[str]:
    """The names of all that a rank keeps for itself: a state that has lost some of it is not the same run's."""
    found = [f"{name}: {key}" for name, slot in memory.items() for key in slot]
    if deltas is not None:
        found += [f"delta of {name}: {key}" for name, slot in deltas["memory"].items() for key in slot]
        found += [f"outstanding: {name}" for entry in deltas["outstanding"] for name in entry["deltas"]]
    return found


def memory_of(strategy: Strategy) -> dict[str, Memory]:
    """Whose each key of a strategy's memory is, as its reducers declare it."""
    deltas = strategy.averaging.deltas if strategy.averaging else None
    return {**strategy.reducer.all_memory(), **(deltas.reducer.all_memory() if deltas else {})}


def kernels_of(strategy: Strategy) -> list[Kernel]:
    """What a strategy's reducers can have compiled."""
    deltas = strategy.averaging.deltas if strategy.averaging else None
    return [*strategy.reducer.kernels(), *(deltas.reducer.kernels() if deltas else [])]


def declared(state: Mapping[str, Any]) -> dict[str, Memory]:
    """What a state says of its memory; and what its strategy's reducers say today, which may have learnt to since."""
    try:
        today = memory_of(saved(str(state["strategy"])))
    except ValueError:  # a class of another process
        today = {}
    return {**state["whose"], **today, RESIDUAL: "own"}


def owner(key: str, whose: Mapping[str, Memory], strategy: str) -> Memory:
    """Whose the memory of this key is, or an error where no reducer says so."""
    if key not in whose:
        raise ValueError(
            f"a reducer of {strategy}, or of a strategy before it, remembers {key!r} and doesn't declare whose that is, so "
            f"other ranks can't be given it; put memory = {{{key!r}: 'own'}} into its class if each rank has another one, or "
            "'shared' if all have the same"
        )
    return whose[key]


def tied_to_strategy(state: Mapping[str, Any]) -> list[str]:
    """What another strategy can't use of a state."""
    found = ["the anchors", "the outer optimizer's memory"] if state["local"]["deltas"] is not None else []
    memory = [state["memory"], (state["local"]["deltas"] or {}).get("memory", {})]
    keys = {key for slots in memory for slot in slots.values() for key in slot if key != RESIDUAL}
    return found + [f"{key!r} of its compressor" for key in sorted(keys)]


def without_averaging(state: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """A state as another strategy can load it that averages in groups of its own."""
    local = {**state["local"], "rate": None, "deltas": None}
    return {**state, "strategy": strategy, "local": local, "kept": kept_of(state["memory"], None)}


def is_for_all(state: Mapping[str, Any]) -> bool:
    """Whether every rank of the run had this same state: gradients alone are averaged, and none keeps anything of its own."""
    memory, between = state.get("memory"), state.get("local")
    if not isinstance(memory, Mapping) or not isinstance(between, Mapping) or between.get("deltas") is not None:
        return False
    try:
        strategy, text, whose = saved(str(state.get("strategy"))), str(state.get("strategy")), declared(state)
        own = "own" in memory_of(strategy).values() or any(
            owner(key, whose, text) != "shared" for slot in memory.values() for key in slot
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False  # it is damaged, and `checked` says how
    return strategy.averaging is None and not between.get("drifted") and not own


def replicated(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What another rank's state has that holds for all: its residuals are its own, and its replica is the common one now."""
    state = upgraded(state)
    text, whose = str(state["strategy"]), declared(state)

    def shared(memory: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: value for key, value in slot.items() if owner(key, whose, text) == "shared"}
            for name, slot in memory.items()
        }

    memory, local, deltas = shared(state["memory"]), dict(state["local"]), state["local"]["deltas"]
    local["drifted"] = False
    if deltas is not None:
        local["deltas"] = {**deltas, "memory": shared(deltas["memory"])}
    return {**state, "rank": rank, "memory": memory, "kept": kept_of(memory, local["deltas"]), "local": local}


def _checked_owner(value: object) -> Memory:
    if value == "own":
        return "own"
    if value == "shared":
        return "shared"
    raise ValueError(f"memory is 'own' or 'shared', got {value!r}")


def _check_deltas(deltas: Mapping[str, Any]) -> None:
    wanted = ("anchors", "outer", "outer_groups", "memory", "exchanges", "norms", "skipped", "clean", "outstanding")
    missing = [key for key in wanted if key not in deltas]
    if missing:
        raise ValueError(f"deltas without {missing[0]!r}")
