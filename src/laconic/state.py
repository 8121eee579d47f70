"""What a run saves: plain data, checked before any of it is used."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from torch import Tensor

VERSION = 1


class State(NamedTuple):
    """One rank's communication state."""

    step: int
    rounds: int
    drifted: bool
    memory: dict[str, dict[str, Tensor]]  # by parameter name


def checked(state: Mapping[str, Any], strategy: str, parameters: Container[str]) -> State:
    """The state that a `state_dict` holds, or an error that says why it can't be used here."""
    version = state.get("version")
    if version != VERSION:
        raise ValueError(f"can read state of version {VERSION}, got {version!r}; is it a laconic run's state_dict?")
    try:
        text, step, rounds = str(state["strategy"]), int(state["step"]), int(state["rounds"])
        memory = {name: dict(slot) for name, slot in state["memory"].items()}
        drifted = bool(state["drifted"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if text != strategy:
        raise ValueError(f"the state is of the strategy {text}, attached is {strategy}")
    for name, slot in memory.items():
        if name not in parameters:
            raise ValueError(f"the state has memory of a parameter {name!r} that this model doesn't have")
        if not all(isinstance(value, Tensor) for value in slot.values()):
            raise ValueError(f"the memory of {name!r} must be tensors")
    return State(step, rounds, drifted, memory)
