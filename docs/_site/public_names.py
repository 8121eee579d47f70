"""The public names of laconic, and their docstrings, as the sources have them: nothing is imported.

A name is public if it is in `laconic.__all__`, or in one of the packages and modules below.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
PACKAGES = ["laconic.checkpoint", "laconic.elastic"]
INTEGRATIONS = ["accelerate", "lightning", "transformers"]  # `fabric` is in `lightning`, and the others are what these share

Definition = ast.FunctionDef | ast.ClassDef


@cache
def public_names() -> dict[str, str]:
    """The docstring of each public name; an empty one where it has none."""
    found = {f"laconic.{name}": docstring("laconic", name) for name in listed("laconic")}
    modules = [*PACKAGES, *(f"laconic.integrations.{name}" for name in INTEGRATIONS), *compat()]
    for module in modules:
        found[module] = docstring(module)
        for name in listed(module):
            if not is_module(module, name):
                found[f"{module}.{name}"] = docstring(module, name)
    return {**found, "laconic.auto": docstring("laconic.auto")}


def compat() -> Iterator[str]:
    """The modules that stand for torch's."""
    for path in sorted((SOURCES / "laconic/compat").rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        if not (parts[-1].startswith("_") and parts[-1] != "__init__"):
            yield ".".join(part for part in parts if part != "__init__")


def file(module: str) -> Path | None:
    """Where a module's source is; None: there is no such module."""
    path = SOURCES.joinpath(*module.split("."))
    return next((one for one in (path / "__init__.py", path.with_suffix(".py")) if one.exists()), None)


@cache
def tree(module: str) -> ast.Module:
    """A module's source, parsed."""
    path = file(module)
    assert path is not None, f"there is no module {module}"
    return ast.parse(path.read_text())


def listed(module: str) -> list[str]:
    """A module's `__all__`; without one, the classes and functions that are defined there, and what is imported `as` itself."""
    names: list[str] = []
    for node in tree(module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in assigned(node) and node.value is not None:
            return list(ast.literal_eval(node.value))
        if isinstance(node, Definition):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [one.name for one in node.names if one.name == one.asname]
    return [name for name in names if not name.startswith("_")]


def docstring(module: str, name: str = "") -> str:
    """The docstring of a module, or of a name in it, wherever it is defined."""
    if not name:
        return ast.get_docstring(tree(module)) or ""
    before: set[str] = set()
    for node in tree(module).body:
        if isinstance(node, Definition) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name in before:
            return str(node.value.value)  # below an assignment
        before = assigned(node)
    source = imported(module, name)
    if is_module(module, name):
        return docstring(".".join(source or (module, name)))
    return docstring(*source) if source else ""


def assigned(node: ast.stmt) -> set[str]:
    """The names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def imported(module: str, name: str) -> tuple[str, str] | None:
    """From which module a name comes, and what it is called there; also from under `if TYPE_CHECKING`."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("laconic"):
            for one in node.names:
                if (one.asname or one.name) == name and f"{node.module}.{one.name}" != f"{module}.{name}":
                    return node.module, one.name
    return None


def source_of(path: str) -> str:
    """From where a public name is imported into the module that has it."""
    module, _, name = path.rpartition(".")
    return ".".join(imported(module, name) or (module, name))


def is_module(module: str, name: str) -> bool:
    """Whether a name in a module is another module, and not what is imported from one of the same name."""
    return file(".".join(imported(module, name) or (module, name))) is not None
