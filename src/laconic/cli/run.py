"""`laconic run`."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import app, fail


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
        fail(error)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)
