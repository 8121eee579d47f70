"""Scripts that build several DDPs, one after another or side by side, under `laconic run`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic.run.run import engine_of
from tests.live import ranks
from tests.script.test_scripts import SCRIPTS, Launch, launch

__all__ = ["launch"]  # the fixture

RUNS = 10  # that the script makes: three fits, three turns, two modules, two modules
State = dict[str, Tensor]


def by_hand(rank: int, text: str) -> tuple[list[State], list[tuple[int, int]], int]:
    """The same loops in blocks of attach: weights, (steps, bytes) by run, runs with an exchange outstanding at their end."""
    from tests.script.scripts.fits import everything

    runs: list[laconic.Run] = []
    outstanding = 0

    @contextmanager
    def around(ddp: DistributedDataParallel, optimizer: Optimizer) -> Iterator[None]:
        nonlocal outstanding
        with laconic.attach(ddp, optimizer, text) as run:
            runs.append(run)
            yield
            deltas = engine_of(run).local.deltas
            outstanding += deltas is not None and deltas.outstanding

    nets = everything(around)
    return [net.state_dict() for net in nets], [(run.stats().steps, run.stats().wire_bytes) for run in runs], outstanding


def recorded(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Steps and bytes of each run, as the meter has them."""
    found = []
    for number in range(1, RUNS + 1):
        path = (folder if number == 1 else folder / f"run-{number}") / f"rank-{rank}.jsonl"
        end = json.loads(path.read_text().splitlines()[-1])
        assert (end["kind"], end["failure"]) == ("end", None)
        found.append((end["steps"], end["wire_bytes"]))
    return found


SOAK = ["int8()", "diloco(8, warmup=4)"]
STREAMING = "streaming_diloco(period=8, fragments=2, delay=3, warmup=8)"


@pytest.mark.soak
@pytest.mark.parametrize("text", [STREAMING, *(pytest.param(text, marks=pytest.mark.soak) for text in ("ddp()", *SOAK))])
def test_every_fit_is_trained_by_the_strategy_and_touched_by_nothing_stale(text: str, tmp_path: Path, launch: Launch) -> None:
    done = launch(text, SCRIPTS / "fits.py", str(tmp_path), options=("--record", str(tmp_path / "record")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count(" is attached to Sequential") == RUNS
    finals = [torch.load(tmp_path / f"final-{rank}.pt") for rank in range(2)]
    for one, other in zip(*finals, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one if "running" not in key)
    for rank, (states, counted, outstanding) in enumerate(ranks(2, by_hand, text)):
        assert (outstanding >= RUNS // 2) == (text == STREAMING), "else this shows less than it should"
        assert recorded(tmp_path / "record", rank) == counted
        assert all(steps > 0 and sent > 0 for steps, sent in counted)
        for one, other in zip(finals[rank], states, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
