"""Writes the answers in docs/network.md anew: `python docs/network_examples.py`. A test compares them with the tool's."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from laconic.cli import app

PAGE = Path(__file__).with_name("network.md")
BLOCK = re.compile(r"```\n\$ laconic (advise .*?)\n(.*?)```", re.DOTALL)
# What is left out of an answer, by the comment behind its command; without one, what is below the table.
LEFT_OUT = {
    "all of it": re.compile(r"(?!)"),
    "the end of it": re.compile(r"\A.*?(?=^choice: )", re.DOTALL | re.MULTILINE),
    "": re.compile(r"^share: .*?(?=^choice: )", re.DOTALL | re.MULTILINE),
}


def answered(page: str) -> str:
    """The page, with what each command says now."""

    def block(found: re.Match[str]) -> str:
        command, _, comment = found[1].partition("  # ")
        said = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False).stdout
        lines = LEFT_OUT[comment].sub("[...]\n\n", said).rstrip().splitlines()
        text = "\n".join(line.rstrip() for line in lines)
        return f"```\n$ laconic {found[1]}\n{text}\n```"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(answered(PAGE.read_text()))
