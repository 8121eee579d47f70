"""A worker that is killed: every survivor hears of it in one sentence, and its model is what it was."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.comm import group as polling
from laconic.comm.collectives import Collective
from laconic.local import parameter_averaging as averaging
from tests.live import last_ranks
from tests.models import build, chain, vectors, weights

KILLED_AT = 5


def normalised() -> nn.Module:
    """DDP broadcasts its buffers in each forward."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def until_killed(rank: int, text: str, folder: str, victim: int, make: Callable[[], nn.Module]) -> None:
    model = build(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def remember(*_: object) -> None:
        before[:] = [parameter.detach().clone() for parameter in model.parameters()]

    optimizer.register_step_post_hook(remember)  # before anything is averaged
    try:
        with laconic.attach(model, optimizer, text):
            for step in range(100):
                if (rank, step) == (victim, KILLED_AT):
                    os.kill(os.getpid(), signal.SIGKILL)
                remember()
                model(vectors(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        finite = all(bool(tensor.isfinite().all()) for tensor in weights(model))
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        Path(folder, str(rank)).write_text(f"{type(error).__name__}|{finite}|{same}|{error}")


CASES = [("bf16()", 2, chain), ("diloco(3)", 0, chain), ("ddp()", 1, normalised)]
MORE = [
    (text, victim, chain)
    for text in ("bf16()", "ddp(reducer=ErrorFeedback(PowerSGD(1)))", "diloco(3)", "local_sgd(3)")
    for victim in (0, 2)
]


@pytest.mark.parametrize(
    ("text", "victim", "make"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE if case not in CASES)]
)
def test_survivors_are_told(text: str, victim: int, make: Callable[[], nn.Module], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(3, until_killed, text, str(tmp_path), victim, make)
    found = {int(file.name): file.read_text().split("|", 3) for file in tmp_path.iterdir()}
    assert set(found) == {0, 1, 2} - {victim}
    for kind, finite, same, sentence in found.values():
        assert finite == "True"
        if kind == "CommunicationError":
            assert sentence.startswith(str(laconic.strategy(text)))
            assert f"step {KILLED_AT + 1}" in sentence
            assert "averaging" in sentence or "broadcast of buffers" in sentence
        else:  # heard from another survivor, or that the store is gone
            assert kind == "UnevenError"
            assert re.search(f"rank [0-2] failed in step {KILLED_AT + 1} with|store", sentence), sentence
        assert same == "True", "its own last step, and nothing of an average"


def until_killed_in_the_middle(rank: int, atomic: bool, folder: str) -> None:
    """Rank 1 dies when three of the parameters' many chunks have been averaged."""
    averaging.CHUNK_BYTES = 64
    launch, left = polling.TorchGroup.launch, 3

    def launch_some(group: polling.TorchGroup, collective: Collective) -> Any:
        nonlocal left
        if collective.tensor.dtype == torch.float32:
            if left == 0:
                time.sleep(1)  # what it launched arrives everywhere
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return launch(group, collective)

    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: own.__setitem__(slice(None), weights(model)))
    with pytest.raises(RuntimeError), laconic.attach(model, optimizer, laconic.local_sgd(3, atomic=atomic)) as run:
        for step in range(100):
            if (rank, step) == (1, 2):
                polling.TorchGroup.launch = launch_some  # type: ignore[assignment, method-assign]
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same = [torch.equal(a, b) for a, b in zip(own, weights(model), strict=True)]
    Path(folder, str(rank)).write_text(f"{run.stats().steps} {sum(same)} {len(same)}")


@pytest.mark.parametrize("atomic", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_loss_in_the_middle_of_averaging(atomic: bool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(3, until_killed_in_the_middle, atomic, str(tmp_path))
    found = {int(file.name): [int(word) for word in file.read_text().split()] for file in tmp_path.iterdir()}
    assert set(found) == {0, 2}
    for steps, same, tensors in found.values():
        assert steps == 3
        assert same == tensors if atomic else 0 < same < tensors
