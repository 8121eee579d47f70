"""The scripts that type checkers read as users' use every public name, and those names are what `laconic` has."""

import ast
from pathlib import Path

import laconic
from tests.public_api import public_modules

SCRIPTS = sorted(Path(__file__).parent.glob("face*.py"))


def used(script: str) -> set[str]:
    """The names that a script uses, by the paths under which it imports them."""
    tree, found = ast.parse(script), set[str]()
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=names):
                imported |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
            case ast.Import(names=names):
                imported |= {name.name.partition(".")[0]: name.name.partition(".")[0] for name in names}

    def path(node: ast.AST) -> str | None:
        match node:
            case ast.Name() if node.id in imported:
                return imported[node.id]
            case ast.Attribute() if inner := path(node.value):
                return f"{inner}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and (whole := path(node)):
            found.add(whole)
    return found


def test_every_public_name_is_used_in_the_scripts_for_type_checkers() -> None:
    there = set().union(*(used(script.read_text()) for script in SCRIPTS))
    public = {f"{module}.{name}" for module, names in public_modules().items() for name in names}
    assert {"laconic.attach", "laconic.checkpoint.save", "laconic.compat.optim.PostLocalSGDOptimizer"} <= public
    missing = sorted(public - there)
    assert not missing, f"use them in {SCRIPTS[0].parent}, as a user would"


def test_a_name_that_is_only_imported_or_mentioned_does_not_count() -> None:
    script = (
        "import laconic\nfrom laconic import checkpoint, elastic as e\n'laconic.topk'\nlaconic.ddp()\ne.attach\nother.sign()"
    )
    assert used(script) == {"laconic", "laconic.ddp", "laconic.elastic", "laconic.elastic.attach"}


def test_what_the_sources_list_as_public_is_what_is_there_when_it_runs() -> None:
    assert public_modules()["laconic"] == laconic.__all__
    assert sorted(laconic.__all__) == sorted([*laconic._MODULE, "__version__", *laconic._PACKAGES])
    assert public_modules()["laconic.checkpoint"] == laconic.checkpoint.__all__
    assert public_modules()["laconic.compat.ddp_comm_hooks"] == laconic.compat.ddp_comm_hooks.__all__
