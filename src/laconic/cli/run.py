"""`laconic run`."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from laconic.cli import completing
from laconic.cli.run_options import RunCommand, by_word
from laconic.cli.shared import app, examples, fail


@app.command(
    "run",
    cls=RunCommand,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]",
    epilog=examples(
        'laconic run -s "int8()" --record runs/first --nproc-per-node 2 examples/gpt.py',
        "laconic run --advise --workers 16 --link 1gbit examples/gpt.py",
        after="cd to laconic's folder",
    ),
)
def run_(
    context: typer.Context,
    strategy: Annotated[
        str | None,
        typer.Option(
            "-s",
            "--strategy",
            help='how to average, such as "diloco(64)", "ddp(reducer=module:Name())", or auto',
            autocompletion=completing.strategies,
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            help="rehearse on this machine: each process behind a link of its own, such as 100mbit",
            autocompletion=completing.links,
        ),
    ] = "none",
    island_size: Annotated[
        str | None,
        typer.Option(
            help="for fully_shard: so many ranks hold a replica, or 'node': those of a node; with --link they share a host"
        ),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="write what is sent, waited for and lost there: see watch")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="with --record, for TensorBoard too")] = False,
    risk: Annotated[
        str | None, typer.Option(help="with -s auto, the most that may be chosen: same, rounding, delay (the default), local")
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="each process a worker of its own, which may die, leave and join: torchft")
    ] = False,
    min_replicas: Annotated[int, typer.Option(help="with --elastic, a sync of fewer workers is dropped")] = 1,
    deadline_seconds: Annotated[float, typer.Option(help="with --elastic, how long a sync waits for a slow worker")] = 60.0,
    lighthouse: Annotated[
        str | None, typer.Option(help="with --elastic, of others: http://host:port; by default one is started here")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="with --elastic, this machine's address for workers on others; by default none can join")
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="time some steps in one process, end the script, and print what `advise` finds")
    ] = False,
) -> None:
    """Run any script that uses DDP or fully_shard, unchanged, under a strategy.

    laconic's own options and torchrun's come before the script, in any order; after the script come its arguments.

    With -s auto, the advisor chooses the strategy in the first steps. With --advise, nothing is trained: the options of
    `laconic advise` come before the script.

    With --elastic, --nproc-per-node processes train by local updates, each with a DDP over itself alone; one that dies is
    started again, up to --max-restarts times (3): -s "diloco(64)" --elastic --min-replicas 2 --nproc-per-node 4 train.py
    """
    from functools import partial

    from laconic.cost.link import parse
    from laconic.lab.rehearsal import rehearse
    from laconic.script.launch import check_script, launch, launch_elastic

    if not context.args:
        raise typer.BadParameter("which script? laconic run -s STRATEGY [torchrun options] script.py [its arguments]")
    if advise:
        _advise(context.args, {"--island-size": island_size, "--record": record, "--tensorboard": tensorboard or None})
    try:
        if strategy is None:
            check_script(context.args)
            raise typer.BadParameter('which strategy? laconic run -s "int8()" ... script.py, or -s auto')
        if elastic:
            odd = {"--link": link != "none", "--island-size": island_size, "--record": record, "--risk": risk}
            for name in [name for name, value in odd.items() if value]:
                raise ValueError(f"{name} and --elastic don't go together yet; leave one of them out")
            raise typer.Exit(
                launch_elastic(
                    strategy,
                    context.args,
                    min_replicas=min_replicas,
                    deadline_seconds=deadline_seconds,
                    lighthouse=lighthouse,
                    bind=bind,
                )
            )
        cable = parse(link)
        rehearsal = None
        if cable.bits_per_second is not None:
            if island_size == "node":
                raise ValueError("with --link, give --island-size as a number: so many processes share a host")
            size = island_size or "1"
            rehearsal = partial(rehearse, link=cable, island_size=max(int(size), 1) if size.isdecimal() else 1)
        code = launch(
            strategy,
            context.args,
            record,
            tensorboard=tensorboard,
            rehearsal=rehearsal,
            island_size=island_size,
            risk=risk,
        )
    except (ValueError, TypeError) as error:
        fail(error)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def _advise(arguments: Sequence[str], other: Mapping[str, object]) -> NoReturn:
    """Time a script, and go on as `laconic advise --measured`, with the options before the script."""
    from laconic.script.launch import measure

    try:
        odd = [name for name, value in other.items() if value is not None]
        if odd:
            raise ValueError(f"{odd[0]} is for training, and with --advise nothing is trained; leave it out")
        options, script = _options_of("advise", arguments)
        _check_advise(options, script)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "measured.json")
            code = measure(script, file)
            if code == 0 and not file.exists():
                raise ValueError(
                    "the script made too few optimizer steps in its own process to time one (the first 3 are not timed), so "
                    "its compute is not known; give it more steps, or use laconic advise --step-ms"
                )
            if code == 0:
                try:
                    _command().main(["advise", "--measured", str(file), *options], prog_name="laconic")
                except SystemExit as end:
                    code = int(end.code or 0)
    except (ValueError, TypeError) as error:
        fail(error)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def _check_advise(options: Sequence[str], script: Sequence[str]) -> None:
    """What `laconic advise` would refuse in any case is refused before the script is run."""
    from laconic.cost.link import parse

    if not script:
        raise ValueError("which script? laconic run --advise --workers 16 --link 1gbit script.py [its arguments]")
    if script[0].startswith("-") and script[0] != "-m":
        raise ValueError(
            f"laconic advise has no option {script[0]}, and torchrun's are not for --advise: one process is timed, and the "
            "answer is for --workers; the script comes last, with its arguments"
        )
    read = _command().commands["advise"].make_context("laconic advise", list(options)).params
    known = {name for name in ("link", "probe", "workers", "nodes") if read[name] is not None}
    if not known & {"link", "probe"} or not known & {"workers", "nodes", "probe"}:
        raise ValueError("for how many workers, and over which network? Give --workers 16 --link 1gbit, or --probe probe.json")
    if read["link"] is not None:
        parse(read["link"])


def _command() -> Any:
    return typer.main.get_command(app)


def _options_of(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of another command that these begin with, and the rest."""
    known, place = by_word(_command().commands[name]), 0
    while place < len(arguments) and (word := arguments[place].partition("=")[0]) in known:
        place += 2 if known[word] and word == arguments[place] else 1
    return list(arguments[:place]), list(arguments[place:])
