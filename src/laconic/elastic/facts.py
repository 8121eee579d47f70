"""What a peer says of its run, in numbers and words, checked before any of it is used."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from laconic.elastic.healing import HealingError

LARGEST = 1 << 48  # of a count of steps or syncs


class Known(NamedTuple):
    """What this worker has itself, where it sends deltas."""

    fragments: int
    groups: Sequence[Mapping[str, Any]]  # the outer optimizer's settings
    memory_of: Callable[[str], Mapping[str, object]]  # what the outer optimizer keeps of an anchor; KeyError: there is none


def check_facts(facts: object, known: Known | None, who: str) -> None:
    """Raise an error that says what is wrong with what `who` said."""
    _Check(who).facts(facts, known)


def is_number(value: object) -> bool:
    """Whether it is one to go on from."""
    return abs(value) <= LARGEST if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)


class _Check:
    """What one worker said."""

    def __init__(self, who: str) -> None:
        self._who = who

    def facts(self, facts: object, known: Known | None) -> None:
        told = self._mapping(facts, "a description")
        self._count(told.get("step"), "the step")
        self._count(told.get("last"), "the step of the last sync")
        if told.get("rate") is not None:
            self._number(told["rate"], "the learning rate")
        if known is not None:
            self._deltas(self._mapping(told.get("deltas"), "what it knows of deltas"), known)

    def _deltas(self, told: Mapping[str, Any], known: Known) -> None:
        for each in self._list(told.get("exchanges"), known.fragments, "the exchanges of each fragment"):
            self._count(each, "the exchanges of a fragment")
        for norms in self._list(told.get("norms"), known.fragments, "the norms of each fragment"):
            for norm in self._list(norms, None, "the norms of a fragment"):
                self._number(norm, "one of the norms")
        self._count(told.get("skipped"), "the syncs that were skipped")
        groups = self._list(told.get("outer_groups"), len(known.groups), "the outer optimizer's groups")
        for group, mine in zip(groups, known.groups, strict=True):
            self._alike(self._mapping(group, "a group of the outer optimizer"), mine)
        for entry in self._list(told.get("outer"), None, "the outer optimizer's numbers"):
            self._entry(entry, known)

    def _alike(self, group: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        """The same settings of the same kinds."""
        if group.keys() != mine.keys():
            self._refuse("a group of the outer optimizer", f"the keys {', '.join(mine)}", list(group))
        for key, value in group.items():
            numbers = isinstance(value, int | float) and isinstance(mine[key], int | float)
            if isinstance(value, list | dict) or not (numbers or isinstance(value, type(mine[key]))):
                self._refuse(f"{key} of the outer optimizer", f"a {type(mine[key]).__name__}", value)
            if numbers:
                self._number(value, f"{key} of the outer optimizer")

    def _entry(self, entry: object, known: Known) -> None:
        name, key, value = parts = self._list(entry, 3, "an entry of the outer optimizer")
        try:
            mine = known.memory_of(name) if isinstance(name, str) else {}
        except KeyError:
            mine = {}
        if not isinstance(key, str) or not isinstance(mine.get(key), int | float) or not isinstance(value, int | float):
            self._refuse("an entry of the outer optimizer", "a parameter, what is kept of it, and a number", parts)
        self._number(value, f"the outer {key} of {name}")

    def _mapping(self, value: object, what: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self._refuse(what, "a mapping", value)
        return value

    def _list(self, value: object, length: int | None, what: str) -> Sequence[Any]:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            self._refuse(what, "a list" if length is None else f"a list of {length}", value)
        return value

    def _count(self, value: object, what: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            self._refuse(what, "a count", value)

    def _number(self, value: object, what: str) -> None:
        if not is_number(value):
            self._refuse(what, "a finite number", value)

    def _refuse(self, what: str, wanted: str, got: object) -> NoReturn:
        raise HealingError(f"{self._who} sent as {what} {got!r:.60}, where {wanted} belongs; nothing of it is taken")
