"""Each example is in the table, stays short, and runs by the very command that table and docstring give: `make examples`."""

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_docs import ROOT, finished

FOLDER = ROOT / "examples"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))
LONGEST_SECONDS = 20


class Row(NamedTuple):
    """What the table in examples/README.md says of a file."""

    file: str
    guide: str
    command: str
    seconds: int


def rows() -> list[Row]:
    line = r"^\| \[(\S+)\]\(\1\) \| \[[^|]+\]\((\S+?)\) \| [^|]+ \| `([^|]+)` \| (\d+) \| [^|]+ \|$"
    found = re.findall(line, (FOLDER / "README.md").read_text(), re.MULTILINE)
    return [Row(file, guide, command, int(seconds)) for file, guide, command, seconds in found]


def docstring(file: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / file).read_text())) or ""


def commands(file: str) -> list[str]:
    """Those of its docstring, in order, each with the variables that are exported before it."""
    found, exported = [], ""
    for line in re.findall(r"^    (\S.*)$", docstring(file), re.MULTILINE):
        command = exported + re.sub(r"\s+# .*", "", line)
        exported = f"{command}; " if line.startswith("export ") else ""
        found += [] if exported else [command]
    return found


def test_the_table_has_every_example_with_its_command() -> None:
    assert sorted(row.file for row in rows()) == FILES
    assert {row.file: row.command for row in rows()} == {file: commands(file)[0] for file in FILES}
    assert set(CHECKS) == set(FILES), "each has a check of what it prints, below"


@pytest.mark.parametrize("file", FILES)
def test_an_example_is_short_and_says_what_to_look_at(file: str) -> None:
    assert len((FOLDER / file).read_text().splitlines()) < 100
    (seconds,) = re.findall(r"^About (\d+) seconds (?:each )?on 2 cores\. Look at ", docstring(file), re.MULTILINE)
    (row,) = [row for row in rows() if row.file == file]
    assert int(seconds) == row.seconds <= LONGEST_SECONDS
    assert f"../examples/{file}" in (FOLDER / row.guide.split("#")[0]).read_text(), "its guide has a link to it"


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command of a docstring, in a folder that has the examples as a clone has them."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(FOLDER)
    done = finished(["bash", "-c", command], folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done


def table(output: str) -> dict[str, list[float]]:
    """The numbers behind each strategy; of 1/4.0 the 4.0."""
    found = re.findall(r"^(\w+\(.*\)) +([\d./ -]+)$", output, re.MULTILINE)
    return {name.strip(): [float(number.removeprefix("1/")) for number in numbers.split()] for name, numbers in found}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def held_out_loss(output: str) -> str:
    (found,) = re.findall(r"held-out loss (\d\.\d{6})", output)
    return str(found)


def compression(output: str) -> None:
    found = table(output)
    assert [round(found[name][1]) for name in ("ddp()", "bf16()", "int8()")] == [1, 2, 4]
    losses = [loss for _, _, loss, _ in found.values()]
    assert len(losses) == 6
    assert max(losses) < 1.15 * min(losses)


def local_updates(output: str) -> None:
    found = table(output)
    assert len(found) == 5
    _, _, less, replica, average = found.pop("ddp()")
    assert (less, replica) == (1, average), "replicas are equal"
    for syncs, _, less, replica, average in found.values():
        assert syncs > 10
        assert less > 5
        assert average < replica


def delayed(output: str) -> None:
    silent, *others = table(output).values()
    assert len(others) == 4
    losses = [loss for _, loss in others]
    assert max(losses) < 1.05 * min(losses)
    assert max(losses) < silent[1]


def fsdp2(output: str) -> None:
    assert "step 64: loss" in output
    (sent, plain) = re.findall(r"([\d.]+) kB a step and rank between islands; ddp\(\) would send ([\d.]+) kB", output)[0]
    assert float(sent) < float(plain) / 20


def resume(output: str) -> None:
    assert "rank 1 is killed after step 33" in output
    assert "goes on from step 30" in output
    assert re.search(r"60 steps, weights \w{16}", output)


def custom_reducer(output: str) -> None:
    assert "3 simulated ranks agree on the mean" in output
    lines = re.findall(r"([\d,]+) bytes predicted, ([\d,]+) counted, loss (\S+)", output)
    (plain, _, loss), (predicted, counted, with_fewer) = lines
    assert predicted == counted
    assert number(plain) == pytest.approx(4 * number(counted), rel=1e-3)
    assert float(with_fewer) < 1.2 * float(loss)


def framework(output: str) -> None:
    (sent, plain) = re.findall(r"([\d,]+) bytes; ddp\(\) sends ([\d,]+)", output)[0]
    assert number(sent) < number(plain) / 2
    assert held_out_loss(output) < "3.8"


def elastic(output: str) -> None:
    assert "b was killed" in output
    assert re.search(r"b begins at step [1-9]\d+ with a, b, c", output), output
    assert len(set(re.findall(r"step 384: (loss 2\.\d+, a, b, c are there)", output))) == 1, output


def gpt(output: str) -> None:
    assert "int8() is attached to GPT (834,304 parameters)" in output
    assert re.search(r"step 60 seconds \S+ loss [23]\.", output)


CHECKS: dict[str, Callable[[str], None]] = {
    "accelerate_loop.py": framework,
    "compression.py": compression,
    "custom_reducer.py": custom_reducer,
    "delayed.py": delayed,
    "elastic.py": elastic,
    "fsdp2.py": fsdp2,
    "gpt.py": gpt,
    "lightning_trainer.py": framework,
    "local_updates.py": local_updates,
    "resume.py": resume,
    "transformers_trainer.py": framework,
}


@pytest.mark.example
@pytest.mark.parametrize("file", FILES)
def test_an_example_runs(file: str, tmp_path: Path) -> None:
    done = run(commands(file)[0], tmp_path)
    CHECKS[file](done.stdout + done.stderr)


@pytest.mark.soak
@pytest.mark.parametrize("file", [file for file in FILES if CHECKS[file] is framework])
def test_an_example_resumes_to_the_same_loss(file: str, tmp_path: Path) -> None:
    first, second = commands(file)
    assert held_out_loss(run(first, tmp_path).stdout) == held_out_loss(run(second, tmp_path).stdout)


@pytest.mark.soak
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    killed, undisturbed = (run(command, tmp_path).stdout for command in commands("resume.py"))
    assert re.findall(r"weights (\w+)", killed) == re.findall(r"weights (\w+)", undisturbed)


@pytest.mark.soak
def test_a_sharded_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    save = commands("fsdp2.py")[2]
    run(save, tmp_path)
    assert (tmp_path / "checkpoints/step-00000064").is_dir()
    steps = [int(step) for step in re.findall(r"step (\d+): loss", run(save, tmp_path).stdout)]
    assert min(steps) > 64
    assert (tmp_path / f"checkpoints/step-{max(steps):08}").is_dir()


@pytest.mark.soak
@pytest.mark.parametrize(("file", "place"), [("fsdp2.py", 1), ("gpt.py", 1), ("custom_reducer.py", 1)])
def test_the_other_commands_run(file: str, place: int, tmp_path: Path) -> None:
    assert "loss" in run(commands(file)[place], tmp_path).stdout
