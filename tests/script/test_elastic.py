"""`laconic run --elastic`: an unchanged script as workers that may die, in real processes."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from laconic.script.elastic_launch import Plan, run_workers
from tests.script.test_scripts import ENVIRONMENT, SCRIPTS

RUN = [sys.executable, "-m", "laconic.cli", "run", "--elastic", "-s", "diloco(4)"]


class Printed:
    """What a process prints, as it prints it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.text = ""
        assert process.stderr is not None
        self._thread = threading.Thread(target=self._read, args=(process.stderr,), daemon=True)
        self._thread.start()

    def _read(self, lines: "list[str]") -> None:
        for line in lines:
            self.text += line

    def until(self, pattern: str, times: int = 1, seconds: float = 60) -> list[str]:
        deadline = time.monotonic() + seconds
        while len(found := re.findall(pattern, self.text)) < times:
            assert time.monotonic() < deadline, f"{pattern!r} was not printed {times} times in {seconds} s:\n{self.text}"
            time.sleep(0.05)
        return found

    def whole(self) -> str:
        self._thread.join(10)
        return self.text


def workers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "laconic.script" in child.cmdline()]


def end(process: "subprocess.Popen[str]") -> None:
    """The launcher and its workers, where these are still there."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()


@pytest.mark.soak
def test_a_worker_that_is_killed_is_started_again_and_goes_on_where_the_others_are(tmp_path: Path) -> None:
    command = [*RUN, "--min-replicas", "2", "--nproc-per-node", "2", str(SCRIPTS / "long.py"), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        printed = Printed(process)
        try:
            printed.until(r"worker \S+ trains by diloco\(period=4\) from step 0 on, with \S+-0, \S+-1", 2)
            workers_of(process)[1].kill()
            printed.until(r"worker \S+-1 ended with 137; it is started again in 1 s, for the 1\. time of 3")
            printed.until(r"worker \S+-1 trains by diloco\(period=4\) from step ([1-9]\d*) on")
            (tmp_path / "enough").touch()
            code, said = process.wait(60), printed.whole()
        finally:
            end(process)
    assert code == 0, said
    assert len(re.findall(r"worker \S+ ends after step \d+: \d+ syncs", said)) == 2, said
    assert all(torch.load(path)["weight"].isfinite().all() for path in tmp_path.glob("final-*.pt"))
    assert len(list(tmp_path.glob("final-*.pt"))) == 2


@pytest.mark.soak
def test_ctrl_c_ends_all_workers(tmp_path: Path) -> None:
    command = [*RUN, "--nproc-per-node", "2", str(SCRIPTS / "long.py"), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True) as process:
        printed = Printed(process)
        try:
            printed.until(r"trains by diloco", 2)
            workers = workers_of(process)
            os.killpg(process.pid, 2)
            code, said = process.wait(60), printed.whole()
        finally:
            end(process)
    assert code == 130, said
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    assert "Traceback" not in said, said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"min_replicas": 0}, "--min-replicas must be at least 1"),
        ({"min_replicas": 3}, "more than the 2 workers of --nproc-per-node.*--bind"),
        ({"max_restarts": -1}, "--max-restarts at least 0"),
        ({"deadline_seconds": 0.0}, "--deadline-seconds above 0"),
        ({"bind": "203.0.113.9"}, "bind must be an address of this machine.*'203.0.113.9'"),
    ],
)
def test_what_cannot_be_started_is_refused(changed: dict[str, object], words: str) -> None:
    given = {"min_replicas": 1, "max_restarts": 3, "deadline_seconds": 60.0, **changed}
    with pytest.raises(ValueError, match=words):
        run_workers(Plan("diloco(4)", ["nothing.py"], 2, **given))  # type: ignore[arg-type]
