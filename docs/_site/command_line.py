"""The page of the command line, from the commands themselves."""

import re
from collections.abc import Iterator
from typing import Any

from plain_markdown import from_docstring


def command_line() -> str:
    """Every command with its help, its arguments and its options."""
    import typer

    from laconic.cli import app

    program: Any = typer.main.get_command(app)
    parts = list(_command("laconic", program))
    for name, command in program.commands.items():
        parts += [] if command.hidden else _command(f"laconic {name}", command)
    return "\n\n".join(part for part in parts if part)


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    yield f"## {name}"
    yield _text(command.help)
    yield f"```text\n{' '.join([name, *command.collect_usage_pieces(context)])}\n```"
    for kind in ("argument", "option"):
        found = [one.get_help_record(context) for one in command.params if one.param_type_name == kind]
        rows = [f"| `{names}` | {_cell(said)} |" for names, said in filter(None, found)]  # a hidden one has no record
        yield "\n".join([f"| {kind} | |", "|---|---|", *rows]) if rows else ""
    yield _text(command.epilog)


def _text(text: str | None) -> str:
    return from_docstring((text or "").replace("\b\n", ""), lambda line: line)


def _cell(text: str) -> str:
    return re.sub(r"([|<*_])", r"\\\1", text)
