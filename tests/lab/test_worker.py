"""One worker, alone in this process: what it tells."""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from laconic.lab import worker
from laconic.lab.template import TEMPLATE
from laconic.lab.trainee import build
from laconic.report.live_comparison import Board

SLOW_AT_THE_END = """
import time
def batches(rank, world, seed):
    for step in range(10**6):
        if step == 29:
            time.sleep(0.2)
        yield torch.randn(4, 32)
"""


WATCHES = """
import laconic
SEEDS = []
def model():
    SEEDS.append(torch.initial_seed())
    return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5))
def batches(rank, world, seed):
    assert (rank, world, seed) == (0, 1, 3)
    while True:
        yield torch.ones(4, 32)
def loss(model, batch):
    assert model.training
    SEEDS.append(torch.initial_seed())
    return model(batch).square().mean()
def evaluate(model):
    assert not isinstance(model, nn.parallel.DistributedDataParallel)
    assert SEEDS == [3] + [3000] * (len(SEEDS) - 1), SEEDS
    return float(model.training) + 2 * torch.is_grad_enabled() + 0.5
"""


def test_looks_are_of_the_model_at_rest_and_seeds_are_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "watches.py").write_text(TEMPLATE + WATCHES)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(worker, "TICK_SECONDS", 0.0)
    job = {"task": str(tmp_path / "watches.py"), "strategy": "diloco(4)", "seed": 3, "steps": 20}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        worker.train({**job, "looks": 8, "warmup": 5, "settle_seconds": 0.0})
    finally:
        dist.destroy_process_group()
    told = [json.loads(line.removeprefix(worker.LINE_PREFIX)) for line in capfd.readouterr().out.split("\n") if line]
    looks = [facts for facts in told if facts["kind"] == "look"]
    assert [look["step"] for look in looks] == [8, 10, 12, 15, 18, 20], "those of the warm-up are left out"
    assert [look["timed"] for look in looks] == [3, 5, 7, 10, 13, 15]
    assert {look["loss"] for look in looks} == {0.5}
    seconds = [look["seconds"] for look in looks]
    assert seconds == sorted(seconds)
    pace = [row for facts in told if facts["kind"] == "pace" for row in facts["rows"]]
    assert sum(took for took, _ in pace) / 1e3 <= seconds[-1] + 0.01, "of the timed steps, all of them"
    assert len(pace) == 15
    assert [facts["step"] for facts in told if facts["kind"] == "tick"] == list(range(1, 21))
    assert told[-1]["expected_ms"] == [], "nobody asked"


def test_the_pace_is_of_the_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(TEMPLATE + SLOW_AT_THE_END)
    monkeypatch.setattr(worker, "PACE", 10)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    job = {"task": str(tmp_path / "mine.py"), "strategy": "ddp()", "seed": 0, "steps": 30}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        worker.train({**job, "looks": 2, "warmup": 5, "settle_seconds": 0.0})
    finally:
        dist.destroy_process_group()
    told = [json.loads(line.removeprefix(worker.LINE_PREFIX)) for line in capfd.readouterr().out.split("\n") if line]
    (pace,) = [facts["rows"] for facts in told if facts["kind"] == "pace"]
    assert len(pace) == 10
    assert pace[-1][0] > 200
    assert told[-1]["kind"] == "end"


WARM = """
PLANNED = []
class Counted:
    def __init__(self, optimizer, steps):
        PLANNED.append(steps)
        self.optimizer, self.made = optimizer, 0
    def step(self):
        self.made += 1
        assert self.made <= PLANNED[-1]
        self.optimizer.param_groups[0]["lr"] = 1e-3 * (1 - self.made / PLANNED[-1])
def schedule(optimizer, steps):
    assert optimizer.state, "the warm start came with the optimizer's memory"
    return Counted(optimizer, steps)
def batches(rank, world, seed):
    while True:
        time.sleep(0.01)
        yield torch.full((4, 32), float(seed > 1000))
def evaluate(model):
    return float(model[0].weight.sum())
import time
"""


def test_a_run_of_so_many_seconds_begins_in_the_warm_start_and_its_schedule_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "warm.py").write_text(TEMPLATE + WARM)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    common = {"task": str(tmp_path / "warm.py"), "seed": 3}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        worker.warm_up({**common, "warm": 7, "save": str(tmp_path / "kept.pt")})
        kept = torch.load(tmp_path / "kept.pt")
        assert {int(state["step"]) for state in kept["optimizer"]["state"].values()} == {7}
        job = {**common, "strategy": "local_sgd(4, warmup=8)", "looks": 4, "warmup": 5, "settle_seconds": 0.0}
        ready = build({**job, "start": str(tmp_path / "kept.pt")})
        steps = worker.steps_within({**job, "seconds": 0.5}, ready)
        assert 20 <= steps <= 60, "of ten milliseconds and a little more each"
        now, there = ready.bare.state_dict(), kept["model"]
        assert all(torch.equal(now[name], there[name]) for name in there), "steps to know the pace by leave no trace"
        assert str(ready.optimizer.state_dict()) == str(kept["optimizer"])
        worker.train({**job, "seconds": 0.5, "start": str(tmp_path / "kept.pt")})
    finally:
        dist.destroy_process_group()
    told = [json.loads(line.removeprefix(worker.LINE_PREFIX)) for line in capfd.readouterr().out.split("\n") if line]
    (plan,) = [facts["steps"] for facts in told if facts["kind"] == "plan"]
    looks = [facts for facts in told if facts["kind"] == "look"]
    assert looks[-1]["step"] == plan
    assert 0.3 < looks[-1]["seconds"] < 1.5


def test_what_a_task_prints_is_told_line_by_line_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(worker, "MOST_SAID", 2)
    with redirect_stdout(worker.Said()):
        print("a", "b", sep="\n", end="")
        print("c" * 5000)
        print("one more\nand another")
    told = [json.loads(line.removeprefix(worker.LINE_PREFIX)) for line in capfd.readouterr().out.split("\n") if line]
    lines = ["a", "bc" + "c" * (worker.MOST_CHARACTERS - 2), "(more than 2 lines; the rest is left out)"]
    assert told == [{"kind": "said", "rank": "3", "line": line} for line in lines]
    console = Console(width=100, file=io.StringIO())
    with Board(console, ["ddp()"], "100 steps", seeds=1) as board:
        board.heard("ddp()", told[0])
    assert console.file.getvalue() == "ddp(), worker 3 prints: a\n"  # type: ignore[attr-defined]
