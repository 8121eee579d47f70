"""What a peer says of its run, in numbers and words, checked before any of it is used."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from laconic.elastic.healing import HealingError

LARGEST = 1 << 48  # of a count of steps or syncs


def check_facts(facts: object, deltas: Mapping[str, Any] | None) -> None:
    """Raise an error that says what is wrong; `deltas` is the state of this worker's own, where it sends deltas."""
    told = _mapping(facts, "a description")
    _count(told.get("step"), "the step")
    _count(told.get("last"), "the step of the last sync")
    if told.get("rate") is not None:
        _number(told["rate"], "the learning rate")
    if deltas is None:
        return
    theirs = _mapping(told.get("deltas"), "what it knows of deltas")
    fragments = len(deltas["exchanges"])
    for each in _list(theirs.get("exchanges"), fragments, "the exchanges of each fragment"):
        _count(each, "the exchanges of a fragment")
    for norms in _list(theirs.get("norms"), fragments, "the norms of each fragment"):
        for norm in _list(norms, None, "the norms of a fragment"):
            _number(norm, "a norm")
    _count(theirs.get("skipped"), "the syncs that were skipped")
    groups = _list(theirs.get("outer_groups"), len(deltas["outer_groups"]), "the outer optimizer's groups")
    for group, mine in zip(groups, deltas["outer_groups"], strict=True):
        _alike(_mapping(group, "a group of the outer optimizer"), mine)
    for entry in _list(theirs.get("outer"), None, "the outer optimizer's numbers"):
        _check_entry(entry, deltas["outer"])


def _alike(group: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """The same settings of the same kinds."""
    if group.keys() != mine.keys():
        raise _refusal("a group of the outer optimizer", f"the keys {', '.join(mine)}", list(group))
    for key, value in group.items():
        numbers = isinstance(value, int | float) and isinstance(mine[key], int | float)
        if isinstance(value, list | dict) or not (numbers or isinstance(value, type(mine[key]))):
            raise _refusal(f"{key} of the outer optimizer", f"a {type(mine[key]).__name__}", value)
        if numbers and key != "lr":
            _number(value, f"{key} of the outer optimizer")


def _check_entry(entry: object, known: Mapping[str, Any]) -> None:
    parts = _list(entry, 3, "an entry of the outer optimizer")
    name, key, value = parts
    if not isinstance(name, str) or name not in known or not isinstance(key, str) or not isinstance(value, int | float):
        raise _refusal("an entry of the outer optimizer", "a known parameter, a name and a number", parts)
    _number(value, f"the outer {key} of {name}")


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(what, "a mapping", value)
    return value


def _list(value: object, length: int | None, what: str) -> Sequence[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise _refusal(what, "a list" if length is None else f"a list of {length}", value)
    return value


def _count(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise _refusal(what, "a count", value)


def _number(value: object, what: str) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _refusal(what, "a finite number", value)


def _refusal(what: str, wanted: str, got: object) -> HealingError:
    return HealingError(f"a peer sent as {what} {got!r:.60}, where {wanted} belongs; nothing of it is taken")
