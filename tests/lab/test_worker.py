"""One worker, alone in this process: what it tells."""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic.lab import worker
from laconic.lab.template import TEMPLATE

SLOW_AT_THE_END = """
import time
def batches(rank, world, seed):
    for step in range(10**6):
        if step == 29:
            time.sleep(0.2)
        yield torch.randn(4, 32)
"""


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
    told = [json.loads(line.removeprefix(worker.WORD)) for line in capfd.readouterr().out.split("\n") if line]
    (pace,) = [facts["rows"] for facts in told if facts["kind"] == "pace"]
    assert len(pace) == 10
    assert pace[-1][0] > 200
    assert told[-1]["kind"] == "end"
    assert told[-1]["collectives"] == {"AllReduce": 1.0}
