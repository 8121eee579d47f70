"""How a recipe gets its name, and its strategies their text."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec

from laconic.composition import Strategy, render_call

Arguments = ParamSpec("Arguments")

RECIPES: dict[str, Callable[..., Strategy]] = {}


def recipe(build: Callable[Arguments, Strategy]) -> Callable[Arguments, Strategy]:
    """Give a recipe its name in texts, and its strategies the text they came from."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def _named(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Strategy:
        given = signature.bind(*args, **kwargs).arguments
        chosen = {name: value for name, value in given.items() if value != signature.parameters[name].default}
        return replace(build(*args, **kwargs), text=render_call(build.__name__, chosen))

    RECIPES[build.__name__] = _named
    return _named
