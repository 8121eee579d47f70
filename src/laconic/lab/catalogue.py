"""What there is, from the docstrings."""

import inspect
import re
from dataclasses import dataclass

import laconic.recipes
from laconic import schedules
from laconic.recipes.registry import RECIPES
from laconic.reducers import discover
from laconic.schedules import Schedule


@dataclass(frozen=True)
class Entry:
    """A strategy, a reducer or a schedule."""

    call: str
    lines: list[str]  # what it does, its bytes, its paper


def entries() -> dict[str, list[Entry]]:
    """By heading."""
    return {
        "Strategies": [_entry(name, getattr(laconic.recipes, name, recipe)) for name, recipe in RECIPES.items()],
        "Reducers": [_entry(name, kind) for name, kind in discover().items()],
        "Schedules": [_entry(name, kind) for name, kind in vars(schedules).items() if _is_schedule(kind)],
    }


def _is_schedule(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Schedule) and thing is not Schedule


def _entry(name: str, thing: object) -> Entry:
    text = inspect.getdoc(thing) or ""
    facts = re.findall(r"((?:Bytes|Paper): .*?)(?=(?:\s\s(?:Memory|Paper|Bytes):)|\n\n|\n[A-Z>]|$)", text, re.DOTALL)
    return Entry(f"{name}{_signature(thing)}", [text.split("\n")[0], *(" ".join(fact.split()) for fact in facts)])


def _signature(thing: object) -> str:
    assert callable(thing)
    parts = [
        parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.default is not None
    ]
    return f"({', '.join(parts)})"
