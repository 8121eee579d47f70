"""Every name that torch has is here, with the same signature."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import laconic.compat
from tests.compat.libraries import module

PATHS = [
    "ddp_comm_hooks",
    *[
        f"ddp_comm_hooks.{name}"
        for name in [
            "default_hooks", "powerSGD_hook", "quantization_hooks", "post_localSGD_hook", "debugging_hooks",
            "optimizer_overlap_hooks", "ddp_zero_hook", "mixed_precision_hooks",
        ]
    ],
    *[f"model_averaging.{name}" for name in ["averagers", "hierarchical_model_averager", "utils"]],
]  # fmt: skip
PRIVATE = {
    "_OptimizerHookState", "_OptimInBackwardHookState", "_apply_optim_in_backward_hook", "_hook_then_optimizer",
    "_AllreduceUpcastHookState", "_reducer_allreduce_and_upcast_hook",
}  # fmt: skip


def signature(thing: object) -> list[tuple[str, object, object]]:
    assert callable(thing)
    return [(p.name, p.kind, p.default) for p in inspect.signature(thing).parameters.values()]


def names(path: str) -> list[str]:
    theirs = module("torch", path)
    own = [name for name, thing in vars(theirs).items() if getattr(thing, "__module__", None) == theirs.__name__]
    aliases = [
        name
        for name, thing in vars(theirs).items()
        if inspect.ismodule(thing) and thing.__name__.startswith(f"{theirs.__name__}.")
    ]
    return [name for name in [*own, *aliases] if not name.startswith("_") or name in PRIVATE]


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in PATHS for name in names(path)])
def test_a_name_of_torch_is_here(path: str, name: str) -> None:
    theirs, ours = getattr(module("torch", path), name), getattr(module("laconic", path), name)
    if inspect.isfunction(theirs):
        assert signature(ours) == signature(theirs)
    if inspect.isclass(theirs):
        methods = [key for key, value in vars(theirs).items() if inspect.isfunction(value) and not key.startswith("_")]
        assert "Enum" in type(theirs).__name__ or signature(ours) == signature(theirs)
        for method in methods:
            assert signature(getattr(ours, method)) == signature(getattr(theirs, method)), method


def test_the_hooks_have_the_same_numbers_of_names() -> None:
    theirs, ours = (module(library, "ddp_comm_hooks").DDPCommHookType for library in ("torch", "laconic"))
    assert list(ours.__members__) == list(theirs.__members__)


def test_attributes_of_a_powersgd_state() -> None:
    theirs, ours = (module(library, "ddp_comm_hooks.powerSGD_hook").PowerSGDState for library in ("torch", "laconic"))
    assert [name for name in theirs.__slots__ if not hasattr(ours(None), name)] == ["rng"], "the seed is all there is to keep"


def test_the_optimizer() -> None:
    theirs, ours = (module(library, "optim").PostLocalSGDOptimizer for library in ("torch", "laconic"))
    assert signature(ours) == signature(theirs)
    public = [key for key, value in vars(theirs).items() if not key.startswith("_")]
    assert all(hasattr(ours, key) for key in public)


MODULES = [found.name for found in pkgutil.walk_packages(laconic.compat.__path__, "laconic.compat.")]


@pytest.mark.parametrize("name", [name for name in MODULES if "._" not in name])
def test_what_differs_is_shown_by_a_test_that_exists(name: str) -> None:
    text = importlib.import_module(name).__doc__ or ""
    page = ""
    for file, test in re.findall(r"(tests/compat/\w+\.py)?::(test_\w+)", text):
        page = file or page
        assert f"def {test}(" in (Path(__file__).parents[2] / page).read_text(), f"{page}::{test}"
    assert "What differs from torch" not in text or page
