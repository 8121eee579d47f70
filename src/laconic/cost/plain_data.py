"""Frozen dataclasses from what a JSON file holds, checked: a damaged file is named by the field that is wrong."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


def built(kind: type[Made], data: object, where: str = "") -> Made:
    """One of `kind`. Numbers must be finite and not negative; fields that are missing or unknown raise a ValueError."""
    assert is_dataclass(kind)
    place = where or "the file"
    if not isinstance(data, Mapping):
        raise ValueError(f"{place} must be an object, got {data!r:.40}")
    known = {one.name: one for one in fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"{place} has a field {unknown[0]!r} that nobody knows")
    needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{place} lacks {missing[0]!r}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}.{name}".lstrip(".")) for name, value in data.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    """A value of the type that a field has."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(next(part for part in parts if part is not type(None)), value, where)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return built(hint, value, where)
    if origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and len(value) != len(parts)):
            raise ValueError(f"{where} must be a list{f' of {len(parts)}' if origin is tuple else ''}, got {value!r:.40}")
        made = [_value(parts[0], each, f"{where}[{place}]") for place, each in enumerate(value)]
        return made if origin is list else tuple(made)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, got {value!r:.40}")
        return {str(name): _value(parts[1], each, f"{where}.{name}") for name, each in value.items()}
    if hint is str:
        if not isinstance(value, str):
            raise ValueError(f"{where} must be a text, got {value!r:.40}")
        return value
    assert hint in (int, float), f"{where} has a type that no file has: {hint}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (hint is float and isinstance(value, float) and math.isfinite(value))):
        raise ValueError(f"{where} must be a {'whole ' if hint is int else ''}number, got {value!r:.40}")
    assert isinstance(value, int | float)
    if value < 0:
        raise ValueError(f"{where} must not be negative, got {value!r}")
    return hint(value)
