"""Which classes a strategy's text can name: laconic's own by their name, others by `package.module:Name`, or as registered."""

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import TypeVar

from torch.optim import Optimizer

from laconic import strategies
from laconic.reducers import discover
from laconic.reducers.base import Reducer
from laconic.strategies.outer import Outer
from laconic.strategies.schedules import Schedule

PARTS = (Reducer, Outer, Schedule)
SCRIPTS = ("__main__", "__mp_main__")  # names of a script in its own process; in another process they are another module

Part = TypeVar("Part", bound=type)

_registered: dict[str, type] = {}


def register(part: Part) -> Part:
    """Give a reducer, outer optimizer or schedule of your own a name in strategy texts: that of its class.

    Also as a decorator. A text that is read in another process needs the registration there, too; `package.module:Name(...)`
    needs none.

    Arguments:
      `part`: a class derived from `Reducer`, `Outer` or `Schedule`, which is returned as it is.

    >>> from dataclasses import dataclass
    >>> import laconic
    >>> @laconic.register
    ... @dataclass(frozen=True)
    ... class Plain(laconic.Reducer):
    ...     def reduce(self, bucket):
    ...         mean = yield laconic.AllReduce(bucket.flat)
    ...         return laconic.Reduced(mean)
    >>> laconic.strategy("ddp(reducer=Plain())") == laconic.ddp(reducer=Plain())
    True
    """
    if not is_part(part):
        raise TypeError(f"register takes a class derived from Reducer, Outer or Schedule, got {part!r}")
    name, taken = part.__name__, own().get(part.__name__) or _registered.get(part.__name__)
    if taken is not None and _place(taken) != _place(part):
        raise ValueError(f"the name {name} is taken by {taken.__module__}.{taken.__qualname__}; give the class another name")
    _registered[name] = part  # a class that is defined again, as in a notebook, replaces the former
    return part


@functools.cache
def own() -> Mapping[str, type]:
    """laconic's reducers, outer optimizers and schedules, by name; found by their place."""
    found: dict[str, type] = {**discover()}
    for module in strategies.modules():
        found |= {name: thing for name, thing in vars(module).items() if is_part(thing)}
    return found


def known() -> dict[str, type]:
    """All classes that a text can name without saying where they are."""
    return {**own(), **_registered}


def name_of(kind: type) -> str | None:
    """How a text names a class, such that it is found again; None: it can't be."""
    if own().get(kind.__name__) is kind:
        return kind.__name__
    module, path = kind.__module__, kind.__qualname__
    there = _lookup(sys.modules.get(module), path) is kind
    if there and module not in SCRIPTS:
        return f"{module}:{path}"
    if _registered.get(kind.__name__) is kind:
        return kind.__name__
    return f"{module}:{path}" if there else None


def imported(module: str, path: str, *, trusted: bool = True) -> type:
    """The class that `module:path` names: a part of strategies, or an optimizer for `OuterOptimizer`.

    Unless `trusted`, of a module that is imported already.
    """
    if module not in sys.modules and not trusted:
        raise ValueError(f"{module} is not imported yet, and a saved text imports nothing by itself; import {module} first")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports something that is not
        raise ValueError(f"there is no module {module!r} in this Python's path: {error}") from error
    found = _lookup(home, path) if trusted else _there(home, path)
    if found is None:
        names = [name for name, thing in vars(home).items() if is_part(thing) and thing.__module__ == module]
        raise ValueError(f"module {module} has no {path!r}; its reducers are: {', '.join(names) or 'none'}")
    if not isinstance(found, type) or not (is_part(found) or issubclass(found, Optimizer)):
        what = f"the class {path}" if isinstance(found, type) else f"{type(found).__name__} {found!r:.60}"
        raise ValueError(f"{module}:{path} must be a class derived from laconic.Reducer (or Outer, Schedule), got {what}")
    return found


def is_part(thing: object) -> bool:
    """Whether it is a class of which a strategy can have an instance."""
    return isinstance(thing, type) and issubclass(thing, PARTS) and not inspect.isabstract(thing)


def _place(kind: type) -> tuple[str, str]:
    """Where a class is written: a file that is imported under two names, as a script may be, has one place."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__, kind.__qualname__


def _lookup(home: object, path: str) -> object:
    for name in path.split("."):
        home = getattr(home, name, None)
    return home


def _there(home: object, path: str) -> object:
    """As `_lookup`, without any code of the module: getattr may run a `__getattr__` that imports, as torch's does."""
    for name in path.split("."):
        home = getattr(home, "__dict__", {}).get(name)
    return home
