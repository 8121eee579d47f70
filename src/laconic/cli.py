"""The command line. `laconic --help` imports neither torch nor the lab."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from laconic.run.environment import expect_no_effect

EXTRA = {"numpy", "plotly", "pyroute2", "rich", "sklearn", "typer"}  # the modules of the extra `lab`, in pyproject.toml


def _lacking(error: ImportError) -> SystemExit:
    """What to say, in a line, where one of them is not installed."""
    name = (error.name or "typer").partition(".")[0]
    return SystemExit(
        f"the laconic command needs {name}, which `pip install .` leaves out; in laconic's folder: pip install '.[lab]'"
    )


try:
    import typer
except ImportError as error:
    raise _lacking(error) from error

if TYPE_CHECKING:
    from rich.console import Console

expect_no_effect()  # of LACONIC_STRATEGY: no script is trained in this process

app = typer.Typer(
    help="PyTorch data-parallel training that communicates less: which strategy, for your model, over your link?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

DEFAULT_STRATEGIES = [
    "ddp()",
    "int8()",
    "local_adam(warmup=0)",
    "local_adam(16, warmup=0, refresh=128)",
    "diloco(16)",
    "streaming_diloco(16, fragments=4, delay=2, blend=0.0, carry=True)",
]
SECONDS = 25.0


@app.command()
def compare(
    task: Annotated[
        str, typer.Argument(help="bytes-gpt[:500k|1m|2m|5m|20m], digits, or your own file (see new-task)")
    ] = "bytes-gpt:500k",
    strategy: Annotated[
        list[str] | None,
        typer.Option("-s", "--strategy", help="a strategy; give it several times; a reducer of your own is module:Name(...)"),
    ] = None,
    workers: Annotated[int, typer.Option(help="processes, 2 at least, each behind a link of its own")] = 4,
    island_size: Annotated[
        int, typer.Option(min=1, help="workers that hold one model together, sharded by fully_shard, behind one link")
    ] = 1,
    link: Annotated[str, typer.Option(help="10mbit, 1gbit, 100mbit:20ms, none")] = "100mbit",
    seconds: Annotated[
        float | None, typer.Option(min=1, help=f"time of each run: who learns most in it?  [default: {SECONDS:g}]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=10, help="steps of each run, instead of --seconds")] = None,
    warm: Annotated[
        int | None,
        typer.Option(min=0, help="begin with a model that ddp() has trained for so many steps  [default: 400 for bytes-gpt]"),
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

    console = _console()
    try:
        if seconds is not None and steps is not None:
            raise ValueError("--seconds gives every strategy the same time, --steps the same number of steps: give one of them")
        length = (SECONDS if seconds is None else seconds) if steps is None else None
        _compare(console, task, strategy or [], workers, island_size, link, length, steps, warm, seeds, out, resume)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        _fail(error)


def _compare(
    console: "Console",
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
    sys.path.append(str(Path.cwd()))  # the workers have it, too
    loaded = tasks.load(task)  # it is there, and has what it needs; strategies may name what lies in it and beside it
    strategies = [str(laconic.strategy(text)) for text in ["ddp()", *(chosen or DEFAULT_STRATEGIES), "silent()"]]
    name = str(Path(task).resolve()) if task.endswith(".py") else loaded.name
    begun = loaded.warm_steps if warm is None else warm
    unique = list(dict.fromkeys(strategies))
    comparison = Comparison(name, unique, workers, cable, steps or 0, range(seeds), seconds, begun, island_size)
    results = begin(comparison)
    results.command = _command(task, chosen, workers, island_size, link, seconds, steps, warm, out)
    if resume and (out / records.FILE).exists():
        resumed(results, comparison, out)
    records.check_room(out)
    if results.link_note:
        console.print(f"{results.link_note}; running without a limit", style="bold", highlight=False, markup=False)
    try:
        length = f"{steps} steps" if seconds is None else f"{seconds:g} s"
        with Board(console, comparison.strategies, length, seeds) as board:
            compare(comparison, results, out, board)
    except KeyboardInterrupt:
        console.print(f"\n{stopped(results, out)}", highlight=False, markup=False)
        raise
    terminal.show(results, console)
    written = page.write(results, out)
    console.print(f"\nwritten: {out / records.FILE}, and charts for a browser: {written}", highlight=False, markup=False)


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


def _fail(error: Exception) -> NoReturn:
    from rich.console import Console

    Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1) from None


def _console() -> "Console":
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)  # a file has no width


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]",
)
def run_(
    context: typer.Context,
    strategy: Annotated[
        str, typer.Option("-s", "--strategy", help='how to average, such as "diloco(64)" or "ddp(reducer=module:Name())"')
    ],
    link: Annotated[str, typer.Option(help="rehearse on this machine: each process behind a link of its own")] = "none",
    island_size: Annotated[
        str | None,
        typer.Option(
            help="for fully_shard: so many ranks hold a replica, or 'node': those of a node; with --link they share a host"
        ),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="write what is sent, waited for and lost there: see watch")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="with --record, for TensorBoard too")] = False,
) -> None:
    """Run any script that uses DDP or fully_shard, unchanged, under a strategy.

    laconic's own options come first, then torchrun's, then the script with its arguments:

    laconic run -s "int8()" --nproc-per-node 4 train.py --epochs 3
    """
    from functools import partial

    from laconic.cost.link import parse
    from laconic.lab.rehearsal import rehearse
    from laconic.script.launch import launch

    if not context.args:
        raise typer.BadParameter("which script? laconic run -s STRATEGY [torchrun options] script.py [its arguments]")
    try:
        cable = parse(link)
        rehearsal = None
        if cable.bits_per_second is not None:
            if island_size == "node":
                raise ValueError("with --link, give --island-size as a number: so many processes share a host")
            size = island_size or "1"
            rehearsal = partial(rehearse, link=cable, island_size=max(int(size), 1) if size.isdecimal() else 1)
        code = launch(strategy, context.args, record, tensorboard=tensorboard, rehearsal=rehearsal, island_size=island_size)
    except (ValueError, TypeError) as error:
        _fail(error)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="the --record of a run")],
    once: Annotated[bool, typer.Option("--once", help="how it stands now, and no more")] = False,
) -> None:
    """Show a run while it goes on, from another terminal, until it ends."""
    from laconic.report.live_run import watch as show_run

    try:
        show_run(folder, _console(), once=once)
    except ValueError as error:
        _fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="the --record of a run")]) -> None:
    """Make a page with charts out of a run's records."""
    from laconic.report import run_page

    try:
        typer.echo(f"charts: {run_page.write(folder)}")
    except (ValueError, OSError) as error:
        _fail(error)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="the --out of a comparison")] = Path("laconic-compare"),
    browser: Annotated[bool, typer.Option("--open", help="open the report in a browser, too")] = False,
) -> None:
    """Print a comparison's table and verdict again, and write its report anew."""

    from laconic.report import comparison_records as records
    from laconic.report import page, terminal

    try:
        results = records.read(folder)
        terminal.show(results, _console())
        path = page.write(results, folder)
        typer.echo(f"\ncharts: {path}")
        if browser and typer.launch(str(path)) != 0:
            raise ValueError(f"no browser could be started; open {path.resolve()} yourself")
    except (ValueError, OSError) as error:
        _fail(error)


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
        _fail(ValueError(f"{path} is there already"))
    if not path.parent.is_dir():
        _fail(ValueError(f"there is no folder {path.parent}; make it first"))
    path.write_text(TEMPLATE.replace("{name}", path.name))
    typer.echo(f"wrote {path}; now: laconic compare {path}")


def main() -> None:
    """The program."""
    try:
        app()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise _lacking(error) from error


if __name__ == "__main__":
    main()
