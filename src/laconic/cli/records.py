"""What earlier commands have written: `laconic watch`, `report` and `show`."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import app, console, examples, fail

RECORDED = 'laconic run -s "int8()" --record runs/first ...'


@app.command(epilog=examples("laconic watch runs/first", "laconic watch runs/first --once", after=RECORDED))
def watch(
    folder: Annotated[Path, typer.Argument(help="the --record of a run")],
    once: Annotated[bool, typer.Option("--once", help="how it stands now, and no more")] = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="seconds to wait for a run to begin; by default without end in a terminal, else 60"),
    ] = None,
) -> None:
    """Show a run while it goes on, from another terminal, until it ends."""
    from laconic.report.live_run import watch as show_run

    try:
        show_run(folder, console(), once=once, wait_seconds=wait)
    except (ValueError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command(epilog=examples("laconic report runs/first", "laconic report runs/first --open", after=RECORDED))
def report(
    folder: Annotated[Path, typer.Argument(help="the --record of a run")],
    browser: Annotated[bool, typer.Option("--open", help="open the page in a browser, too")] = False,
) -> None:
    """Make a page with charts out of a run's records."""
    from laconic.report import run_page

    try:
        path = run_page.write(folder)
        typer.echo(f"charts: {path}")
        _open(path, browser)
    except (ValueError, OSError) as error:
        fail(error)


@app.command(epilog=examples("laconic show", "laconic show laconic-compare --open", after="laconic compare"))
def show(
    folder: Annotated[Path, typer.Argument(help="the --out of a comparison")] = Path("laconic-compare"),
    browser: Annotated[bool, typer.Option("--open", help="open the report in a browser, too")] = False,
) -> None:
    """Print a comparison's table and verdict again, and write its report anew."""

    from laconic.report import comparison_records as records
    from laconic.report import page, terminal

    try:
        results = records.read(folder)
        terminal.show(results, console())
        path = page.write(results, folder)
        typer.echo(f"\ncharts: {path}")
        _open(path, browser)
    except (ValueError, OSError) as error:
        fail(error)


def _open(path: Path, wanted: bool) -> None:
    import webbrowser

    if wanted and not webbrowser.open(path.resolve().as_uri()):
        raise ValueError(f"no browser could be started; open {path.resolve()} yourself")
