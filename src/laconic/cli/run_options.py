"""The options of `laconic run` may stand among torchrun's, in any order before the script."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

HELP = ("-h", "--help")


class RunCommand(TyperCommand):
    """Reads its own options from anywhere before the script, and leaves torchrun's and the script in `context.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if ctx.resilient_parsing else sorted_out(args, by_word(self)))


def by_word(command: Any) -> dict[str, bool]:
    """A command's options, by each of their names; whether a value follows."""
    return {
        word: not getattr(one, "is_flag", False) for one in command.params for word in [*one.opts, *one.secondary_opts]
    } | dict.fromkeys(HELP, False)


def sorted_out(arguments: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """laconic's own options, `--`, and then the rest in its order. With `--advise`, what `laconic advise` has too is its own.

    >>> own = {"-s": True, "--record": True, "--tensorboard": False}
    >>> " ".join(sorted_out(["--nproc-per-node", "2", "--record", "x", "train.py", "-s", "3"], own))
    '--record x -- --nproc-per-node 2 train.py -s 3'
    """
    pieces, rest = _pieces(arguments, own)
    shared = set(_of_advise()) - set(HELP) if any(piece == ["--advise"] for piece in pieces) else set()
    mine, others = list[str](), list[str]()
    for piece in pieces:
        name = _name(piece[0], own)
        lacking = name in own and own[name] and len(piece) == 1 and piece[0] == name
        if lacking:
            return piece  # its value: the parser says so
        (mine if name in own and name not in shared else others).extend(piece)
    return [*mine, "--", *others, *rest] if others or rest else mine


def _name(word: str, own: Mapping[str, bool]) -> str:
    """An option without the value that is written to it: `--record=x`, `-sint8`."""
    short = word[:2]
    return short if short in own and not word.startswith("--") else word.partition("=")[0]


def _pieces(arguments: Sequence[str], own: Mapping[str, bool]) -> tuple[list[list[str]], list[str]]:
    """Each option before the script, with its value; and the script with its arguments."""
    pieces, place = list[list[str]](), 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] not in ("-", "--"):
        word, following = arguments[place], arguments[place + 1 : place + 2]
        name = _name(word, own)
        known = own if name in own else _of_advise()
        value = known[name] and name == word if name in known else _torchrun_takes_value(word, following, own)
        pieces.append([word, *(following if value else [])])
        place += len(pieces[-1])
    rest = list(arguments[place:])
    return pieces, rest[1:] if rest[:1] == ["--"] else rest


def _of_advise() -> dict[str, bool]:
    from laconic.cli.shared import app

    return by_word(typer.main.get_command(app).commands["advise"])  # type: ignore[attr-defined]


def _torchrun_takes_value(word: str, following: Sequence[str], own: Mapping[str, bool]) -> bool:
    """As torchrun would read it; an option that nobody has is an error, with the name of the nearest."""
    from laconic.script.launch import option_names, takes_value
    from laconic.strategies.parsing import nearest

    try:
        value = takes_value(word, following)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if value is None:
        name = word.partition("=")[0]
        close = nearest(name, {*own, *option_names(), *_of_advise()})
        hint = close if "did you mean" in close else "; laconic run --help and torchrun --help list them"
        raise typer.BadParameter(f"neither laconic run nor torchrun has an option {name}{hint}")
    return value
