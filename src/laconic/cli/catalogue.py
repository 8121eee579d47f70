"""What there is to choose from: `laconic list` and `new-task`."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import app, fail


@app.command("list")
def list_() -> None:
    """Strategies, reducers, schedules and outer optimizers, with what they do, their bytes and their papers."""
    from rich.console import Console

    from laconic.lab.catalogue import entries

    console = Console()
    for heading, found in entries().items():
        console.print(f"\n{heading}", style="bold")
        for entry in found:
            console.print(f"  {entry.call}", style="cyan", highlight=False, markup=False)
            for line in entry.lines:
                console.print(f"      {line}", highlight=False, markup=False, soft_wrap=True)


@app.command("new-task")
def new_task(path: Annotated[Path, typer.Argument(help="the file to write")] = Path("my_task.py")) -> None:
    """Write a task of your own to begin with: a file for `laconic compare`."""
    from laconic.lab.template import TEMPLATE

    if path.suffix != ".py":
        path = path.with_name(f"{path.name}.py")
    if path.exists():
        fail(ValueError(f"{path} is there already"))
    if not path.parent.is_dir():
        fail(ValueError(f"there is no folder {path.parent}; make it first"))
    path.write_text(TEMPLATE.replace("{name}", path.name))
    typer.echo(f"wrote {path}; now: laconic compare {path}")
