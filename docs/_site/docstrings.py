"""Docstrings for the reference: Markdown instead of plain text, and the comments behind fields as these fields' docstrings."""

import re
from typing import Any

import griffe
from plain_markdown import from_docstring
from public_names import public_names, source_of

COMMENT = re.compile(r"  # (?!noqa|type:)(.+)$")


class Docstrings(griffe.Extension):
    """Works on each object of the package once, when all of it has been read."""

    def __init__(self) -> None:
        self._links = Links()

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let a public name be what Python makes of it, where a module has the same name: `laconic.elastic.attach`."""
        for path in public_names():
            module, _, name = path.removeprefix("laconic.").rpartition(".")
            if module and name in pkg[module].members and source_of(path) == f"{path}.{name}":
                found = pkg[f"{module}.{name}.{name}"]
                self.on_object(obj=found)  # which is found by this name from now on, and not on the way through all objects
                pkg[module].members[name] = griffe.Alias(name, found, parent=pkg[module])

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give an object the docstring that the reference shows."""
        if isinstance(obj, griffe.Attribute) and obj.docstring is None and obj.annotation is not None:
            _take_comment(obj)
        if obj.docstring is not None:
            obj.docstring.value = from_docstring(obj.docstring.value, lambda line: self._links.insert(line, about=obj.path))


class Links:
    """Names in the text of docstrings and pages that lead to the reference."""

    CODE = re.compile(r"(?<![\[`])`((?:laconic\.)?[A-Za-z_][\w.]*)(\([^`]*\))?`(?![\]`])")  # outside of a link

    def __init__(self) -> None:
        self._known = set(public_names())

    def insert(self, line: str, about: str = "") -> str:
        """The line with its names as links, except that of what it is about."""
        return line if line.startswith("#") else self.CODE.sub(lambda found: self._link(found, about), line)

    def _link(self, found: re.Match[str], about: str) -> str:
        code, name, call = found[0], found[1], found[2]
        path = name if name.startswith("laconic.") else f"laconic.{name}"
        # `strategy` and `sign` are arguments and words, too. With brackets, or after `laconic.`, they are the functions.
        meant = name == path or name[0].isupper() or call is not None
        itself = about.rpartition(".")[2] == path.rpartition(".")[2]
        return f"[{code}][{path}]" if path in self._known and meant and not itself else code


def _take_comment(field: griffe.Attribute) -> None:
    """What stands behind a field of a class, and in the lines above it, as its docstring."""
    owner = field.parent
    if owner is None or not owner.is_class or field.lineno is None or isinstance(field.filepath, list):
        return
    if owner.docstring is not None and f"`{field.name}`" in owner.docstring.value:
        return  # where it is explained
    lines = field.lines_collection[field.filepath]
    first = field.lineno - 1
    while lines[first - 1].strip().startswith("# "):
        first -= 1
    behind = COMMENT.search(lines[(field.endlineno or field.lineno) - 1])
    said = [line.strip().removeprefix("# ") for line in lines[first : field.lineno - 1]] + ([behind[1]] if behind else [])
    if said:
        text = " ".join(said)
        field.docstring = griffe.Docstring(text[0].upper() + text[1:], parent=field)
