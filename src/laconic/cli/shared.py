"""What the commands share: the application they register with, the console, examples, and the end of a command that failed."""

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="PyTorch data-parallel training that communicates less: which strategy, for your model, over your link?",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OVERVIEW = """laconic: PyTorch data-parallel training that communicates less. Five things to do with it:

1. Ask whether the network is your problem, and which strategy would help. It answers in a second; nothing runs.
     laconic advise --params 124m --step-ms 90 --workers 8 --link 1gbit
2. Compare strategies on a model of your own, over a limited link on this machine.
     laconic new-task mine.py
     laconic compare mine.py --link 100mbit
3. Train a script as it is, under a strategy.
     laconic run -s "int8()" --nproc-per-node 4 train.py
4. Watch a run from another terminal while it goes on, and make a page with charts of it.
     laconic run -s "int8()" --record runs/first --nproc-per-node 4 train.py
     laconic watch runs/first
     laconic report runs/first
5. See which strategies there are, and whether this machine has all it takes.
     laconic list
     laconic doctor

All commands: laconic --help. Options and examples of one: laconic compare --help.
Completion in your shell, of strategies too: laconic --install-completion."""


def _version(wanted: bool) -> None:
    if wanted:
        from laconic import __version__

        typer.echo(f"laconic {__version__}")
        raise typer.Exit


@app.callback()
def _overview(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print laconic's version and exit")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(OVERVIEW)


def examples(*commands: str, after: str = "") -> str:
    """The end of a command's help: commands that work as they are, and what must have been run before."""
    return "\n\n".join([f"Examples{f', after {after}' if after else ''}:", *commands])


def fail(error: Exception) -> NoReturn:
    """Say what was wrong, and end with exit code 1."""
    from rich.console import Console

    words = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        words = f"{error.filename}: {error.strerror}"  # without the number
    Console(stderr=True).print(f"error: {words}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1) from None


def console() -> "Console":
    """Where tables go; a file has no width."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=160)
