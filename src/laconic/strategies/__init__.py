"""When, with whom, what, and then: schedules, routes, outer optimizers, the strategies made of them, and recipes.

A schedule, an outer optimizer or a recipe is found by its place: in any module of this package.
"""

import importlib
import pkgutil
from types import ModuleType


def modules() -> list[ModuleType]:
    """All modules of this package."""
    return [importlib.import_module(module.name) for module in pkgutil.iter_modules(__path__, f"{__name__}.")]
