"""Reducers: one file each. A new file in this folder is found by itself."""

import importlib
import inspect
import pkgutil

from laconic.reducers.base import Reducer


def discover() -> dict[str, type[Reducer]]:
    """Every concrete reducer that a module of this package defines, by name."""
    found: dict[str, type[Reducer]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for name, thing in vars(importlib.import_module(module.name)).items():
            is_reducer = inspect.isclass(thing) and issubclass(thing, Reducer) and not inspect.isabstract(thing)
            if is_reducer and thing.__module__ == module.name:
                found[name] = thing
    return found
