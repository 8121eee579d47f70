"""What there is to choose from: `laconic list` and `new-task`."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli import completing
from laconic.cli.shared import app, console, examples, fail


@app.command("list", epilog=examples("laconic list", "laconic list diloco QSR"))
def list_(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="all that is known of these, with every argument", autocompletion=completing.strategies),
    ] = None,
) -> None:
    """Strategies, reducers, schedules and outer optimizers, with what they do, their bytes and their papers."""
    from laconic.lab.catalogue import entries, named

    screen = console()
    try:
        found = named(names) if names else entries()
    except ValueError as error:
        fail(error)
    for heading, some in found.items():
        screen.print(f"\n{heading}", style="bold")
        for entry in some:
            screen.print(f"  {entry.call}", style="cyan", highlight=False, markup=False, soft_wrap=True)
            for line in entry.lines:
                screen.print(f"      {line}".rstrip(), highlight=False, markup=False, soft_wrap=True)
    if not names:
        screen.print("\nAll arguments of one: laconic list diloco", style="dim", highlight=False)


@app.command("new-task", epilog=examples("laconic new-task", "laconic new-task mine.py"))
def new_task(path: Annotated[Path, typer.Argument(help="the file to write")] = Path("my_task.py")) -> None:
    """Write a task of your own to begin with: a file for `laconic compare`."""
    from laconic.lab.template import TEMPLATE

    if path.suffix != ".py":
        path = path.with_name(f"{path.name}.py")
    if path.exists():
        fail(ValueError(f"{path} is there already; give another name, or remove it"))
    if not path.parent.is_dir():
        fail(ValueError(f"there is no folder {path.parent}; make it first"))
    try:
        path.write_text(TEMPLATE.replace("{name}", path.name))
    except OSError as error:
        fail(error)
    typer.echo(f"wrote {path}; now: laconic compare {path}")
