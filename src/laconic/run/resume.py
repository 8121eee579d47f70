"""Going on where a state was taken: by the same strategy, or by another one."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from laconic.ranks.agreement import agree
from laconic.run.arguments import check_route, check_sharded
from laconic.run.engine import Engine
from laconic.run.state import (
    VERSION,
    check_tensors,
    checked,
    is_for_all,
    kept_of,
    replicated,
    tied_to_strategy,
    upgraded,
    without_averaging,
)
from laconic.run.switch import switch_to
from laconic.strategies.parsing import saved
from laconic.strategies.strategy import Strategy


def state_of(engine: Engine) -> dict[str, Any]:
    """This rank's communication state, as plain data."""
    if engine.hook is not None:
        engine.hook.settle()
    local = engine.local.state()
    check_tensors(engine.memory)
    check_tensors((local["deltas"] or {}).get("memory", {}))
    advised = {} if engine.advised_by is None else {"advised_by": str(engine.advised_by)}
    return {
        "version": VERSION,
        "rank": engine.group.rank,
        "world": engine.group.world,
        "kept": kept_of(engine.memory, local["deltas"]),
        "strategy": str(engine.strategy),
        **advised,
        "step": engine.clock.step,
        "ahead": engine.clock.ahead,
        "exchanges": engine.hook.exchanges if engine.hook else 0,
        "counts": engine.counter.saved.state(),
        "order": engine.order.known(engine.hook.layout()) if engine.order and engine.hook else None,
        "local": local,
        "second_moment": engine.second_moment.state(),
        "whose": dict(engine.whose),
        "memory": {name: dict(slot) for name, slot in engine.memory.items() if slot},
    }


def respelt(engine: Engine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state in today's words and as this rank's, with the text that its strategy has today.

    What one rank has saved is every rank's, if no rank has anything of its own in it.

    Texts of the same strategy may differ: a class of the user's own was written `Name(...)` before it had a place, arguments
    that are as by default were left out once, and ranks may have written the same in other words.
    """
    state = upgraded(state)
    another = state.get("rank") in set(range(engine.group.world)) - {engine.group.rank}
    another = another and state.get("world") == engine.group.world
    shards = engine.place.sharding is not None and bool(state.get("memory"))  # what ranks share, they share by shard
    if another and not shards and is_for_all(state):
        state = replicated(state, engine.group.rank)
    try:
        former = saved(str(state.get("strategy")))
    except ValueError:
        return state  # to be refused, unless it is the text of what is attached
    return {**state, "strategy": str(engine.strategy if former == engine.strategy else former)}


def _is_text_of(strategy: Strategy, text: object) -> bool:
    try:
        return saved(str(text)) == strategy
    except ValueError:
        return False


def is_of_this_auto(engine: Engine, state: Mapping[str, Any]) -> bool:
    """Whether both leave their strategy to the advisor by the same words.

    Then the run goes on by the strategy that the state has: the one that was chosen, or none yet.
    """
    by = engine.advised_by
    return by is not None and _is_text_of(by, state.get("advised_by")) and _fits(engine, str(state.get("strategy")))


def check_state(engine: Engine, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Raise if `load_state` would; nothing is changed."""
    engine.require_live("load_state_dict")
    chosen, state = str(engine.strategy), respelt(engine, state)
    former = chosen if strict and not is_of_this_auto(engine, state) else str(state.get("strategy"))
    checked(state, former, engine.group.rank, engine.parameters, engine.memory)
    if former != chosen:
        saved(former)  # says what is wrong with it


def load_state(engine: Engine, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Go on where `state` was taken; all ranks together. Nothing is changed if it doesn't fit."""
    check_state(engine, state, strict=strict)
    state = respelt(engine, state)
    former, wanted = str(state["strategy"]), engine.strategy
    if former == str(wanted):
        _load(engine, state)
        return
    if is_of_this_auto(engine, state):
        _load_chosen(engine, state, former)
        return
    unused = tied_to_strategy(state)
    if _fits(engine, former):
        switch_to(engine, saved(former), equal=True)  # as good as: what differs is about to be overwritten
        _load(engine, state)
        agree([f"strategy {wanted.compared}", f"step {engine.clock.step}"], None, engine.group, engine.device)
        with engine.during(f"going over to {wanted}"):
            switch_to(engine, wanted)
    else:
        _load(engine, without_averaging(state, str(wanted)))
        engine.second_moment.release()
        engine.begin_step()
        engine.local.drift()
        with engine.during("making replicas equal"):
            if engine.agree_on_drift():
                engine.local.equalise(engine.counter.training)
        unused += ["residuals of deltas"] if state["local"]["deltas"] is not None else []
    warnings.warn(
        f"the state is of {former}, and the run goes on by {wanted}: clock and residuals are taken over"
        + (f"; not used: {', '.join(unused)}" if unused else ""),
        stacklevel=3,
    )


def _load_chosen(engine: Engine, state: Mapping[str, Any], former: str) -> None:
    """Go on by the strategy of the state: the advisor chose it then, or had not chosen yet."""
    agree([f"state of {saved(former).compared}"], None, engine.group, engine.device)
    with engine.during(f"going on by {former}"):
        switch_to(engine, saved(former), equal=True)  # as good as: what differs is about to be overwritten
        _load(engine, state)
    engine.advice = None
    if engine.strategy.advised is None and engine.group.rank == 0:
        print(  # noqa: T201  # as the choice itself is told
            f"laconic: {engine.advised_by} goes on by {former}, which the state of step {engine.step} has; nothing is probed",
            file=sys.stderr,
            flush=True,
        )


def begin_at(engine: Engine, step: int) -> None:
    """Go on after `step` steps from the first rank's model, of which nothing else is known; all ranks together."""
    engine.require_live("begin_at")
    engine.adopt_first()
    for slot in engine.memory.values():
        slot.clear()
    engine.clock.set(step, [0] * len(engine.clock.ahead))
    switch_to(engine, engine.strategy, equal=True)


def _load(engine: Engine, state: Mapping[str, Any]) -> None:
    found = checked(state, str(engine.strategy), engine.group.rank, engine.parameters, engine.memory)
    devices = {name: parameter.device for name, parameter in engine.module.named_parameters()}
    for name, slot in engine.memory.items():
        slot.clear()
        slot.update({key: value.detach().to(devices[name], copy=True) for key, value in found.memory.get(name, {}).items()})
    engine.clock.set(found.step, found.ahead)
    engine.counter.load(found.counts)
    engine.whose = {**found.whose, **engine.whose}
    engine.local.load(found.local, found.step)
    engine.second_moment.load(found.second_moment)
    if engine.hook is not None:
        engine.hook.exchanges = found.exchanges
        engine.hook.use(engine.residuals.released_by(engine.strategy.reducer), engine.replicas)
    if engine.order is not None and found.order:
        engine.order.take_over(found.order)
    engine.begin_step()


def _fits(engine: Engine, former: str) -> bool:
    """Whether this world can go by it."""
    try:
        strategy = saved(former)
        check_route(strategy, engine.place, engine.replicas.world)
        check_sharded(strategy, engine.optimizers)
    except ValueError:
        return False
    return True
