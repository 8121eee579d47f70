"""Checkpoints of the Trainer: the averaged model, each rank's own part, and what is missing or damaged."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.integrations.transformers_jobs import (
    OUTSTANDING,
    Job,
    Result,
    mean,
    refused,
    same,
    started,
    train,
    trainer_of,
    weights_of,
)
from tests.live import last_ranks, ranks

RESUMED = Job(OUTSTANDING, steps=17, options={
    "save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear",
})  # fmt: skip  # steps 5 and 10 are in mid-period, with an exchange outstanding


def stop(trainer: Any, step: int) -> None:
    trainer.control.should_training_stop = step == 14


def kill(trainer: Any, step: int) -> None:
    if step == 14:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return ranks(2, train, tmp_path_factory.mktemp("whole"), RESUMED)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    folder = tmp_path_factory.mktemp("stopped")
    return folder, ranks(2, train, folder, replace(RESUMED, act=stop, watch=(5, 10)))


def copied(stopped: tuple[Path, list[Result]], folder: Path) -> Path:
    shutil.copytree(stopped[0], folder, dirs_exist_ok=True)
    return folder


def test_it_is_in_mid_period(stopped: tuple[Path, list[Result]]) -> None:
    _, results = stopped
    assert all(not same(results[0].watched[step], results[1].watched[step]) for step in (5, 10))


@pytest.mark.parametrize("checkpoint", [True, "checkpoint-5"])
def test_a_resumed_training_is_the_same_training(checkpoint: Any, stopped: Any, whole: list[Result], tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path)
    job = replace(RESUMED, resume=checkpoint if checkpoint is True else str(folder / checkpoint))
    for mine, other in zip(ranks(2, train, folder, job), whole, strict=True):
        assert same(mine.weights, other.weights)
        assert mine.column("loss")[-1] == other.column("loss")[-1]
        assert mine.column("learning_rate") == other.column("learning_rate")
        assert mine.stats.steps == 17
        assert mine.stats.collectives > other.stats.collectives  # what was outstanding is sent again
        assert not mine.said
    assert len(list(folder.glob("checkpoint-10/laconic/*"))) == 1  # what a former save left there is gone


def interrupted(rank: int, folder: Path) -> tuple[dict[str, Tensor], int, list[str]]:
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):  # type: ignore[misc]
        again = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 13 and not self.again:
                self.again = True
                raise KeyboardInterrupt

    with started(rank) as said:
        trainer = trainer_of(folder, RESUMED, [Interrupt()])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train(resume_from_checkpoint=True)
        return weights_of(trainer.model), trainer.laconic_run.stats().steps, said


def test_an_interrupted_trainer_can_go_on_by_itself(whole: list[Result], tmp_path: Path) -> None:
    for (weights, steps, said), other in zip(ranks(2, interrupted, tmp_path), whole, strict=True):
        assert same(weights, other.weights)
        assert steps == 17
        assert not said


@pytest.mark.parametrize("how", ["without parts", "save_only_model", pytest.param("by the Trainer", marks=pytest.mark.soak)])
def test_without_the_ranks_own_parts_replicas_are_equal_and_one_rank_warns(how: str, stopped: Any, tmp_path: Path) -> None:
    expected = None
    if how == "without parts":
        folder = copied(stopped, tmp_path)
        for part in folder.glob("checkpoint-*/laconic"):
            shutil.rmtree(part)
        expected = mean([one.watched[10] for one in stopped[1]])
    else:
        options = {**RESUMED.options, "save_only_model": how == "save_only_model"}
        ranks(
            2, train, tmp_path, replace(RESUMED, steps=10, kind="plain" if how.startswith("by") else "laconic", options=options)
        )
        assert not list(tmp_path.glob("checkpoint-*/laconic"))
        folder = tmp_path
    first, second = ranks(2, train, folder, replace(RESUMED, resume=True))
    assert same(first.begun, second.begun)
    if expected is not None:
        assert same(first.begun, expected)
    assert first.stats.steps == second.stats.steps == 17
    assert len(first.said) == 1
    assert "without its ranks' own parts" in first.said[0]
    assert "goes on from step 10" in first.said[0]
    assert not second.said
    assert same(first.weights, second.weights)


def test_a_torn_part_is_an_error_on_all_ranks(stopped: Any, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path)
    part = next(folder.glob("checkpoint-10/laconic/*/rank-00001-of-00002.pt"))
    part.write_bytes(part.read_bytes()[:3000])
    first, second = ranks(2, refused, folder, replace(RESUMED, resume=True))
    assert "rank 1" in first
    assert "can't be read" in first
    assert "can't be read" in second


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_goes_on(world: int, stopped: Any, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path)
    results = ranks(world, train, folder, replace(RESUMED, resume=str(folder / "checkpoint-10"), steps=12))
    for one in results:
        assert same(one.begun, mean([each.watched[10] for each in stopped[1]]))
        assert one.stats.steps == 12
        assert not one.said
        assert same(one.weights, results[0].weights)


@pytest.mark.soak
def test_killed_by_the_operating_system_and_resumed_to_the_same_bits(whole: list[Result], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(2, train, tmp_path, replace(RESUMED, act=kill))
    for mine, other in zip(ranks(2, train, tmp_path, replace(RESUMED, resume=True)), whole, strict=True):
        assert same(mine.weights, other.weights)
        assert mine.stats.steps == 17
        assert not mine.said
