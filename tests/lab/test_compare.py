"""`laconic compare` and its companions, as a user calls them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from laconic.cli import app
from laconic.lab import host_speeds
from laconic.lab.compare import _record
from laconic.report import comparison_records as records
from laconic.report.live_comparison import Board
from tests.lab.test_link import LOCKED_DOWN, missing, needs_link, needs_user_namespaces
from tests.report.made import result
from tests.script.test_scripts import BESIDE


def laconic(*arguments: str, folder: Path) -> Result:
    """In this process, which has torch already; the workers are processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(app, arguments)


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache without warm starts; the probes of this machine are those of all tests."""
    host_speeds.folder().mkdir(parents=True, exist_ok=True)
    (folder / "laconic").mkdir(parents=True)
    (folder / "laconic" / "hosts").symlink_to(host_speeds.folder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


TINY = ["compare", "digits", "-s", "bf16()", "--workers", "2", "--steps", "20", "--out", "out"]


@needs_link
def test_a_comparison_and_its_record(tmp_path: Path) -> None:
    done = laconic(*TINY, "--link", "50mbit", folder=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "digits, 2 workers, link 50mbit" in done.stdout
    assert "Measured on digits" in " ".join(done.stdout.split())
    data = json.loads((tmp_path / "out/results.json").read_text())
    assert data["version"] == 1
    assert [run["strategy"] for run in data["runs"]] == ["ddp()", "bf16()", "silent()"]
    by = {run["strategy"]: run for run in data["runs"]}
    for run in data["runs"]:
        bytes_ = run["wire_bytes_per_step"]
        assert bytes_["counted"] == pytest.approx(bytes_["predicted"], rel=0.01), run["strategy"]
        assert len(run["curve"]) >= 5
        assert run["wait_ms"] <= run["step_ms"]
        assert run["curve"][-1][0] == 20
    assert by["bf16()"]["wire_bytes_per_step"]["counted"] == pytest.approx(
        by["ddp()"]["wire_bytes_per_step"]["counted"] / 2, rel=0.01
    )
    assert by["ddp()"]["wire_bytes_per_step"]["kernel"] == pytest.approx(
        by["ddp()"]["wire_bytes_per_step"]["counted"], rel=0.15
    )
    assert by["silent()"]["step_ms"] < by["ddp()"]["step_ms"]
    assert by["silent()"]["expected_step_ms"] < by["bf16()"]["expected_step_ms"] < by["ddp()"]["expected_step_ms"]
    assert "The cost model was off by" in " ".join(done.stdout.split())

    again = laconic(*TINY, "--link", "50mbit", "--resume", folder=tmp_path)
    assert again.exit_code == 0
    assert json.loads((tmp_path / "out/results.json").read_text()) == data, "nothing is run twice"
    shown = laconic("show", "out", folder=tmp_path)
    assert "bf16()" in shown.stdout
    other = laconic(*TINY, "--link", "10mbit", "--resume", folder=tmp_path)
    assert other.exit_code == 1
    assert "not the same comparison" in other.stderr


@pytest.mark.soak
def test_equal_time_from_a_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    asked = ["compare", "digits", "-s", "bf16()", "--workers", "2", "--link", "none", "--seconds", "1", "--warm", "12"]
    done = laconic(*asked, "--out", "out", folder=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "warm start, seed 0: 12 steps of ddp() without a limit" in done.stdout
    data = json.loads((tmp_path / "out/results.json").read_text())
    assert (data["seconds"], data["warm"]) == (1.0, 12)
    assert all(0.3 < run["seconds"] < 3 for run in data["runs"])
    assert all(run["curve"][-1][0] == run["steps"] for run in data["runs"])
    words = " ".join(done.stdout.split())
    assert "after 1 s a loss" in words
    assert "seeds: laconic compare digits -s 'bf16()' --workers 2 --link none --seconds 1.0 --warm 12 --out out" in words
    both = laconic(*asked, "--steps", "20", folder=tmp_path)
    assert both.exit_code == 1
    assert "give one of them" in both.stderr


@pytest.mark.soak
def test_a_warm_start_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "cache", monkeypatch)
    asked = ["compare", "digits", "-s", "bf16()", "--workers", "2", "--link", "none", "--seconds", "1", "--warm", "12"]
    done = laconic(*asked, "--out", "out", folder=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    (kept,) = (tmp_path / "cache/laconic/warm").iterdir()
    before = kept.stat().st_mtime_ns
    again = laconic(*asked, "--out", "again", "--seeds", "1", folder=tmp_path)
    assert "warm start" not in again.stdout
    assert kept.stat().st_mtime_ns == before
    kept.write_bytes(b"damaged")
    damaged = laconic(*asked, "--out", "third", folder=tmp_path)
    assert damaged.exit_code == 1
    assert f"the warm start {kept} can't be used" in damaged.stderr


@needs_link
@pytest.mark.soak
def test_the_same_seed_gives_the_same_losses_and_the_first_comparison_is_kept(tmp_path: Path) -> None:
    done = [laconic(*TINY, "--link", "50mbit", folder=tmp_path) for _ in range(2)]
    assert [each.exit_code for each in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "what was in out before is kept there as results-1.json and report-1.html" in done[1].stdout
    names = ("results-1.json", "results.json")
    runs = [json.loads((tmp_path / "out" / name).read_text())["runs"] for name in names]
    first, second = ([run["val_loss"] for run in each] for each in runs)
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--link", "100"], "a link is a rate with its unit"),
        (["-s", "dilco()"], "diloco"),
        (["-s", "diloco(period=0)"], "period"),
        (["digit"], "did you mean digits"),
        (["--workers", "1"], "--workers must be at least 2, got 1"),
        (["--link", "0.5kbit"], "a link has a rate from 10kbit to 10tbit"),
    ],
)
def test_bad_arguments(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = laconic("compare", *arguments, folder=tmp_path)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_a_users_file_is_shown_once(tmp_path: Path) -> None:
    made = laconic("new-task", "mine.py", folder=tmp_path)
    assert made.exit_code == 0
    assert laconic("new-task", "mine", folder=tmp_path).exit_code == 1, "it is not overwritten, and its name ends with .py"
    nowhere = laconic("new-task", "nodir/mine.py", folder=tmp_path)
    assert (nowhere.exit_code, nowhere.stderr) == (1, "error: there is no folder nodir; make it first\n")
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(
        text.replace("    return nn.functional.cross_entropy(model(batch), batch.argmax(1))", "    return nowhere")
    )
    done = laconic("compare", "mine.py", "-s", "bf16()", "--workers", "2", "--link", "none", "--steps", "10", folder=tmp_path)
    assert done.exit_code == 1
    assert done.stderr.count("NameError: name 'nowhere' is not defined") == 1
    assert done.stderr.count("Traceback") == 1
    assert "mine.py" in done.stderr
    assert "worker.py" not in done.stderr, "the lab's own frames tell a user nothing"
    (tmp_path / "mine.py").write_text("import sys; sys.exit()")
    gone = laconic("compare", "mine.py", folder=tmp_path)
    assert gone.exit_code == 1
    assert gone.stderr.count("SystemExit") == 1


@pytest.mark.soak
def test_a_reducer_of_the_users_own(tmp_path: Path) -> None:
    """In a module beside the task file, and in the task file itself, where it is registered; from another folder."""
    (tmp_path / "there").mkdir()
    laconic("new-task", "there/own_task.py", folder=tmp_path)
    (tmp_path / "there/beside.py").write_text(BESIDE)
    with (tmp_path / "there/own_task.py").open("a") as file:
        file.write(BESIDE.replace("@dataclass", "@laconic.register\n@dataclass").replace("Plain", "Registered"))
    mine = ["-s", "ddp(reducer=beside:Plain())", "-s", "ddp(reducer=Registered())"]
    more = ["--workers", "2", "--link", "none", "--steps", "10", "--out", "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        done = laconic("compare", "there/own_task.py", *mine, *more, folder=tmp_path)
    sys.modules.pop("beside")
    assert done.exit_code == 0, done.stdout + done.stderr
    by = {run["strategy"]: run for run in json.loads((tmp_path / "out/results.json").read_text())["runs"]}
    assert list(by) == [
        "ddp()", "ddp(reducer=beside:Plain())", "ddp(reducer=laconic_task_own_task:Registered())", "silent()"
    ]  # fmt: skip
    losses = {run["val_loss"] for name, run in by.items() if name != "silent()"}
    assert len(losses) == 1, "it is an all-reduce"


@pytest.mark.soak
def test_a_worker_that_dies(tmp_path: Path) -> None:
    laconic("new-task", "mine.py", folder=tmp_path)
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(
        text.replace("    draw =", "    import os; rank == 1 and os.kill(os.getpid(), 9)\n    draw =")
    )
    done = laconic("compare", "mine.py", "-s", "bf16()", "--workers", "2", "--link", "none", "--steps", "10", folder=tmp_path)
    assert done.exit_code == 1
    assert "worker 1 was killed by SIGKILL" in done.stderr
    assert not (tmp_path / "laconic-compare").exists()


@needs_user_namespaces
@pytest.mark.soak
def test_without_a_link_the_time_is_predicted_and_says_so(tmp_path: Path) -> None:
    tiny = ["compare", "digits", "-s", "ddp()", "--workers", "2", "--steps", "10", "--out", "out", "--link", "10mbit"]
    command = [*LOCKED_DOWN, sys.executable, "-m", "laconic.cli", *tiny]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "can't be had here" in done.stdout
    assert "PREDICTED, not measured" in done.stdout
    assert "NOT limited" in done.stdout
    data = json.loads((tmp_path / "out/results.json").read_text())
    ddp, silent = data["runs"]
    assert ddp["wire_bytes_per_step"]["kernel"] is None
    wire_ms = ddp["wire_bytes_per_step"]["counted"] * 8 / 10e6 * 1e3
    assert ddp["predicted_step_ms"] > wire_ms, "the bytes at the link's rate, and what comes on top"
    assert ddp["expected_step_ms"] < wire_ms, "without the link, which it did not have"
    assert silent["predicted_step_ms"] == silent["expected_step_ms"], "a link is nothing to it"


def told(**end: Any) -> dict[str, list[dict[str, Any]]]:
    """What workers would tell of 10 steps, of which 5 were timed."""
    look = {"step": 10, "seconds": 0.5, "timed": 5, "loss": float("nan"), "bytes": 1e7, "kernel": None}
    ended = {"wait_seconds": 0.4, "predicted": 2e7, "expected_ms": [90.0, 170.0]}
    return {"look": [look], "pace": [], "end": [{**ended, **end}]}


def test_waiting_is_of_the_timed_steps_as_the_step_is() -> None:
    made = _record("ddp()", 0, told(), limited=True)
    assert (made.step_ms, made.wait_ms) == (100, 80)
    assert made.val_loss is None, "it was no number"
    assert made.wire_bytes_per_step == {"counted": 1e6, "predicted": 2e6, "kernel": None}
    assert (made.expected_step_ms, made.predicted_step_ms) == (90, None)
    assert made.curve == [[10, 0.5, 1e7, None]]
    more = told(wait_seconds=None)
    more["look"][0]["kernel"] = 3e7
    more["pace"] = [{"rows": [[1, 0]]}, {"rows": [[2, 0], [3, 0]]}]
    made = _record("ddp()", 4, more, limited=True)
    assert (made.seed, made.wire_bytes_per_step["kernel"], made.wait_ms, made.pace) == (4, 3e6, None, [[1, 0], [2, 0], [3, 0]])


def test_a_link_that_could_not_be_had_is_predicted_beside_what_was() -> None:
    made = _record("ddp()", 0, told(), limited=False)
    assert (made.step_ms, made.expected_step_ms, made.predicted_step_ms) == (100, 90, 170)


def left_over(mark: str) -> list[str]:
    """Processes whose command line or job speaks of it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.soak
