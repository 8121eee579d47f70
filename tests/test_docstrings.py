"""Every public name says what it is, what its arguments mean, and shows an example that runs.

Read from the sources, so that no framework has to be imported. `pytest --doctest-modules` runs the examples.
"""

import ast
import doctest
import importlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import laconic

SOURCES = Path(laconic.__file__).parents[1]
MODULES = ["laconic", "laconic.checkpoint", "laconic.elastic"]
FRAMEWORKS = ["accelerate", "fabric", "lightning", "transformers"]  # the other modules of `laconic.integrations` serve these
# Here one example may be for all that a module has, in the module's docstring.
EXAMPLE_IN_MODULE = ("laconic.compat", "laconic.integrations")

# What laconic makes, and hands to the user: nobody else calls these classes.
HANDED_OUT = ("laconic.Run", "laconic.checkpoint.Saving", "laconic.elastic.ElasticRun")
MADE = re.compile(r"field\(|MappingProxyType\(|.*\b[A-Z_]{3,}\b")  # defaults that a user would write in another way

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


class Found(NamedTuple):
    """Where a name is defined; text: what stands below an assignment to it."""

    module: str
    node: ast.stmt
    text: str | None


@cache
def tree(module: str) -> ast.Module | None:
    path = SOURCES.joinpath(*module.split("."))
    file = next((one for one in (path / "__init__.py", path.with_suffix(".py")) if one.exists()), None)
    return None if file is None else ast.parse(file.read_text())


@cache
def statements(module: str) -> list[ast.stmt]:
    """Those of a module, with what stands below `if TYPE_CHECKING`."""
    body = tree(module)
    assert body is not None, module
    return [inner for node in body.body for inner in (node.body if isinstance(node, ast.If) else [node])]


def find(module: str, name: str) -> Found | None:
    """The definition of a name, wherever it is imported from; None: outside of laconic, or a module."""
    body = statements(module)
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, Definition) and node.name == name:
            return Found(module, node, ast.get_docstring(node))
        if name in assigned(node):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            return Found(module, node, str(after.value.value) if is_text else None)  # type: ignore[attr-defined]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and tree(node.module) is not None:
            for one in node.names:
                if (one.asname or one.name) == name and tree(f"{node.module}.{one.name}") is None:
                    return find(node.module, one.name)
    return None


def assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def listed(module: str) -> list[str]:
    """A module's `__all__`, or what is defined there."""
    for node in statements(module):
        if "__all__" in assigned(node):
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return [node.name for node in statements(module) if isinstance(node, Definition)]


def is_module(module: str, name: str) -> bool:
    places = [(f"{module}.{name}", name)] + [
        (f"{node.module}.{one.name}", one.asname or one.name)
        for node in statements(module)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    ]
    return any(called == name and tree(place) is not None for place, called in places)


def public() -> Iterator[tuple[str, Found]]:
    """Every public name, and where it is defined."""
    compat = [path.relative_to(SOURCES).with_suffix("") for path in (SOURCES / "laconic/compat").rglob("*.py")]
    modules = [
        ".".join(path.parts).removesuffix(".__init__") for path in compat if path.name == "__init__" or path.name[0] != "_"
    ]
    for module in [*MODULES, *(f"laconic.integrations.{name}" for name in FRAMEWORKS), *modules]:
        for name in listed(module):
            if not name.startswith("_") and not is_module(module, name):
                found = find(module, name)
                assert found is not None, f"{module}.{name} is defined nowhere"
                yield f"{module}.{name}", found


def bases(found: Found) -> list[Found]:
    """A class and what it inherits from laconic's own classes, nearest first."""
    assert isinstance(found.node, ast.ClassDef)
    names = [ast.unparse(base).split("[")[0] for base in found.node.bases]
    own = [inner for name in names if (inner := find(found.module, name)) and isinstance(inner.node, ast.ClassDef)]
    return [found, *(each for base in own for each in bases(base))]


def is_kind(found: Found, *names: str) -> bool:
    """Whether a class, or one of laconic's that it inherits from, has one of these bases."""
    every = [ast.unparse(base).split("[")[0] for each in bases(found) for base in each.node.bases]  # type: ignore[attr-defined]
    return any(base in names for base in every)


def members(found: Found) -> dict[str, tuple[Function, str]]:
    """The public methods and properties of a class, each with its own docstring or the one that it inherits."""
    chosen: dict[str, tuple[Function, str]] = {}
    for each in bases(found):
        for node in each.node.body:  # type: ignore[attr-defined]
            if isinstance(node, Function) and not node.name.startswith("_"):
                before, text = chosen.get(node.name, (node, ""))
                chosen[node.name] = before, text or ast.get_docstring(node) or ""
    return chosen


