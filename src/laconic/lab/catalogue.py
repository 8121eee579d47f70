"""What there is, from the docstrings."""

import inspect
import re
from dataclasses import dataclass

from laconic.reducers import discover
from laconic.strategies.naming import own
from laconic.strategies.outer import Outer
from laconic.strategies.recipe import recipes
from laconic.strategies.schedules import Schedule


@dataclass(frozen=True)
class Entry:
    """A strategy, a reducer, a schedule or an outer optimizer."""

    call: str
    lines: list[str]  # what it does, its bytes, its paper


def entries() -> dict[str, list[Entry]]:
    """By heading."""
    return {
        "Strategies": [_entry(name, recipe) for name, recipe in recipes().items()],
        "Reducers": [_entry(name, kind) for name, kind in discover().items()],
        "Schedules": _parts(Schedule),
        "Outer optimizers": _parts(Outer),
    }


def _parts(base: type) -> list[Entry]:
    return [_entry(name, kind) for name, kind in own().items() if issubclass(kind, base)]


def _entry(name: str, thing: object) -> Entry:
    text = inspect.getdoc(thing) or ""
    facts = re.findall(r"((?:Bytes|Paper): .*?)(?=(?:\s\s(?:Memory|Paper|Bytes):)|\n\n|\n[A-Z>]|$)", text, re.DOTALL)
    return Entry(f"{name}{_signature(thing)}", [text.split("\n")[0], *(" ".join(fact.split()) for fact in facts)])


def _signature(thing: object) -> str:
    assert callable(thing)
    parts = [
        parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(thing).parameters.values()
    ]
    return f"({', '.join(parts)})"
