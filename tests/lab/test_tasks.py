"""What is trained in a comparison."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.lab import tasks
from laconic.lab.template import TEMPLATE


@pytest.mark.parametrize("name", ["bytes-gpt:500k", "digits"])
def test_a_task_is_the_same_again_and_can_be_learnt(name: str) -> None:
    losses = []
    for _ in range(2):
        task = tasks.load(name)
        torch.manual_seed(0)
        model = task.model()
        optimizer, batches = task.optimizer(model), task.batches(0, 2, 5)
        with torch.no_grad():
            before = task.evaluate(model)
        for _ in range(12):
            loss: Any = task.loss(model, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append((before, task.evaluate(model.eval())))
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]


def test_ranks_and_seeds_have_batches_of_their_own() -> None:
    task = tasks.load("bytes-gpt")
    assert task.name == "bytes-gpt:1m"
    first = [next(task.batches(rank, 2, seed)) for rank, seed in [(0, 0), (1, 0), (0, 1)]]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize(("size", "millions"), [("500k", 0.5), ("1m", 0.9), ("2m", 2.1), ("5m", 4.9), ("20m", 19.2)])
def test_sizes_are_what_they_are_called(size: str, millions: float) -> None:
    task = tasks.load(f"bytes-gpt:{size}")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in task.model().parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.06)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("byte-gpt", "did you mean bytes-gpt"),
        ("bytes-gpt:3m", "no size '3m'; there are 500k, 1m"),
        ("nowhere.py", "laconic new-task"),
    ],
)
def test_what_is_no_task_is_refused(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        tasks.load(text)


def test_the_template_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "my_task.py"
    path.write_text(TEMPLATE.replace("{name}", path.name))
    task = tasks.load(str(path))
    model = task.model()
    assert isinstance(task.optimizer(model), torch.optim.Optimizer)
    assert task.loss(model, next(task.batches(0, 1, 0))).item() > 0
    with torch.no_grad():
        assert task.evaluate(model) > 0
    path.write_text(path.read_text().split("def evaluate")[0])
    assert tasks.load(str(path)).evaluate(model) > 0, "evaluate may be left out"


@pytest.mark.parametrize(
    ("text", "kind", "pattern"),
    [
        ("def model(): return 3", ValueError, r"must define optimizer\(model\)"),
        ("import no_such_thing", ModuleNotFoundError, "no_such_thing"),
        (
            "model = optimizer = batches = loss = print",
            TypeError,
            r"model\(\) in .* must return a torch.nn.Module, got NoneType",
        ),
    ],
)
def test_errors_in_a_users_file(text: str, kind: type[Exception], pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(kind, match=pattern):
        tasks.load(str(path)).model()
