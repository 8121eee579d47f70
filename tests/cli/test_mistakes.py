"""What a user gets wrong ends with one line or few that say what to do, and never with a traceback."""

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laconic.cli import app

NUMBERS = ["advise", "--params", "124m", "--step-ms", "90"]
CLUSTER = ["--workers", "8", "--link", "1gbit"]
MISTAKES = [
    (["compere"], "No such command 'compere'"),
    (["--verison"], "No such option"),
    (["compare", "--strateg", "int8()"], "No such option"),
    (["compare", "-s", "INT8()"], "did you mean 'int8'?"),
    (["compare", "-s", "QSR(4, 0.02)"], "write local_sgd(QSR(4, 0.02))"),
    (["compare", "-s", "ddp(reducer=int8())"], "use reducer=Quantized(bits=8), or int8() by itself"),
    (["compare", "-s", "powersgd(rank=0)"], "rank must be a whole number, at least 1, got 0"),
    (["compare", "-s", "int8("], "'(' was never closed"),
    (["compare", "-s", ""], "write a strategy as name(key=value, ...)"),
    (["compare", "-s", "ddp(reducer=nowhere:Mine())"], "there is no module 'nowhere'"),
    (["compare", "nowhere.py"], "make one with: laconic new-task nowhere.py"),
    (["compare", "bytes-gpt:3m"], "there are 500k, 1m, 2m, 5m, 20m"),
    (["compare", "bytesgpt"], "did you mean bytes-gpt?"),
    (["compare", "--workers", "two"], "valid integer"),
    (["compare", "--workers", "3", "--island-size", "2"], "--workers must be a multiple of --island-size"),
    (["compare", "--link", "fast"], "a link is a rate with its unit"),
    (["compare", "--steps", "3"], "greater than or equal to 10"),
    (["compare", "--steps", "20", "--seconds", "5"], "give one of them"),
    (["compare", "digits", "--out", "/proc/nope"], "nothing can be written into --out /proc/nope"),
    (["compare", "digits", "--out", "a_file"], "--out must be a folder, and a_file is a file"),
    (["compare", "text.txt"], "there is no task 'text.txt'. Tasks: bytes-gpt:500k"),
    (["run"], "which script?"),
    (["run", "-s", "int8()"], "which script?"),
    (["run", "--nproc-per-node", "2", "-s", "int8()"], "which script?"),
    (["run", "--nproc-per-node", "2", "-s"], "Option '-s' requires an argument"),
    (["run", "--strateg", "int8()", "a_script.py"], "has an option --strateg; did you mean '--strategy'?"),
    (["run", "--nproc-per-nod=2", "--nproc-per-nodes", "2", "a_script.py"], "has an option --nproc-per-nodes; did you mean"),
    (["run", "--advise", "--worker", "4", "a_script.py"], "has an option --worker; did you mean '--workers'?"),
    (["run", "nowhere.py"], "there is no script nowhere.py"),
    (["run", "-s", "int8()", "--nproc-per-node", "2"], "which script?"),
    (["run", "a_script.py"], 'which strategy? laconic run -s "int8()"'),
    (["run", "-s", "int8()", "nowhere.py"], "there is no script nowhere.py"),
    (["run", "--nproc-per-node", "2", "-s", "int8()", "--record", "/proc/nope", "a_script.py"], "--record /proc/nope can't be"),
    (["run", "--nproc-per-node", "2", "--elastic", "--record", "x", "-s", "int8()", "a_script.py"], "don't go together"),
    (["run", "-s", "int8()", "--record", "/proc/nope", "a_script.py"], "--record /proc/nope can't be made"),
    (["run", "-s", "int8()", "--tensorboard", "a_script.py"], "--record names"),
    (["run", "-s", "int8()", "--risk", "same", "a_script.py"], "--risk is what auto() may choose"),
    (["run", "-s", "int8()", "--elastic", "--record", "x", "a_script.py"], "--record and --elastic don't go together"),
    (["run", "-s", "int8()", "--max-restarts", "many", "a_script.py"], "torchrun refuses its options"),
    (["run", "--advise", "a_script.py"], "for how many workers, and over which network?"),
    (["advise"], "which network?"),
    ([*NUMBERS], "which network?"),
    ([*NUMBERS, "--link", "1gbit"], "--workers"),
    ([*NUMBERS, *CLUSTER, "--risk", "much"], "same, rounding, delay"),
    ([*NUMBERS, *CLUSTER, "--share", "2"], "--share must be above 0"),
    ([*NUMBERS, *CLUSTER, "--optimizer", "lion"], "--optimizer is adam"),
    ([*NUMBERS, *CLUSTER, "--budget", "much"], "budget"),
    ([*NUMBERS, *CLUSTER, "--out", "/proc/nope"], "nothing can be written into --out /proc/nope"),
    (["advise", "--params", "many", "--step-ms", "90", *CLUSTER], "written as 124m, 1.3b or 7000000"),
    (["advise", "--params", "1b", *CLUSTER], "how long does a step compute?"),
    (["advise", "--params", "1b", "--step-ms", "0.4s", *CLUSTER], "--step-ms must be a number of ms, such as 420, got '0.4s'"),
    (["advise", "--params", "1b", "--step-ms", "0ms", *CLUSTER], "--step-ms must be a number above 0, got 0"),
    ([*NUMBERS, "--workers", "8", "--link", "1GB/s"], "B are bytes, of 8 bits each"),
    ([*NUMBERS, "--workers", "8", "--probe", "nowhere.json"], "nowhere.json"),
    (["probe"], "a probe needs two processes at least"),
    (["probe", "--seconds", "900"], "a probe takes from"),
    (["probe", "--nproc-per-node", "2", "train.py"], "no script"),
    (["watch", "nowhere", "--once"], "nowhere"),
    (["watch", "runs/fist", "--wait", "0"], "no run has written into runs/fist within 0 s; --wait SECONDS waits longer."),
    (["watch", "runs/fist", "--wait", "0"], "Beside it there is runs/first."),
    (["report", "nowhere"], "nowhere"),
    (["show", "nowhere"], "is it the --out of a comparison?"),
    (["show", "damaged"], "damaged"),
    (["list", "int9"], "did you mean"),
    (["list", "int8(bits=4)"], "int8 has no 'bits'"),
    (["list", "Quantized(bit=8)"], "Quantized has no 'bit'; did you mean 'bits'?"),
    (["list", "Every(0)"], "got 0"),
    (["list", "Nesterov(rate=1)"], "Nesterov has no 'rate'"),
    (["new-task", "a_script.py"], "a_script.py is there already; give another name"),
    (["new-task", "nowhere/mine.py"], "there is no folder nowhere"),
    (["new-task", "/proc/mine.py"], "/proc/mine.py"),
    (["doctor", "now"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "wanted"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake(arguments: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (tmp_path / "a_script.py").write_text("print('trained')\n")
    (tmp_path / "a_file").touch()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "rank-0.jsonl").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "results.json").write_text("{")
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, arguments)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit), done.exception
    assert wanted in said
    assert len(done.stderr.splitlines()) <= 12, done.stderr
    assert (
        done.stdout.startswith("runs/fist does not exist yet; waiting 0 s for a run")
        if "--wait" in arguments
        else not done.stdout
    )