@pytest.mark.parametrize(
    "signal_", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)], ids=["Ctrl-C", "kill -9"]
)
def test_stopped_in_the_middle_nothing_is_left_and_it_can_go_on(signal_: signal.Signals, tmp_path: Path) -> None:
    link = "100mbit" if missing is None else "none"
    mark = f"seen{os.getpid()}{signal_}"
    arguments = [*TINY, "--link", link, "--steps", "30"]
    command = [sys.executable, "-m", "laconic.cli", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/results.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(left_over(mark)) >= 4, "it is in the middle"
    process.send_signal(signal_)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == (130 if signal_ == signal.SIGINT else -9)
    if signal_ == signal.SIGINT:
        assert "--resume goes on" in output
    deadline = time.monotonic() + 60
    while left_over(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(mark) == []
    assert list(tmp_path.rglob("*.partial")) == []
    before = records.read(tmp_path / "out").runs
    assert len(before) in (1, 2), "it was in the middle"
    done = laconic(*arguments, "--resume", folder=tmp_path)
    assert done.exit_code == 0, done.stderr
    after = records.read(tmp_path / "out").runs
    assert [run.strategy for run in after] == ["ddp()", "bf16()", "silent()"]
    assert after[: len(before)] == before, "what was finished is not run again"


@pytest.mark.soak
def test_a_full_disk_is_said_before_the_work(tmp_path: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\nfrom laconic.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *TINY], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_live_table_moves() -> None:
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    with Board(console, ["ddp()", "silent()"], "100 steps", seeds=1) as board:
        board.begin("ddp()")
        board.heard("ddp()", {"kind": "plan", "steps": 100})
        board.heard("ddp()", {"step": 10, "bytes": 1e6})
        time.sleep(0.01)
        board.heard("ddp()", {"step": 50, "bytes": 5e6, "loss": 2.5})
        half = board.table()
        (ddp,) = (run for run in result(("ddp()", 1.0, 100, 1000)).runs)
        board.finish(ddp)
        whole = board.table()
    for table, words in ((half, ["ddp()", "2.500", "5 MB"]), (whole, ["1.000", "10.0", "10 kB"])):
        text = io.StringIO()
        Console(file=text, width=100).print(table)
        assert all(word in text.getvalue() for word in words), text.getvalue()
    assert "ddp()" in console.file.getvalue()  # type: ignore[attr-defined]


def test_help_is_quick_and_list_is_whole(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['laconic', '--help']\nfrom laconic.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout
    listed = laconic("list", folder=tmp_path).stdout
    for name in ("streaming_diloco(", "powersgd(", "Quantized(", "Bytes: ", "arXiv:2311.08105"):
        assert name in listed
