"""`laconic advise`."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laconic.cli import completing
from laconic.cli.shared import app, console, examples, fail

if TYPE_CHECKING:
    from laconic.advisor.quantities import Workers
    from laconic.advisor.risk import Risk
    from laconic.advisor.subjects import Subject

TASK_FUNCTIONS = {"model", "optimizer", "batches", "loss"}


@dataclass(frozen=True)
class Source:
    """Where the model and its compute come from; one of the first four is given."""

    task: str | None
    measured: Path | None
    config: str | None
    params: str | None
    step_ms: float | None
    optimizer: Literal["adam", "sgd"] | None  # None: the task's or the script's own, else adam
    memory_gb_per_second: float | None
    strategies: list[str]


@app.command(
    epilog=examples(
        "laconic advise --params 1.3b --step-ms 900 --workers 64 --link 10gbit",
        "laconic advise bytes-gpt:5m --workers 4 --link 100mbit",
    )
)
def advise(
    task: Annotated[
        str | None,
        typer.Argument(
            help="bytes-gpt[:500k|1m|2m|5m|20m], digits, a task of your own (see new-task), or a script that trains",
            autocompletion=completing.tasks,
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="so many train together")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="4x4: 4 nodes of 4 workers, which share the node's cable; instead of --workers")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="each cable: 100mbit, 1gbit:20ms, 100gbit, none", autocompletion=completing.links)
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="a measured network, the file of laconic probe; instead of --link")] = None,
    params: Annotated[
        str | None, typer.Option(help="numbers alone: parameters of the model, such as 1.3b; with --step-ms")
    ] = None,
    step_ms: Annotated[
        str | None,
        typer.Option(
            metavar="MS",
            help="compute of a step in ms, on one machine, without communication; with --params or --config",
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="shapes of a model type of transformers, such as gpt2, or a config.json; with --step-ms")
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="what laconic run --advise has timed of a script")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adam or sgd (default: the task's or the script's own, else adam)")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "-s",
            "--strategy",
            help="one more strategy for the table; give it several times",
            autocompletion=completing.strategies,
        ),
    ] = None,
    share: Annotated[float, typer.Option(help="wanted share of the rate without communication")] = 0.95,
    risk: Annotated[
        str, typer.Option(help="the most that may be chosen: same, rounding, delay or local", autocompletion=completing.risks)
    ] = "local",
    budget: Annotated[
        str | None, typer.Option(help="a day's most: data on each cable, 500gb, or with --price-per-gb money for all, 20usd")
    ] = None,
    price_per_gb: Annotated[float | None, typer.Option(help="money for a gigabyte (10^9 bytes) that a cable sends")] = None,
    memory: Annotated[str | None, typer.Option(help="of a worker, such as 24gb: what does not fit is not chosen")] = None,
    memory_gb_per_second: Annotated[
        float | None,
        typer.Option(help="of the device that trains, where encoding can't be timed here (default: 1000 with --step-ms)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the answer as JSON, version 1: see docs/advisor.md")] = False,
    out: Annotated[Path | None, typer.Option(help="a folder for a page with curves over bandwidth and workers")] = None,
) -> None:
    """Say before anything runs which strategy to take, for this model over this link.

    The model is a task, a script that trains, a config of transformers, or numbers; the network is a link, or what
    laconic probe has measured.
    """
    try:
        from laconic.advisor.quantities import milliseconds
        from laconic.advisor.risk import Risk

        step = None if step_ms is None else milliseconds(step_ms, "--step-ms")
        source = Source(task, measured, config, params, step, _kind(optimizer), memory_gb_per_second, strategy or [])
        _advise(source, workers, nodes, link, probe, share, Risk.read(risk), budget, price_per_gb, memory, as_json, out)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        fail(error)


def _advise(
    source: Source,
    count: int | None,
    nodes: str | None,
    link: str | None,
    probe: Path | None,
    share: float,
    risk: "Risk",
    budget: str | None,
    price_per_gb: float | None,
    memory: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    from laconic.advisor import quantities
    from laconic.advisor.answer import Wanted, answer, network_of
    from laconic.cost.link import parse
    from laconic.cost.measured import read
    from laconic.report import advice_page, advice_table
    from laconic.report.comparison_records import check_room

    if (link is None) == (probe is None):
        both = "both are given" if link is not None else "neither is given"
        raise ValueError(f"which network? Give --link, such as 1gbit:20ms, or --probe with the file of laconic probe; {both}")
    if not 0 < share <= 1:
        raise ValueError(f"--share must be above 0 and at most 1, such as 0.95; got {share:g}")
    for option, number in (("--price-per-gb", price_per_gb), ("--memory-gb-per-second", source.memory_gb_per_second)):
        quantities.positive(number, option)
    cable, measured = (parse(link), None) if link is not None else (None, read(probe)) if probe is not None else (None, None)
    if measured is not None and count is None and nodes is None:
        workers = quantities.Workers(measured.world, measured.per_node)
    else:
        workers = quantities.workers(count, nodes)
    if measured is not None:
        measured.check_world(workers.count)
        workers = _as_probed(workers, measured.per_node, nodes)
        if measured.one_host and (budget is not None or price_per_gb is not None):
            raise ValueError(
                "--budget and --price-per-gb are for what cables carry, and this probe was on one host alone; leave them out, "
                "or probe between hosts: laconic probe --nnodes 2, on each of them (docs/probe.md)"
            )
    most = quantities.budget(budget, price_per_gb, workers.cables) if budget is not None else None
    held = quantities.data_size(memory, "--memory") if memory is not None else None
    if out is not None:
        check_room(out)
    wanted = Wanted(share, risk, price_per_gb, most, held, with_curves=out is not None, task=_task(source))
    with _progress() as progress:
        subject = _subject(source, workers, progress)
        network, words = network_of(subject, workers, cable, measured)
        record = answer(subject, workers, network, words, wanted, measured)
    if as_json:
        typer.echo(record.text())
    else:
        advice_table.show(record, console())
    if out is not None:
        written = advice_page.write(record, out)
        typer.echo(f"\ncharts for a browser: {written}", err=as_json)


def _task(source: Source) -> str:
    """What `laconic compare` takes of it: the task, or a name for one to write."""
    from laconic.report.advice_records import OWN_TASK

    return OWN_TASK if source.task is None or _is_script(source.task) else source.task


def _as_probed(workers: "Workers", per_node: int, nodes: str | None) -> "Workers":
    from laconic.advisor.quantities import Workers

    if nodes is not None and workers.per_node != per_node:
        raise ValueError(
            f"--nodes {nodes} has {workers.per_node} workers in a node, and the probe found {per_node}; leave --nodes out"
        )
    return Workers(workers.count, per_node)


def _subject(source: Source, workers: "Workers", progress: Callable[[str], None]) -> "Subject":
    """The model and its compute, by whichever way they were given."""
    from laconic.advisor import shapes, subjects

    sys.path.append(str(Path.cwd()))  # strategies and tasks may name what lies here
    ways = {"a task": source.task, "--measured": source.measured, "--config": source.config, "--params": source.params}
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} are given" if given else "nothing is given"
        raise ValueError(
            "which model? Give one of a task (bytes-gpt, mine.py), a script, --params 1.3b --step-ms 900, "
            f"--config gpt2 --step-ms 350, or --measured; {what}"
        )
    memory = None if source.memory_gb_per_second is None else source.memory_gb_per_second * 1e9
    if source.params is not None or source.config is not None:
        if source.step_ms is None:
            raise ValueError(f"how long does a step compute? Give --step-ms beside {given[0]}, without any communication")
        seconds = source.step_ms / 1e3
        if source.params is not None:
            count = shapes.count(source.params)
            return subjects.of_numbers(count, seconds, workers, source.optimizer or "adam", memory, source.strategies)
    elif source.step_ms is not None:
        raise ValueError(f"--step-ms is for --params and --config; with {given[0]}, steps are timed")
    from laconic.advisor import model_subjects

    if source.config is not None:
        kind = source.optimizer or "adam"
        return model_subjects.of_config(source.config, seconds, workers, kind, memory, source.strategies, progress)
    if source.measured is not None:
        return model_subjects.of_measured(source.measured, workers, source.optimizer, memory, source.strategies, progress)
    assert source.task is not None
    if _is_script(source.task):
        return _of_script(source.task, source, workers, memory, progress)
    from laconic.lab import tasks

    return model_subjects.of_task(tasks.load(source.task), workers, memory, source.strategies, progress)


def _of_script(
    script: str, source: Source, workers: "Workers", memory: float | None, progress: Callable[[str], None]
) -> "Subject":
    """As `laconic run --advise` does: the script's own first steps are timed."""
    from laconic.advisor.model_subjects import of_measured
    from laconic.script.launch import measure

    typer.echo(
        f"{script} lacks functions of a task: it is run as a script, in one process, until some steps are timed", err=True
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        code = measure([script], file)
        if code != 0 or not file.exists():
            raise ValueError(
                f"{script} ended with exit code {code} before its steps were timed; give its arguments by "
                f"laconic run --advise --workers {workers.count} ... {script} ARGUMENTS, or a task (laconic new-task)"
            )
        return of_measured(file, workers, source.optimizer, memory, source.strategies, progress)


def _is_script(task: str) -> bool:
    """A Python file that lacks some of a task's functions. It is read, not run: running it would train."""
    import ast

    path = Path(task)
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return False  # loading it says what is wrong
    return not _names(tree.body) >= TASK_FUNCTIONS


def _names(body: Sequence[object]) -> set[str]:
    """The functions that a file defines or imports."""
    import ast

    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _kind(text: str | None) -> Literal["adam", "sgd"] | None:
    match text:
        case None | "adam" | "sgd":
            return text
        case "adamw" | "AdamW" | "Adam":
            return "adam"
        case "SGD":
            return "sgd"
    raise ValueError(f"--optimizer is adam (and AdamW) or sgd, by which local strategies are chosen; got {text!r}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on stderr while something is timed; stdout is for the answer."""
    from rich.console import Console

    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda line: typer.echo(line, err=True)
        return
    with screen.status("") as status:
        yield status.update
