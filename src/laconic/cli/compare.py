"""`laconic compare`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli import completing
from laconic.cli.shared import app, console, examples, fail

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_STRATEGIES = [
    "ddp()",
    "int8()",
    "local_adam(warmup=0)",
    "local_adam(16, warmup=0, refresh=128)",
    "diloco(16)",
    "streaming_diloco(16, fragments=4, delay=2, blend=0.0, carry=True)",
]
SECONDS = 25.0


@app.command(
    epilog=examples(
        'laconic compare digits -s "int8()" --workers 2 --link 10mbit --seconds 5',
        'laconic compare -s "diloco(8)" --workers 2 --steps 20 --warm 0 --link none',
    )
)
def compare(
    task: Annotated[
        str,
        typer.Argument(
            help="bytes-gpt[:500k|1m|2m|5m|20m], digits, or your own file (see new-task)", autocompletion=completing.tasks
        ),
    ] = "bytes-gpt:500k",
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "-s",
            "--strategy",
            help="a strategy; give it several times; a reducer of your own is module:Name(...)",
            autocompletion=completing.strategies,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="processes, 2 at least, each behind a link of its own")] = 4,
    island_size: Annotated[
        int, typer.Option(min=1, help="workers that hold one model together, sharded by fully_shard, behind one link")
    ] = 1,
    link: Annotated[str, typer.Option(help="10mbit, 1gbit, 100mbit:20ms, none", autocompletion=completing.links)] = "100mbit",
    seconds: Annotated[
        float | None, typer.Option(min=1, help=f"time of each run: who learns most in it? (default: {SECONDS:g})")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=10, help="steps of each run, instead of --seconds")] = None,
    warm: Annotated[
        int | None,
        typer.Option(
            min=0, help="begin with a model that ddp() has trained for so many steps (default: 400 for bytes-gpt, else 0)"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each strategy")] = 1,
    out: Annotated[Path, typer.Option(help="where results.json and report.html go")] = Path("laconic-compare"),
    resume: Annotated[
        bool, typer.Option("--resume", help="go on after an interruption: what is in --out is not run again")
    ] = False,
) -> None:
    """Run strategies side by side over a limited link, and show who wins.

    Each gets the same time, or with --steps as many steps. ddp() and silent(), the limit, are always run.
    """

    screen = console()
    try:
        if seconds is not None and steps is not None:
            raise ValueError("--seconds gives every strategy the same time, --steps the same number of steps: give one of them")
        length = (SECONDS if seconds is None else seconds) if steps is None else None
        _compare(screen, task, strategy or [], workers, island_size, link, length, steps, warm, seeds, out, resume)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        fail(error)


def _compare(
    screen: "Console",
    task: str,
    chosen: list[str],
    workers: int,
    island_size: int,
    link: str,
    seconds: float | None,
    steps: int | None,
    warm: int | None,
    seeds: int,
    out: Path,
    resume: bool,
) -> None:
    import laconic
    from laconic.cost.link import parse
    from laconic.lab import tasks
    from laconic.lab.compare import Comparison, begin, compare, resumed, stopped
    from laconic.report import comparison_records as records
    from laconic.report import page, terminal
    from laconic.report.live_comparison import Board

    cable = parse(link)
    records.check_room(out)
    sys.path.append(str(Path.cwd()))  # the workers have it, too
    loaded = tasks.load(task)  # it is there, and has what it needs; strategies may name what lies in it and beside it
    strategies = [laconic.strategy(text) for text in ["ddp()", *(chosen or DEFAULT_STRATEGIES), "silent()"]]
    name = str(Path(task).resolve()) if task.endswith(".py") else loaded.name
    begun = loaded.warm_steps if warm is None else warm
    texts: dict[str, str] = {}
    for one in strategies:
        texts.setdefault(one.compared, str(one))  # the same in other words is run once
    comparison = Comparison(name, list(texts.values()), workers, cable, steps or 0, range(seeds), seconds, begun, island_size)
    results = begin(comparison)
    results.command = _command(task, chosen, workers, island_size, link, seconds, steps, warm, out)
    if resume and (out / records.FILE).exists():
        resumed(results, comparison, out)
    if results.link_note:
        screen.print(f"{results.link_note}; running without a limit", style="bold", highlight=False, markup=False)
    try:
        length = f"{steps} steps" if seconds is None else f"{seconds:g} s"
        with Board(screen, comparison.strategies, length, seeds) as board:
            compare(comparison, results, out, board)
    except KeyboardInterrupt:
        screen.print(f"\n{stopped(results, out)}", highlight=False, markup=False)
        raise
    terminal.show(results, screen)
    written = page.write(results, out)
    screen.print(f"\nwritten: {out / records.FILE}, and charts for a browser: {written}", highlight=False, markup=False)


def _command(
    task: str,
    chosen: list[str],
    workers: int,
    island_size: int,
    link: str,
    seconds: float | None,
    steps: int | None,
    warm: int | None,
    out: Path,
) -> str:
    """What a person would type to run the same comparison again."""
    from shlex import join

    length = ["--steps", str(steps)] if seconds is None else ["--seconds", f"{seconds!r}"]
    words = ["laconic", "compare", task, *(word for text in chosen for word in ("-s", text))]
    words += ["--workers", str(workers), *(["--island-size", str(island_size)] if island_size > 1 else [])]
    words += ["--link", link, *length, *(["--warm", str(warm)] if warm is not None else [])]
    return join([*words, "--out", str(out)])
