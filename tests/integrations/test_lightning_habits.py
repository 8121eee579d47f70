"""Lightning: what else its users have beside the callback, and a training that is killed."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.frameworks import KilledError, as_torchrun_starts
from tests.integrations.test_lightning import equal, mean, same
from tests.integrations.test_lightning_checkpoints import STREAMING, lost, names, saved, train
from tests.live import ranks

ROOT = Path(__file__).parents[2]

# Other callbacks


def placed(rank: int, folder: Path, place: str) -> Any:
    from laconic.integrations.lightning import LaconicCallback
    from tests.integrations.lightning_runs import Look, Module, copied, made, numbers, saver

    class Configures(Module):
        def configure_callbacks(self) -> list[Any]:
            return [LaconicCallback(STREAMING)] if place == "configured" else []

    with as_torchrun_starts(rank, 2) as said:
        module, look = Configures(rank), Look()
        options = {"limit_val_batches": 1, "val_check_interval": 2}
        trainer, _ = made(None if place == "configured" else STREAMING, [look, saver(folder, monitor="held_out")], **options)
        if place == "first":
            trainer.callbacks.reverse()
        trainer.fit(module, numbers(8), numbers(1))
    return {"weights": copied(module.net), "own": look.own, "seen": module.seen, "said": said}


def test_the_place_among_callbacks_does_not_matter(tmp_path: Path) -> None:
    outcomes = {place: ranks(2, placed, tmp_path / place, place) for place in ("last", "first", "configured")}
    for place, found in outcomes.items():
        assert equal(found)
        assert same(found[0]["weights"], outcomes["last"][0]["weights"])
        assert not found[0]["said"]
        for step in (2, 4, 6, 8):
            wanted = mean([one["own"][step - 1] for one in found])
            assert same(saved(tmp_path / place / f"{step}.ckpt"), wanted)
            assert same(found[0]["seen"][step // 2 - 1], wanted)


def averaged(rank: int, strategy: str, kind: str) -> Any:
    from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    from tests.integrations.lightning_runs import Module, copied, made, numbers

    with as_torchrun_starts(rank, 2) as said:
        module, other = Module(rank), EMAWeightAveraging() if kind == "EMA" else StochasticWeightAveraging(1e-3, 1)
        made(strategy, [other], max_epochs=3)[0].fit(module, numbers(4))
    return {"weights": copied(module.net), "said": said}


@pytest.mark.parametrize("kind", ["EMA", "Stochastic"])
def test_an_average_over_time_is_each_ranks_own(kind: str) -> None:
    outcomes = ranks(2, averaged, "int8()", kind)
    assert equal(outcomes)
    assert not outcomes[0]["said"]
    first, second = ranks(2, averaged, "diloco(5)", kind)
    (sentence,) = first["said"]
    assert f"{kind}WeightAveraging averages over time what each rank has" in sentence
    assert not second["said"]


def tuned(rank: int, folder: Path) -> Any:
    from pytorch_lightning.callbacks import LearningRateFinder

    from tests.integrations.lightning_runs import Module, copied, made, numbers

    class Tuned(Module):
        lr = 1e-5

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=self.lr)

    with as_torchrun_starts(rank, 2) as said:
        module = Tuned(rank)
        trainer, hook = made("diloco(4)", [LearningRateFinder(num_training_steps=30)], default_root_dir=folder)
        trainer.fit(module, numbers(40))
    return {"weights": copied(module.net), "lr": module.lr, "stats": hook.run.stats(), "said": said}


def test_a_learning_rate_is_found_without_the_strategy_and_used_with_it(tmp_path: Path) -> None:
    outcomes = ranks(2, tuned, tmp_path)
    assert equal(outcomes)
    for one in outcomes:
        assert one["lr"] == outcomes[0]["lr"] != 1e-5
        assert (one["stats"].steps, one["stats"].syncs) == (40, 10)
        assert not one["said"], "what the finder has loaded is no checkpoint of a strategy"
    assert not names(tmp_path)


# Other ways to checkpoints


def with_a_test_between(rank: int, folder: Path) -> Any:
    from tests.integrations.lightning_runs import Module, copied, made, numbers, saver

    with as_torchrun_starts(rank, 2) as said:
        module = Module(rank)
        trainer, hook = made("diloco(4)", [saver(folder, every_n_train_steps=3)])
        trainer.fit(module, numbers(7))
        trainer.test(module, numbers(1), ckpt_path=str(folder / "3.ckpt"), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, numbers(7))
    return {"weights": copied(module.net), "tested": module.tested, "stats": hook.run.stats(), "said": said}


def test_a_checkpoint_that_is_tested_is_not_resumed_by_the_next_fit(tmp_path: Path) -> None:
    outcomes = ranks(2, with_a_test_between, tmp_path)
    assert equal(outcomes)
    for one in outcomes:
        assert same(one["tested"][0], saved(tmp_path / "3.ckpt"))
        assert one["stats"].steps == 7
        assert not one["said"]


def elsewhere(rank: int, folder: Path, path: str, resume: bool) -> Any:
    from pytorch_lightning.plugins.io import AsyncCheckpointIO

    from tests.integrations.lightning_runs import Kill, Look, Module, copied, made, numbers

    class Saves(Module):
        def on_train_batch_end(self, _: Any, batch: Any, number: int) -> None:
            if number == 4:
                self.trainer.save_checkpoint(path)

    with as_torchrun_starts(rank, 2) as said:
        os.environ["HOME"] = str(folder)
        module, look = Saves(rank), Look()
        trainer, _ = made(STREAMING, [look, Kill(None if resume else 7)], plugins=[AsyncCheckpointIO()])
        torch.manual_seed(rank)
        with suppress(KilledError):
            trainer.fit(module, numbers(10), ckpt_path=path if resume else None)
    return {"weights": copied(module.net), "own": look.own, "said": said}


@pytest.mark.parametrize("path", ["~/saved.ckpt", "file://{}/saved.ckpt"])
def test_other_ways_to_write_a_path_and_a_file(path: str, tmp_path: Path) -> None:
    """Beside it there is nothing else; and a file that is written while training goes on holds what it was given."""
    place = path.format(tmp_path)
    cut = ranks(2, elsewhere, tmp_path, place, False)
    assert names(tmp_path) == ["saved.ckpt", "saved.ckpt.laconic"]
    assert same(saved(tmp_path / "saved.ckpt"), mean([one["own"][4] for one in cut]))
    resumed = ranks(2, elsewhere, tmp_path, place, True)
    assert equal(resumed)
    assert len(resumed[0]["own"]) == 5
    for mine, other in zip(resumed, cut, strict=True):
        assert same(mine["own"][0], other["own"][5])
        assert not mine["said"]


def apart(rank: int, folder: Path, resume: bool) -> Any:
    from tests.integrations.lightning_runs import Kill, Look, Module, copied, made, numbers

    class Saves(Module):
        def on_train_batch_end(self, _: Any, batch: Any, number: int) -> None:
            if number in (2, 4):
                self.trainer.save_checkpoint(f"{number}.ckpt")
            if number == 5:
                self.trainer.strategy.remove_checkpoint("2.ckpt")

    before, own = os.getcwd(), folder / str(rank)
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        with as_torchrun_starts(rank, 2) as said:
            module, look = Saves(rank), Look()
            trainer, _ = made(STREAMING, [look, Kill(None if resume else 7)])
            torch.manual_seed(rank)
            with suppress(KilledError):
                trainer.fit(module, numbers(10), ckpt_path="4.ckpt" if resume else None)
    finally:
        os.chdir(before)
    return {"weights": copied(module.net), "own": look.own, "said": said}


def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    """The first rank's has Lightning's file, each has its own part; both go when the checkpoint is removed."""
    cut = ranks(2, apart, tmp_path, False)
    assert (names(tmp_path / "0"), names(tmp_path / "1")) == (["4.ckpt", "4.ckpt.laconic"], ["4.ckpt.laconic"])
    assert len(list((tmp_path / "1").glob("4.ckpt.laconic/*/*"))) == 1
    shutil.copy(tmp_path / "0/4.ckpt", tmp_path / "1/4.ckpt")
    for mine, other in zip(ranks(2, apart, tmp_path, True), cut, strict=True):
        assert same(mine["own"][0], other["own"][5])
        assert not mine["said"]


def test_what_is_saved_on_an_exception_is_the_first_ranks(tmp_path: Path) -> None:
    """Nobody can be waited for then: it has no parts."""
    outcomes = ranks(2, train, tmp_path, STREAMING, {"every_n_train_steps": 4, "save_on_exception": True}, kill=10)
    assert names(tmp_path) == ["10.ckpt", "4.ckpt", "4.ckpt.laconic", "8.ckpt", "8.ckpt.laconic"]
    assert same(saved(tmp_path / "10.ckpt"), outcomes[0]["weights"])
    lost(ranks(2, train, tmp_path, STREAMING, resume="10.ckpt"), 10)


# Killed


def in_a_save(rank: int, folder: Path, kill: bool, resume: bool) -> Any:
    from tests.integrations.lightning_runs import Module, copied, made, numbers, saver

    class Dies(Module):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            if kill and self.global_step == 8:
                raise KilledError  # after the ranks' own parts, before Lightning's

    with as_torchrun_starts(rank, 2) as said:
        module = Dies(rank, 0.3)
        save = saver(folder, filename="same", every_n_train_steps=4, enable_version_counter=False)
        trainer, _ = made(STREAMING, [save])
        torch.manual_seed(rank)
        with suppress(KilledError):
            trainer.fit(module, numbers(12), ckpt_path=str(folder / "same.ckpt") if resume else None)
    return {"weights": copied(module.net), "losses": module.losses, "said": said}


def test_a_save_that_is_killed_leaves_the_former_one_whole(tmp_path: Path) -> None:
    whole = ranks(2, in_a_save, tmp_path / "whole", False, False)
    ranks(2, in_a_save, tmp_path / "cut", True, False)
    assert len(names(tmp_path / "cut/same.ckpt.laconic")) == 2
    for mine, other in zip(ranks(2, in_a_save, tmp_path / "cut", False, True), whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert len(mine["losses"]) == 8
        assert not mine["said"]


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}  # see tests/checkpoint/test_kills.py


def killed(folder: Path, strategy: str, kills: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=9"]
    command = [*launch, "--monitor-interval=0.1", "--module", "tests.integrations.killed_fit", str(folder), strategy, kills]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=240)
    found = set(re.findall(r"weights (\w+)", done.stdout))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exitcode: -9") == len(kills.split(",")), done.stderr
    assert len(found) == 1, done.stdout
    return str(found.pop())


def calm(rank: int, folder: Path, strategy: str) -> str:
    from tests.integrations.killed_fit import fit

    with as_torchrun_starts(rank, 2):
        return fit(rank, folder, strategy, [])


@pytest.mark.soak
def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """In mid-step, with an exchange outstanding: torchrun starts all of them anew, and they end with the same bits."""
    first, second = ranks(2, calm, tmp_path / "calm", STREAMING)
    assert first == second == killed(tmp_path / "killed", STREAMING, "10")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategy", [STREAMING, "ddp(reducer=ErrorFeedback(Quantized(4)))", "local_sgd(6)", "powersgd(rank=2, warmup=6)"]
)
def test_processes_that_are_killed_again_and_again(strategy: str, tmp_path: Path) -> None:
    first, second = ranks(2, calm, tmp_path / "calm", strategy)
    assert first == second == killed(tmp_path / "killed", strategy, "7,13,save 16,22")
