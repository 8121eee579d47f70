"""What the commands share: the application they register with, the console, and the end of a command that failed."""

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="PyTorch data-parallel training that communicates less: which strategy, for your model, over your link?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def fail(error: Exception) -> NoReturn:
    """Say what was wrong, and end with exit code 1."""
    from rich.console import Console

    Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1) from None


def console() -> "Console":
    """Where tables go; a file has no width."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=160)
