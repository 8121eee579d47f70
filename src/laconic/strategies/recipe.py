"""How a recipe gets its name, and its strategies their text."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec

from laconic import strategies
from laconic.strategies.strategy import Strategy, render, render_call

Arguments = ParamSpec("Arguments")

_recipes: dict[str, Callable[..., Strategy]] = {}


def recipes() -> Mapping[str, Callable[..., Strategy]]:
    """All recipes by name, found in whichever module of this package they are."""
    strategies.modules()
    return _recipes


def recipe(build: Callable[Arguments, Strategy]) -> Callable[Arguments, Strategy]:
    """Give a recipe its name in texts, and its strategies the text they came from."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def _named(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Strategy:
        with speaking_for(build.__name__):
            given = signature.bind(*args, **kwargs).arguments
            _check_parts(given)
            made = copy.copy(build(*args, **kwargs))
        chosen = {name: value for name, value in given.items() if value != signature.parameters[name].default}
        object.__setattr__(made, "text", render_call(build.__name__, given))  # frozen for everybody else
        object.__setattr__(made, "key", render_call(build.__name__, chosen))
        return made

    _recipes[build.__name__] = _named
    return _named


def _check_parts(given: Mapping[str, object]) -> None:
    """Refuse a strategy in the place of one of its parts; it may be the one that is meant."""
    for word, value in given.items():
        if isinstance(value, Strategy):
            plain = value.averaging is None and value.advised is None
            part = f"use {word}={render(value.reducer)}, or " if plain and word.endswith("reducer") else "use "
            raise TypeError(f"{word} can't be a strategy, and {value} is one; {part}{value} by itself")


@contextmanager
def speaking_for(where: str, **renamed: str) -> Iterator[None]:
    """Errors of parts that are made in here say where that was, and call arguments what they are called there.

    >>> with speaking_for("diloco", lr="outer_lr"):
    ...     raise ValueError("lr must be above 0, got 0")
    Traceback (most recent call last):
    ValueError: diloco: outer_lr must be above 0, got 0
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        kind, message = TypeError if isinstance(error, TypeError) else ValueError, str(error)
        first, _, rest = message.partition(" ")
        message = f"{renamed.get(first, first)} {rest}"
        if not where or message.startswith(where):
            raise kind(message) from error
        raise kind(f"{where}: {message}") from error
