"""A scan of src/laconic for what it uses of torch's private parts."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "laconic"
DOOR = "_torch/"  # the one package that may use them
FRAMEWORKS_DOOR = "integrations/private_parts.py"  # the one file that may use those of Lightning and Accelerate


_tree = cache(ast.parse)


def used_names(source: str) -> set[str]:
    """Every attribute that a source file reads or writes, and every name that it imports from torch."""
    return {name for name, _, _ in _names(_tree(source))}


def strings(source: str) -> set[str]:
    """Every text in a source file: the names of some parts are looked up by them."""
    return {node.value for node in ast.walk(_tree(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def defined_names(source: str) -> set[str]:
    """What a source file defines: functions, classes, variables, attributes of `self`."""
    return set(_defined(_tree(source)))


def private_uses(source: str, inherited: Collection[str] = ()) -> dict[str, int]:
    """Those with an underscore that are neither the file's own nor another package's: torch's, as far as one can see.

    A private name of laconic's own stays in the file that defines it, so whatever is not defined there is taken for torch's;
    except on `self`, where it may be `inherited` from a class of laconic's in another file.
    """
    tree = _tree(source)
    own, of_torch, of_others = set(_defined(tree)), _imported(tree, "torch"), _imported(tree, "")
    return {
        name: line
        for name, line, receiver in _names(tree)
        if name.startswith("_") and not name.startswith("__")
        if name not in {"_replace", "_asdict", "_fields"}  # documented, of named tuples
        if receiver in of_torch or (name not in own and receiver not in of_others)
        if receiver != "self" or name not in inherited
    }


def _names(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name):
                yield name, node.lineno, _receiver(value)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr" | "part"), args=[_, ast.Constant(str(name)), *_]
            ):
                yield name, node.lineno, ""
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                yield from ((part, node.lineno, "torch") for part in [*module.split("."), *(each.name for each in names)])
            case ast.Import(names=names):
                parts = [part for each in names if each.name.split(".")[0] == "torch" for part in each.name.split(".")]
                yield from ((part, node.lineno, "torch") for part in parts)


def _receiver(value: ast.expr) -> str:
    """`a` of `a.b.c`."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ):
                yield name


def _imported(tree: ast.AST, package: str) -> set[str]:
    """What a file calls the modules and names that it imports from a package; those from all but torch, for an empty one."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for each in node.names:
                root = (node.module or "" if isinstance(node, ast.ImportFrom) else each.name).split(".")[0]
                if root == package or (not package and root not in ("torch", "laconic")):
                    found.add(each.asname or each.name.split(".")[0])
    return found
