"""What there is, from the docstrings."""

import inspect
import re
from dataclasses import dataclass

import laconic.recipes
from laconic.recipes.registry import RECIPES
from laconic.reducers import discover


@dataclass(frozen=True)
class Entry:
    """A strategy or a reducer."""

    call: str
    lines: list[str]  # what it does, its bytes, its paper


def entries() -> dict[str, list[Entry]]:
    """By heading."""
    return {
        "Strategies": [_entry(name, getattr(laconic.recipes, name, recipe)) for name, recipe in RECIPES.items()],
        "Reducers": [_entry(name, kind) for name, kind in discover().items()],
    }


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
