"""Islands: workers that hold one model together, on one host behind one link."""

import copy
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from laconic.cli import app
from laconic.lab import tasks, worker
from laconic.lab.compare import Comparison, begin, resumed
from laconic.lab.islands import island_mesh
from laconic.lab.template import TEMPLATE
from laconic.lab.trainee import build, step
from laconic.report import page, terminal
from laconic.script.launch import launch
from tests.lab.test_compare import laconic
from tests.lab.test_link import LIMITED, needs_link
from tests.live import ranks
from tests.report.made import result

# Blocks in a sequence and in a list, one of them without parameters; and odd sizes, of which one worker has more than another.
BLOCKS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 33)
        self.blocks = nn.Sequential(nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 33))
        self.more = nn.ModuleList([nn.Linear(33, 33), nn.ModuleList([nn.LayerNorm(33)])])
        self.last = nn.Linear(33, 32)
    def forward(self, x):
        x = self.blocks(self.first(x))
        return self.last(self.more[1][0](self.more[0](x)))
def model():
    return Net()
"""


def whole(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in states.items()}


def memory(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = optimizer.state_dict()["state"]
    return whole({f"{index}.{name}": value for index, state in found.items() for name, value in state.items()})


def shards_and_replicas(rank: int, folder: str) -> None:
    """An island of two trains as two replicas do, from the same warm start."""
    common = {"task": f"{folder}/net.py", "seed": 3}
    worker.warm_up({**common, "warm": 4, "save": f"{folder}/kept.pt"})
    torch.distributed.barrier()
    job = {**common, "start": f"{folder}/kept.pt"}
    plain, sharded = build(job), build(job, island_mesh(2))
    assert (plain.replicas, sharded.replicas) == (2, 1)
    model: Any = sharded.model
    parts = {name for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    assert parts == {"", "blocks.0", "blocks.2", "more.0"}, "ReLU has no parameters, and a list no forward"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    def same() -> None:
        for one, other in [
            (plain.bare.state_dict(), whole(model.state_dict())),
            (memory(plain.optimizer), memory(sharded.optimizer)),
        ]:
            torch.testing.assert_close(one, other)

    same()
    assert memory(sharded.optimizer)["0.step"] == 4
    assert worker.evaluate(sharded) == pytest.approx(plain.task.evaluate(plain.bare), rel=1e-5)
    for trainee in (plain, sharded):
        batches = trainee.task.batches(rank, 2, 0)
        for _ in range(3):
            step(trainee, next(batches))
    same()


def test_an_island_trains_as_replicas_do_and_begins_in_their_warm_start(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TEMPLATE + BLOCKS)
    ranks(2, shards_and_replicas, str(tmp_path))


def islands_and_replicas(rank: int, folder: str) -> None:
    """Two islands of two under ddp() end where four replicas do; and steps to know the pace by leave no trace."""
    common = {"task": f"{folder}/net.py", "seed": 3}
    worker.warm_up({**common, "warm": 4, "save": f"{folder}/kept.pt"})
    torch.distributed.barrier()
    job = {**common, "start": f"{folder}/kept.pt", "looks": 4, "warmup": 5, "settle_seconds": 0.0}
    mesh, losses = island_mesh(2), []
    ready = build(job, mesh)
    before = copy.deepcopy((whole(ready.bare.state_dict()), memory(ready.optimizer)))
    assert worker.steps_within({**job, "strategy": "diloco(4)", "seconds": 0.3}, ready) >= 10
    torch.testing.assert_close((whole(ready.bare.state_dict()), memory(ready.optimizer)), before, rtol=0, atol=0)
    for islands in (None, mesh):
        facts: list[Mapping[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "tell", facts.append)
            worker.train({**job, "strategy": "ddp()", "steps": 16}, islands)
        losses.append([fact["loss"] for fact in facts if fact["kind"] == "look"])
        assert [fact["predicted"] > 0 for fact in facts if fact["kind"] == "end"] == [True] * (rank == 0)
    assert len(losses[0]) == (3 if rank == 0 else 0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.soak
def test_islands_under_ddp_end_where_replicas_do(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TEMPLATE + BLOCKS)
    ranks(4, islands_and_replicas, str(tmp_path))


@pytest.mark.parametrize(
    ("workers", "island_size", "sentence"),
    [
        (5, 2, "--workers must be a multiple of --island-size, got 5 and 2"),
        (3, 4, "--workers must be a multiple of --island-size, got 3 and 4"),
        (3, 3, "--workers must be at least twice --island-size, got 3 and 3: one island alone has nobody"),
    ],
)
def test_workers_that_make_no_islands_are_refused(workers: int, island_size: int, sentence: str, tmp_path: Path) -> None:
    done = laconic("compare", "digits", "--workers", str(workers), "--island-size", str(island_size), folder=tmp_path)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_record_names_its_islands_and_others_are_not_resumed(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"task": "digits", "strategies": ["ddp()"], "workers": 4, "steps": 10}
    results = begin(Comparison(**asked, island_size=2))
    results.runs = result(("ddp()", 1.0, 100, 1000)).runs
    results.write(tmp_path)
    resumed(begin(Comparison(**asked, island_size=2)), Comparison(**asked, island_size=2), tmp_path)
    with pytest.raises(ValueError, match=r"is of digits, 2 islands of 2 workers, .* asked is digits, 4 workers, link none"):
        resumed(begin(Comparison(**asked)), Comparison(**asked), tmp_path)
    text = io.StringIO()
    terminal.show(results, Console(file=text, width=160))
    for words in (text.getvalue(), page.page(results)):
        assert "digits, 2 islands of 2 workers, link none" in words
        assert "Bytes are between islands alone" in words


@pytest.mark.soak
@needs_link
def test_a_comparison_of_islands_and_its_record(tmp_path: Path) -> None:
    tiny = ["compare", "digits", "-s", "diloco(period=4)", "--workers", "4", "--island-size", "2", "--steps", "20"]
    done = laconic(*tiny, "--link", "100mbit", "--out", "out", folder=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert "digits, 2 islands of 2 workers, link 100mbit" in words
    assert (
        "laconic compare digits -s 'diloco(period=4)' --workers 4 --island-size 2 --link 100mbit --steps 20 --out out" in words
    )
    data = json.loads((tmp_path / "out/results.json").read_text())
    assert (data["workers"], data["island_size"]) == (4, 2)
    by = {run["strategy"]: run for run in data["runs"]}
    assert list(by) == ["ddp()", "diloco(period=4)", "silent()"]
    for run in by.values():
        assert run["wire_bytes_per_step"]["counted"] == pytest.approx(run["wire_bytes_per_step"]["predicted"], rel=0.01)
        assert run["curve"][-1][0] == 20
        assert run["val_loss"] < 2.3, "it learns"
    sent = by["ddp()"]["wire_bytes_per_step"]
    parameters = sum(parameter.numel() for parameter in tasks.load("digits").model().parameters())
    assert sent["counted"] == pytest.approx(4 * parameters / 2, rel=0.05), "between two islands, half of them by each worker"
    assert sent["kernel"] == pytest.approx(sent["counted"], rel=0.15)
    assert by["diloco(period=4)"]["wire_bytes_per_step"]["counted"] == pytest.approx(sent["counted"] / 4, rel=0.05)


@pytest.mark.parametrize(("island_size", "new"), [(None, {}), ("2", {"LACONIC_ISLAND_SIZE": "2"})])
def test_the_scripts_processes_are_told_the_island_size(island_size: str | None, new: dict[str, str]) -> None:
    given: list[Mapping[str, str]] = []

    def rehearsal(command: list[str], processes: int, environment: Mapping[str, str]) -> int:
        given.append(environment)
        return processes

    arguments = ["--nproc-per-node", "4", __file__]
    assert launch("diloco(64)", arguments, rehearsal=rehearsal, island_size=island_size) == 4
    assert {name: value for name, value in given[0].items() if name not in os.environ} == {
        "LACONIC_STRATEGY": "diloco(period=64)",
        **new,
    }


@pytest.mark.soak
@needs_link
def test_a_rehearsal_of_islands(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\nnames = ('RANK', 'GROUP_RANK', 'LOCAL_RANK', 'LACONIC_ISLAND_SIZE')\n"
        "sys.stdout.write(' '.join(['numbers', *map(os.environ.get, names)]) + '\\n')\n"
    )
    asked = ["run", "-s", "ddp()", "--link", str(LIMITED), "--island-size", "2", "--nproc-per-node"]
    done = CliRunner().invoke(app, [*asked, "4", str(script)])
    assert done.exit_code == 0, done.stdout + done.stderr
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("numbers"))
    assert found == ["numbers 0 0 0 2", "numbers 1 0 1 2", "numbers 2 1 0 2", "numbers 3 1 1 2"]
    odd = CliRunner().invoke(app, [*asked, "3", str(script)])
    assert odd.exit_code == 1
    assert "--nproc-per-node must be a multiple of --island-size, got 3 and 2" in odd.stderr
