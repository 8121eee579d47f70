"""What there is, from the docstrings."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from typing import Any

from laconic.reducers import discover
from laconic.reducers.base import Reducer
from laconic.strategies.naming import own
from laconic.strategies.outer import Outer
from laconic.strategies.parsing import nearest, strategy
from laconic.strategies.recipe import recipes
from laconic.strategies.schedules import Schedule
from laconic.strategies.strategy import render


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


def named(names: Iterable[str]) -> dict[str, list[Entry]]:
    """Of these alone, all that their docstrings say, but for the examples."""
    things = {**recipes(), **discover(), **own()}
    found = []
    for text in names:
        name, _, arguments = text.partition("(")
        if name not in things:
            raise ValueError(f"laconic has no {name!r}{nearest(name, things)}")
        if arguments.strip() not in ("", ")"):
            _check(text, things[name])
        told = (inspect.getdoc(things[name]) or "").partition("\n>>>")[0].strip()
        found.append(Entry(f"{name}{_signature(things[name])}", told.split("\n")))
    return {"What they do": found}


def _check(text: str, thing: object) -> None:
    """Refuse wrong arguments as `laconic compare` does; a part is read where it goes in a strategy."""
    places = {Reducer: "ddp(reducer={})", Schedule: "local_sgd({})", Outer: "diloco(16, outer={})"}
    found = next((place for base, place in places.items() if isinstance(thing, type) and issubclass(thing, base)), "{}")
    strategy(found.format(text))


def _parts(base: type) -> list[Entry]:
    return [_entry(name, kind) for name, kind in own().items() if issubclass(kind, base)]


def _entry(name: str, thing: object) -> Entry:
    text = inspect.getdoc(thing) or ""
    facts = re.findall(r"((?:Bytes|Paper): .*?)(?=(?:\s\s(?:Memory|Paper|Bytes):)|\n\n|\n[A-Z>]|$)", text, re.DOTALL)
    first = re.split(r"\s(?:Bytes|Memory|Paper): ", text.split("\n")[0])[0]
    return Entry(f"{name}{_signature(thing)}", [first, *(" ".join(fact.split()) for fact in facts)])


def _signature(thing: object) -> str:
    """As it is called, with defaults as texts have them."""
    assert callable(thing)
    made: dict[str, Any] = {name: f.default_factory for name, f in getattr(thing, "__dataclass_fields__", {}).items()}
    parts = []
    for parameter in inspect.signature(thing).parameters.values():
        factory, default = made.get(parameter.name, MISSING), parameter.default
        if factory is not MISSING:
            default = factory()
        parts.append(parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={render(default)}")
    return f"({', '.join(parts)})"
