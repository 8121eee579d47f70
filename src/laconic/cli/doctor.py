"""`laconic doctor`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli.shared import app, console, examples

if TYPE_CHECKING:
    from rich.console import Console

    from laconic.cli.machine import Findings


@app.command(epilog=examples("laconic doctor", "laconic doctor --json"))
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="what was found as JSON, version 1: see docs/run.md")] = False,
) -> None:
    """Say what is installed, what works on this machine, and what is missing, with the command that installs it.

    Versions, torch's backends, collectives between two processes on gloo, a compiler for kernels, and whether links can be
    emulated. It takes some seconds. The exit code is 0, or 1 if laconic can't work here at all.
    """
    from laconic.cli.machine import examine

    found = examine()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        show(found, console())
    raise typer.Exit(1 if found.broken else 0)


def show(found: "Findings", screen: "Console") -> None:
    """A line a finding, what is missing, and whether laconic works."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, words in lines(found):
        table.add_row(name, words)
    screen.print(table, markup=False, highlight=False)
    if found.missing:
        screen.print("\nnot installed, each for one use alone:", style="bold", highlight=False)
    for one in found.missing:
        screen.print(f"  {one.what}, for {one.use}", highlight=False, markup=False)
        if one.command is not None:
            screen.print(f"      {one.command}", style="cyan", highlight=False, markup=False, soft_wrap=True)
    if found.broken:
        screen.print(f"\nlaconic can't work here: {found.broken}", style="red", highlight=False, markup=False)
    else:
        screen.print("\nlaconic works here.", highlight=False)


def lines(found: "Findings") -> list[tuple[str, str]]:
    """What was found, in words."""
    from laconic import __version__

    python, machine = found.python, found.machine
    threads = machine["OMP_NUM_THREADS"]
    said = [
        ("laconic", f"{__version__}, in {python['laconic']}"),
        ("Python", f"{python['version']}, {python['executable']}"),
        ("system", machine["system"]),
        ("CPU", f"{machine['cores']} cores, {machine['usable_cores']} usable; OMP_NUM_THREADS is {threads or 'not set'}"),
        *_torch(found),
    ]
    by_extra: dict[str | None, list[str]] = {}
    for one in found.packages:
        by_extra.setdefault(one.extra, []).append(f"{one.name} {one.problem or one.version}")
    said += [(f"extra {extra}" if extra else "beside", ", ".join(by_extra[extra])) for extra in by_extra if extra is not None]
    delays = ", with delays, too (netem)" if found.delays is None else f"; delays: {_without(found.delays)}"
    said.append(("limited links", found.links or f"can be emulated (network namespaces, tbf){delays}"))
    return said


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _without(delays: str) -> str:
    """Why there are none; an error number, which the kernel gives where its module is missing, says no more."""
    missing = "no delays (netem)" in delays and "No such file" in delays
    return "not possible, this kernel has no netem" if missing else delays


def _torch(found: "Findings") -> list[tuple[str, str]]:
    torch = found.torch
    if "error" in torch:
        return [("torch", torch["error"])]
    device = torch["accelerator"] or "no accelerator"
    build = f"{torch['build']}{', a debug build' if torch['debug'] else ''}"
    on = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in torch["backends"].items())
    said = [
        ("torch", f"{torch['version']}, built for {build}; {torch['cpu_capability']}, {_threads(torch['threads'])}; {device}"),
        ("backends", on if torch["distributed"] else "torch.distributed is not in this build"),
    ]
    works = [name for name, problem in found.collectives.items() if problem is None]
    fails = [f"{name} fails: {problem}" for name, problem in found.collectives.items() if problem is not None]
    if found.collectives:
        said.append(("on gloo", "; ".join([f"{', '.join(works)} work between two processes", *fails] if works else fails)))
    return [*said, ("kernels", _kernels(found))]


def _kernels(found: "Findings") -> str:
    kernels = found.kernels
    if kernels is None or kernels.get("refused"):
        return f"can't be kept: {kernels['refused']}" if kernels else "not known"
    compiler = kernels["compiler"] or "no C++ compiler"
    failed = f", {kernels['failed']} failed to compile" if kernels["failed"] else ""
    use = {True: "always used", False: "switched off by LACONIC_FUSED=0", "auto": "compiled when they are first needed"}
    return (
        f"{compiler}; {kernels['cached']} of {kernels['known']} cached in {kernels['folder']}{failed}; {use[kernels['fused']]}"
    )
