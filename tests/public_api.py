"""The public names of laconic with their signatures and defaults, so that none of them changes unseen.

They are read from the sources, without importing them, and kept in `tests/data/public_api.txt`. `make check` fails where the
two differ; `make api` writes the file anew, and its diff is part of the change. Where git has the tag of an earlier release,
what would break code that was written for that release is shown, too; `tests/data/public_api_breaks.txt` has what was accepted.
"""

import ast
import difflib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
SOURCES = Path("src/laconic")
NAMES = Path("tests/data/public_api.txt")
BREAKS = Path("tests/data/public_api_breaks.txt")
PUBLIC = ("checkpoint", "compat", "elastic", "integrations")  # packages: those of their modules that have an `__all__`
ACCEPT = "To accept this, run `make api`, commit what it has written, and say in CHANGELOG.md what changes for a user."


def public_modules(root: Path = ROOT) -> dict[str, list[str]]:
    """The modules that users import names from, each with its `__all__`."""
    sources = root / SOURCES
    found = {"laconic": exported(sources / "__init__.py")}
    for path in sorted(path for package in PUBLIC for path in (sources / package).rglob("*.py")):
        parts = path.relative_to(sources.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = exported(path)
    return {module: names for module, names in found.items() if names}


def exported(path: Path) -> list[str]:
    """What `__all__` says in a file: a list of texts, as it stands there."""
    text = path.read_text()
    for statement in ast.parse(text).body if "\n__all__" in text else []:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.List() as value)
            ):
                return list(ast.literal_eval(value))
    return []


def described(root: Path) -> list[str]:
    """A line for each public name and each of its members."""
    modules, lines = public_modules(root), list[str]()
    package = loaded(root, modules)
    for module, names in modules.items():
        home = package if module == "laconic" else package[module.removeprefix("laconic.")]
        for name in names:
            lines += _lines(f"{module}.{name}", home.members[name])
    return sorted(lines)


def loaded(root: Path, public: Collection[str]) -> griffe.Module:
    """laconic as griffe reads it; what is no part of the public face is marked so."""
    package = griffe.load("laconic", search_paths=[root / SOURCES.parent], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    pending = [package]
    while pending:
        module = pending.pop()
        inside = [one for one in module.members.values() if isinstance(one, griffe.Module)]
        for one in inside:
            one.public = any(name == one.path or name.startswith(f"{one.path}.") for name in public)
            # A module that imports `attach` from its own submodule `attach` means the function, in Python as here.
            meant = module.imports.get(one.name, one.path)
            if one.name in (module.exports or ()) and meant != one.path:
                module.members[one.name] = griffe.Alias(one.name, package[meant.removeprefix("laconic.")], parent=module)
        pending += inside
    return package


def _lines(path: str, member: griffe.Object | griffe.Alias) -> Iterator[str]:
    thing = member.final_target if isinstance(member, griffe.Alias) else member
    match thing:
        case griffe.Module():
            yield f"{path}: module {thing.path}"
        case griffe.Function():
            kind = "".join(f"{label} " for label in sorted(thing.labels & {"classmethod", "staticmethod", "async"}))
            yield f"{path}: {kind}{thing.signature().removeprefix(thing.name)}"
        case griffe.Attribute():
            yield f"{path}: {_attribute(path, thing)}"
        case griffe.Class():
            yield f"{path}: class({', '.join(map(str, thing.bases))})"
            for name, part in thing.members.items():
                if name == "__init__" or not name.startswith("_"):
                    yield from _lines(f"{path}.{name}", part)


def _attribute(path: str, attribute: griffe.Attribute) -> str:
    kind = "property " if "property" in attribute.labels else ""
    annotation = "" if attribute.annotation is None else str(attribute.annotation)
    shown = "class-attribute" in attribute.labels or "module-attribute" in attribute.labels
    value = f" = {attribute.value}" if shown and attribute.value is not None and path != "laconic.__version__" else ""
    return f"{kind}{annotation}{value}".strip() or "attribute"


def newest_tag(root: Path) -> str | None:
    """The tag of the release before this commit; None: git has none, as in a shallow clone."""

    def tags(*options: str) -> list[str]:
        command = ["git", "-C", str(root), "tag", "--list", "v*", "--sort=-version:refname", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

    here = tags("--points-at", "HEAD")  # the tag of this very release
    return next((tag for tag in tags("--merged", "HEAD") if tag not in here), None)


def broken_since(tag: str, root: Path) -> list[str]:
    """What griffe finds that would break code which was written for that release."""
    archive = subprocess.run(["git", "-C", str(root), "archive", tag, str(SOURCES)], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        before, now = (loaded(place, public_modules(place)) for place in (Path(folder), root))
        found = list(griffe.find_breaking_changes(before, now))
    return sorted({f"{one.obj.canonical_path}: {_break(one)}" for one in found})


def _break(breakage: griffe.Breakage) -> str:
    name = getattr(breakage.old_value or breakage.new_value, "name", "")
    return f"{breakage.kind.value}{f' ({name})' if name else ''}"


def compare(root: Path) -> list[str]:
    """What has changed, in lines to print; none: nothing has."""
    before, now = (root / NAMES).read_text().splitlines(), described(root)
    said = [
        line for line in difflib.unified_diff(before, now, "accepted", "now", lineterm="", n=0) if not line.startswith("@@")
    ]
    tag = newest_tag(root)
    if tag is None:
        print("Public names: git has no tag of an earlier release to compare them with; compared with the accepted ones alone.")
        return said
    accepted = (root / BREAKS).read_text().splitlines()
    new = [line for line in broken_since(tag, root) if line not in accepted]
    return said + [f"breaks code written for {tag}: {line}" for line in new]


def accept(root: Path) -> None:
    """Write both files anew."""
    (root / NAMES).write_text("".join(f"{line}\n" for line in described(root)))
    tag = newest_tag(root)
    if tag is not None:
        (root / BREAKS).write_text("".join(f"{line}\n" for line in broken_since(tag, root)))


def main(arguments: list[str]) -> int:
    """`make check`, or, with --accept, `make api`."""
    if arguments == ["--accept"]:
        accept(ROOT)
        return 0
    changed = compare(ROOT)
    if changed:
        print("\n".join(["Public names have changed:", *changed, ACCEPT]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
