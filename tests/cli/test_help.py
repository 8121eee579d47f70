"""What the command line teaches: its overview, the examples that end each help, completion, and what imports it makes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import laconic
from laconic.cli import app, completing
from laconic.lab import tasks
from laconic.script.launch import options
from laconic.strategies.recipe import recipes
from laconic.strategies.strategy import RISKS

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
EXAMPLES = [line for command in COMMANDS.values() for line in (command.epilog or "").split("\n\n")[1:]]
TOOK_OVER = ("run", "probe")  # commands that pass options on to torchrun


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_alone_it_shows_five_things_with_commands_that_are_there() -> None:
    done = called()
    assert done.exit_code == 0
    assert re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("     laconic ")]
    assert {line.split()[1] for line in lines} <= COMMANDS.keys()
    for line in lines:
        parse(line)


def parse(line: str) -> None:
    """A line as a shell and the command would read it, without running it."""
    program, name, *words = shlex.split(line)
    assert program == "laconic"
    context = COMMANDS[name].make_context(f"laconic {name}", words)  # an unknown option is an error
    given = context.params.get("strategy") or []
    for text in [given] if isinstance(given, str) else given:
        laconic.strategy(text)  # an error, if it is none
    if name in TOOK_OVER and not context.params.get("advise"):
        options([*context.args, *(["script.py"] if name == "probe" else [])])


def test_every_command_ends_with_two_examples() -> None:
    for name, command in COMMANDS.items():
        head, *lines = (command.epilog or "").split("\n\n")
        assert head.startswith("Examples"), name
        assert len(lines) >= 2, name
        assert all(line.startswith(f"laconic {name}") for line in lines)


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_is_a_command_with_options_that_are_there(line: str) -> None:
    parse(line)
    assert len(line) <= 78, "in a terminal of 80 columns it would be folded, and could not be copied"


def test_an_example_is_shown_whole_at_the_end_of_the_help() -> None:
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["advise", "--help"]).stdout
    *_, one, other = (line.strip() for line in shown.splitlines() if line.strip())
    assert [one, other] == COMMANDS["advise"].epilog.split("\n\n")[1:]


def test_version() -> None:
    done = called("--version")
    assert (done.exit_code, done.stdout) == (0, f"laconic {laconic.__version__}\n")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("laconic compare -s strea", "streaming_diloco"),
        ("laconic run --strategy loc", "local_adam"),
        ("laconic compare dig", "digits"),
        ("laconic doc", "doctor"),
        ("laconic advise --risk r", "rounding"),
    ],
)
def test_completion(words: str, wanted: str) -> None:
    environment = {"_LACONIC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = CliRunner(env=environment).invoke(app, [], prog_name="laconic")
    assert wanted in done.stdout.split()


def test_completion_and_help_import_no_torch() -> None:
    code = "import sys; from laconic.cli import app, completing; assert completing.recipes(); app([], standalone_mode=False)\n"
    code += "assert not {'torch', 'numpy', 'plotly', 'laconic.strategies'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_that_are_completed_are_those_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completing.recipes().keys() == recipes().keys()
    assert all(completing.recipes().values())
    assert tasks.NAMES == completing.TASKS
    assert list(RISKS) == completing.RISKS
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.py").touch()
    (tmp_path / "notes.txt").touch()
    assert list(completing.tasks("m")) == ["mine.py", "more/"]
    assert list(completing.tasks("more/o")) == ["more/other.py"]
    assert list(completing.tasks("nowhere/")) == []


def test_the_list_shows_texts_and_no_internals() -> None:
    listed = called("list").stdout
    for internal in ("mappingproxy", "<factory>", "object at", "Bytes: Bytes"):
        assert internal not in listed
    assert "hierarchical_sgd(periods={4: 'node', 16: 'world'}" in listed
    assert "Warmup(start, inner, before=Exact())" in listed
    calls, found = [line for line in listed.splitlines() if re.match(r"  \w+\(", line)], listed.split("\n  ")
    assert len(calls) > 30
    assert all(part.count("Bytes: ") <= 1 for part in found)


def test_a_name_in_the_list_shows_all_its_arguments() -> None:
    for name, words in (("streaming_diloco", ["outlier", "carry", "arXiv:2501.18512"]), ("post_local_sgd", ["subgroup"])):
        told = called("list", name).stdout
        assert all(word in told for word in words)
        assert ">>>" not in told
    done = called("list", "dilocco")
    assert (done.exit_code, done.stderr) == (1, "error: laconic has no 'dilocco'; did you mean 'diloco'?\n")
