"""`laconic probe`."""

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli import completing
from laconic.cli.shared import app, examples, fail

SECONDS = 30.0


@app.command(
    "probe",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS]",
    epilog=examples(
        "laconic probe --nproc-per-node 2 --seconds 5", "laconic probe --nproc-per-node 4 --link 100mbit --seconds 10"
    ),
)
def probe(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="the file to write; charts go beside it, as .html")] = Path("probe.json"),
    seconds: Annotated[float, typer.Option(help="how long at most, from 0.1 to 60")] = SECONDS,
    link: Annotated[
        str,
        typer.Option(
            help="rehearse on this machine: each process, or with --nnodes each node, behind a link of its own",
            autocompletion=completing.links,
        ),
    ] = "none",
) -> None:
    """Measure the network between processes: latency, bandwidth, and who is slow.

    Start it as you would start training with torchrun, on each node:

    laconic probe --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400

    The first process prints a table and writes probe.json, for laconic advise --probe.
    """
    from functools import partial

    from laconic.cost.link import parse
    from laconic.lab.rehearsal import rehearse
    from laconic.probing.probe import check
    from laconic.script.probing import launch, per_host

    try:
        cable = parse(link)
        check(2, seconds)
        rehearsal = None
        if cable.bits_per_second is not None:
            rehearsal = partial(rehearse, link=cable, island_size=per_host(context.args))
        code = launch(context.args, out, seconds, rehearsal)
    except (ValueError, TypeError) as error:
        fail(error)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        typer.echo("laconic probe: interrupted; nothing was written", err=True)
    elif code:
        typer.echo(f"laconic probe: it ended without a result, exit code {code}; nothing was written", err=True)
    raise typer.Exit(code)
