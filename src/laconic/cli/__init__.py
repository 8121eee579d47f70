"""The command line, a file a command. `laconic --help` imports neither torch nor the lab."""

import os

from laconic.run.environment import expect_no_effect

EXTRA = {"numpy", "plotly", "pyroute2", "rich", "sklearn", "typer"}  # the modules of the extra `lab`, in pyproject.toml


def _lacking(error: ImportError) -> SystemExit:
    """What to say, in a line, where one of them is not installed."""
    name = (error.name or "typer").partition(".")[0]
    return SystemExit(
        f"the laconic command needs {name}, which `pip install .` leaves out; in laconic's folder: pip install '.[lab]'"
    )


try:
    from laconic.cli.shared import app
except ImportError as error:
    raise _lacking(error) from error

from laconic.cli import compare, run, probe, advise, records, catalogue, doctor  # noqa: E402, F401, I001  # in the order of --help

expect_no_effect()  # of LACONIC_STRATEGY: no script is trained in this process

__all__ = ["EXTRA", "app", "main"]


def main() -> None:
    """The program."""
    try:
        app()
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name in EXTRA:
            raise _lacking(error) from error
        if name == "torch" or f"{os.sep}torch{os.sep}" in (error.path or ""):
            why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"can't be imported ({error})"
            raise SystemExit(f"this command needs torch, which {why}; `laconic doctor` says how to install it") from error
        raise