def arguments(node: Function) -> list[str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    every += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
    return [one.arg for one in every if one.arg not in ("self", "cls") and not one.arg.startswith("_")]


def defaults(node: Function) -> dict[str, str]:
    """Arguments that have a default, and its source."""
    positional = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(positional[len(positional) - len(node.args.defaults) :], node.args.defaults, strict=True)]
    pairs += [(one, value) for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
    return {one.arg: ast.unparse(value) for one, value in pairs}


def constructor(found: Found) -> dict[str, str | None]:
    """What a class is made with, and the sources of defaults: of `__init__`, or of a dataclass's or NamedTuple's fields."""
    fields: dict[str, str | None] = {}
    for each in reversed(bases(found)):
        assert isinstance(each.node, ast.ClassDef)
        own = [node for node in each.node.body if isinstance(node, Function) and node.name == "__init__"]
        if own:
            fields = {name: defaults(own[0]).get(name) for name in arguments(own[0])}
        elif is_kind(each, "NamedTuple") or any("dataclass" in ast.unparse(mark) for mark in each.node.decorator_list):
            fields |= {
                name: ast.unparse(node.value) if node.value else None
                for node in each.node.body
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
                for name in assigned(node)
                if not (name.startswith("_") or (node.value and "init=False" in ast.unparse(node.value)))
            }
    return fields


def is_named(argument: str, text: str) -> bool:
    """Whether a docstring has the argument in backticks, alone or with more, as in `name=3` and `save(name)`."""
    return any(re.search(rf"(?<![\w.]){re.escape(argument)}\b", code) for code in re.findall(r"`([^`\n]+)`", text))


def wrong_defaults(text: str, given: dict[str, str | None]) -> list[str]:
    """What a list of arguments says of defaults, where the signature has others; of those that stand there as Python."""
    (listing,) = re.findall(r"^Arguments:\n((?:  .*\n?)+)", text, re.MULTILINE) or [""]
    wrong = []
    for item in re.split(r"\n(?=  `)", listing.rstrip()):
        named = re.match(r"  `(\w+)`: .*\bDefault (.+?)\.$", " ".join(item.split("\n")), re.DOTALL)
        source = given.get(named[1]) if named else None
        if named and source and not MADE.match(source) and as_written(named[2]) not in (None, as_written(source)):
            wrong.append(f"`{named[1]}`: says {named[2]}, is {source}")
    return wrong


def as_written(source: str) -> str | None:
    """An expression, written in one way; None: it is none."""
    try:
        return ast.unparse(ast.parse(source, mode="eval"))
    except SyntaxError:
        return None


def has_example(name: str, text: str) -> bool:
    """Whether an example is there that is run."""
    body = tree(name.rpartition(".")[0]) if name.startswith(EXAMPLE_IN_MODULE) else None
    words = text if body is None else f"{text}\n{ast.get_docstring(body)}"
    return re.search(r">>> (?!.*# doctest: \+SKIP)", words) is not None


def missing_in_class(name: str, found: Found) -> Iterator[str]:
    text, given = found.text or "", {} if name in HANDED_OUT else constructor(found)
    inherited = "\n".join(each.text or "" for each in bases(found))
    yield from (f"{name}: says nothing of `{one}`" for one in given if not is_named(one, inherited))
    yield from (f"{name}.{wrong}" for wrong in wrong_defaults(text, given))
    if not is_kind(found, "Protocol") and not has_example(name, text):
        yield f"{name}: has no example"
    for method, (node, words) in members(found).items():
        if not words:
            yield f"{name}.{method}: has no docstring"
        if not name.startswith("laconic.integrations"):  # there, a framework calls methods with arguments of its own
            yield from missing_in_signature(f"{name}.{method}", node, words, inherited)


def missing_in_signature(name: str, node: Function, text: str, besides: str = "") -> Iterator[str]:
    """`besides`: what else may name an argument."""
    yield from (f"{name}: says nothing of `{one}`" for one in arguments(node) if not is_named(one, f"{text}\n{besides}"))
    yield from (f"{name}: {wrong}" for wrong in wrong_defaults(text, {**defaults(node)}))


def missing(names: Sequence[tuple[str, Found]]) -> Iterator[str]:
    for name, found in names:
        if not found.text:
            yield f"{name}: has no docstring"
        elif isinstance(found.node, ast.ClassDef):
            if not is_kind(found, "Exception", "RuntimeError", "ValueError", "TypeError"):
                yield from missing_in_class(name, found)
        elif isinstance(found.node, Function):
            yield from missing_in_signature(name, found.node, found.text)
            if not has_example(name, found.text):
                yield f"{name}: has no example"


@pytest.mark.parametrize("module", ["gradient_recipes", "local_recipes", "outer_recipes"])
def test_examples_of_recipes_are_run(module: str) -> None:
    home = importlib.import_module(f"laconic.strategies.{module}")
    named = [name for name in listed(home.__name__) if not name.startswith("_")]
    found = [one.name.split(".")[-1] for one in doctest.DocTestFinder(exclude_empty=True).find(home) if one.examples]
    assert sorted(found) == sorted(named), "each once"


def test_every_public_name_is_documented() -> None:
    names = list(public())
    assert len(names) > 100, "the names are found"
    lacking = list(dict.fromkeys(missing(names)))
    assert not lacking, f"{len(lacking)} are missing:\n" + "\n".join(lacking)
