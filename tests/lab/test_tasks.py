"""What is trained in a comparison."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.lab import tasks
from laconic.lab.file_task import TaskError, blame
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


GOOD = (
    "from torch import nn\ndef optimizer(model): ...\ndef batches(rank, world, seed): ...\ndef loss(model, batch): return 3.0\n"
)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("def model(): return 3", r"must define optimizer\(model\)"),
        (GOOD + "def model(): pass", r"model\(\) in .*bad.py must return a torch.nn.Module, got NoneType: None"),
        ("import no_such_thing", "can't be imported:\nTraceback.*line 1.*ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def f():\n  raise ValueError('boom')\nf()", "Traceback.*line 3, in <module>.*line 2, in f.*ValueError: boom"),
        ("open('missing.txt')", "Traceback.*FileNotFoundError: .*missing.txt"),
        ("import sys; sys.exit()", "Traceback.*SystemExit"),
        ("def (", "bad.py can't be read:.*line 1\n.*SyntaxError: "),
        ("x = '\udcff'", "bad.py can't be read:.*SyntaxError: .*utf-8"),
    ],
)
def test_errors_in_a_users_file(text: str, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(TaskError, match=f"(?s){pattern}") as caught:
        tasks.load(str(path)).model()
    said = str(caught.value)
    assert said.count("Traceback") <= 1
    assert "importlib" not in said
    assert "laconic/lab" not in said


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("", r"loss\(model, batch\) in .*mine.py must return a tensor with one number.*got float: 3.0"),
        ("import torch\ndef loss(model, batch): return torch.ones(2, 3)", r"got a tensor of shape \(2, 3\)"),
        ("def loss(model, batch): return None", "got NoneType: None"),
    ],
)
def test_a_loss_that_is_none(text: str, pattern: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{GOOD}def model(): ...\n{text}")
    with pytest.raises(TaskError, match=pattern):
        tasks.load(str(tmp_path / "mine.py")).loss(torch.nn.Linear(1, 1), None)


def test_an_evaluate_that_gives_no_number(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{GOOD}def model(): ...\ndef evaluate(model): pass")
    with pytest.raises(TaskError, match=r"evaluate\(model\) in .*mine.py must return a number, got NoneType: None"):
        tasks.load(str(tmp_path / "mine.py")).evaluate(torch.nn.Linear(1, 1))


def test_the_loss_of_a_file_without_evaluate_is_the_mean_over_batches_that_nobody_trains_on(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
def model(): return nn.Linear(1, 1)
def optimizer(model): return 3
def batches(rank, world, seed):
    assert (rank, world) == (0, 1) and seed > 10**6 or seed == 0
    yield from range(1, 3 if seed == 0 else 100)
def loss(model, batch): return torch.tensor(float(batch)) + 100 * torch.is_grad_enabled()
"""
    (tmp_path / "mine.py").write_text(text)
    task = tasks.load(str(tmp_path / "mine.py"))
    model = task.model()
    assert task.evaluate(model) == 4.5, "of 1 to 8"
    with pytest.raises(TaskError, match=r"optimizer\(model\) in .*mine.py must return a torch.optim.Optimizer, got int: 3"):
        task.optimizer(model)
    batches = task.batches(0, 1, 0)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(TaskError, match=r"batches\(rank, world, seed\) in .*mine.py came to an end; let it go on for ever"):
        next(batches)


def test_a_file_may_import_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "laconic_neighbour.py").write_text("def model(): ...\n")
    (tmp_path / "mine.py").write_text(f"{GOOD}from laconic_neighbour import model\n")
    assert tasks.load(str(tmp_path / "mine.py")).name == "mine.py"


def test_blame_leaves_out_what_is_inside_torch(tmp_path: Path) -> None:
    text = "def loss(model, batch):\n  try:\n    return model(batch)\n  except RuntimeError as error:\n"
    text += "    raise KeyError from error\n"
    (tmp_path / "mine.py").write_text(f"{GOOD}def model(): ...\n{text}")
    task = tasks.load(str(tmp_path / "mine.py"))
    with pytest.raises(KeyError) as caught:
        task.loss(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.zeros(1, 3))
    said = blame(caught.value, str(tmp_path.resolve() / "mine.py"))
    assert "torch/nn" not in said
    assert "mat1 and mat2 shapes cannot be multiplied" in said, "the error that it came from"
    assert [line.strip() for line in said.splitlines() if "File" in line] == [
        f'File "{tmp_path.resolve()}/mine.py", line {line}, in loss' for line in (8, 10)
    ]
    assert said.endswith("frames inside torch and laconic are left out)")


def test_what_laconic_refuses_is_said_without_its_frames() -> None:
    with pytest.raises(ValueError, match="rank must be") as caught:
        laconic.powersgd(rank=0)
    assert blame(caught.value, "mine.py") == "ValueError: powersgd: rank must be a whole number, at least 1, got 0"


def test_blame_begins_with_the_users_frames(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{GOOD}def model():\n  return 1 / 0\n")
    task = tasks.load(str(tmp_path / "mine.py"))
    with pytest.raises(ZeroDivisionError) as caught:
        task.model()
    lines = blame(caught.value, str(tmp_path.resolve() / "mine.py")).splitlines()
    assert "mine.py" in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "test_blame" in blame(caught.value, "digits"), "all of it, where no file of the user's has a part in it"
