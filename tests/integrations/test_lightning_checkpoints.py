"""Lightning's checkpoints: what its file holds, what is beside it, and whether a training goes on as if nothing had been."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.frameworks import KilledError, as_torchrun_starts
from tests.integrations.test_lightning import EF, Weights, mean, same
from tests.live import ranks

STREAMING = "streaming_diloco(5, fragments=2, delay=2)"
both = pytest.mark.parametrize("strategy", [STREAMING, pytest.param(EF, marks=pytest.mark.soak)])


def train(
    rank: int,
    /,
    folder: Path,
    strategy: str | None,
    save: dict[str, Any] | None = None,
    *,
    kill: int | None = None,
    resume: str | None = None,
    consensus: str = "mean",
    after: str | None = None,
    eager: bool = False,
    **options: Any,
) -> Any:
    """Two epochs of 6 batches; `save`: what a ModelCheckpoint is given; `after`: what is saved when the training is over."""
    from tests.integrations.lightning_runs import Eager, Kill, Look, Module, copied, made, numbers, saver

    with as_torchrun_starts(rank, dist.get_world_size()) as said:
        module, look = Module(rank, 0.3), Look()
        savers = [] if save is None else [saver(folder, **save)]
        trainer, hook = made(strategy, [*savers, Kill(kill), look], consensus=consensus, **{"max_epochs": 2, **options})
        torch.manual_seed(rank)
        path = resume if resume is None or "://" in resume or resume == "last" else str(folder / resume)
        with suppress(KilledError):
            trainer.fit(module, Eager(6) if eager else numbers(6), numbers(1), ckpt_path=path)
        if after is not None:
            trainer.save_checkpoint(folder / after)
    stats = hook.run.stats() if hook is not None and hook.run is not None else None
    outcome = {"weights": copied(module.net), "own": look.own, "seen": module.seen, "fed": module.fed}
    return {**outcome, "stats": stats, "said": said}


def saved(path: Path) -> Weights:
    found = torch.load(path, weights_only=True)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in found.items()}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def resumes_exactly(folder: Path, strategy: str, path: str, *given: Any, whole: Any = None, **options: Any) -> None:
    """From a training that is as good as killed some steps after it has saved."""
    whole = whole or ranks(2, train, folder / "whole", strategy, *given, **options)
    ranks(2, train, folder / "cut", strategy, *given, kill=10, **options)
    resumed = ranks(2, train, folder / "cut", strategy, *given, resume=path, **options)
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert len(mine["fed"]) < 12
        assert len(mine["fed"]) != 6 or mine["fed"] == other["fed"][6:]  # in mid-epoch, a loader is begun anew by Lightning
        assert not mine["said"]
        assert mine["stats"].steps == other["stats"].steps == 12
        assert mine["stats"].exchanges == other["stats"].exchanges
        assert mine["stats"].syncs == other["stats"].syncs


# The file


@pytest.mark.parametrize("consensus", ["mean", "anchor", "local"])
def test_the_file_holds_the_model_to_use(consensus: str, tmp_path: Path) -> None:
    outcomes = ranks(2, train, tmp_path, "diloco(4)", {"every_n_train_steps": 3}, consensus=consensus)
    for step in (3, 6, 9):
        found, replicas = saved(tmp_path / f"{step}.ckpt"), [one["own"][step - 1] for one in outcomes]
        assert not same(replicas[0], replicas[1])
        if consensus == "anchor" and step > 4:
            synced = outcomes[0]["own"][step // 4 * 4 - 1]
            assert same({**found, "seen": synced["seen"]}, synced)
        elif consensus != "anchor":
            assert same(found, mean(replicas) if consensus == "mean" else replicas[0])


@both
def test_a_training_without_the_callback_can_use_it(strategy: str, tmp_path: Path) -> None:
    """And the other way round, without a warning: there is nothing to lose."""
    ranks(2, train, tmp_path, strategy, {"every_n_train_steps": 4}, kill=9)
    plain = ranks(2, train, tmp_path, None, resume="4.ckpt", after="plain.ckpt")
    assert same(plain[0]["weights"], plain[1]["weights"])
    for one in ranks(2, train, tmp_path, strategy, resume="plain.ckpt", max_epochs=3):
        assert one["stats"].steps == 6
        assert not one["said"]


def in_validation(rank: int, folder: Path, resume: str | None = None) -> Any:
    from tests.integrations.lightning_runs import Kill, Look, Module, copied, made, numbers

    class Saves(Module):
        def validation_step(self, _: Any, number: int) -> None:
            before = copied(self.net)
            self.trainer.save_checkpoint(folder / f"{self.global_step}.ckpt")
            assert same(before, copied(self.net)), "the validation goes on with the model that it had"
            super().validation_step(_, number)

    with as_torchrun_starts(rank, 2) as said:
        module, look = Saves(rank, 0.0), Look()  # on a resume Lightning validates once more, and draws a seed more
        options = {"limit_val_batches": 1, "val_check_interval": 3, "max_epochs": 2}
        trainer, _ = made(STREAMING, [look, Kill(None if resume or folder.name == "whole" else 10)], **options)
        torch.manual_seed(rank)
        with suppress(KilledError):
            trainer.fit(module, numbers(6), numbers(1), ckpt_path=resume and str(folder / resume))
    return {"weights": copied(module.net), "own": look.own, "seen": module.seen, "said": said}


def test_a_module_saves_in_the_middle_of_a_validation(tmp_path: Path) -> None:
    whole = ranks(2, in_validation, tmp_path / "whole")
    replicas = [one["own"][8] for one in whole]
    assert same(saved(tmp_path / "whole/9.ckpt"), mean(replicas))
    assert same(whole[0]["seen"][2], mean(replicas))
    ranks(2, in_validation, tmp_path / "cut")
    resumed = ranks(2, in_validation, tmp_path / "cut", "9.ckpt")
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert not mine["said"]


# Resumed exactly

MOMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mid-epoch": ("8.ckpt", {"every_n_train_steps": 4}, {}),
    "epoch": ("6.ckpt", {}, {}),
    "epoch, shuffled": ("6.ckpt", {}, {"eager": True}),
    "epoch, validated": ("6.ckpt", {}, {"limit_val_batches": 1}),
    "validation": ("6.ckpt", {"save_on_train_epoch_end": False}, {"limit_val_batches": 1}),
    "last batch": ("6.ckpt", {"every_n_train_steps": 3}, {}),
    "last batch, validated": ("6.ckpt", {"every_n_train_steps": 3}, {"limit_val_batches": 1}),
    "validation in mid-epoch": ("9.ckpt", {"monitor": "held_out"}, {"limit_val_batches": 1, "val_check_interval": 3}),
    "before it": ("9.ckpt", {"every_n_train_steps": 3}, {"limit_val_batches": 1, "val_check_interval": 3}),
}
SHORT = [(STREAMING, "mid-epoch"), (STREAMING, "epoch"), (EF, "epoch, shuffled"), (EF, "validation")]
LONG = [(strategy, moment) for strategy in (STREAMING, EF) for moment in MOMENTS if (strategy, moment) not in SHORT]


@pytest.mark.parametrize(("strategy", "moment"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.soak) for one in LONG)])
def test_a_resumed_training_is_the_same_training(strategy: str, moment: str, tmp_path: Path) -> None:
    """Dropout included: generators are where they were when the next batch begins, whenever it was saved."""
    path, save, options = MOMENTS[moment]
    resumes_exactly(tmp_path, strategy, path, save, **options)


def taking_turns(rank: int, folder: Path, cut: bool, resume: bool) -> Any:
    from tests.integrations.lightning_runs import Gan, copied, made, numbers

    class Saves(Gan):
        def on_train_batch_end(self, _: Any, batch: Any, number: int) -> None:
            if cut and number == 4:
                self.trainer.save_checkpoint(folder / "saved.ckpt")  # one of its optimizers is two steps ahead
            if cut and number == 6:
                raise KilledError

    with as_torchrun_starts(rank, 2) as said:
        module = Saves(rank, every=3)
        trainer, hook = made("streaming_diloco(2, fragments=2, delay=1)", strategy="ddp_find_unused_parameters_true")
        with suppress(KilledError):
            trainer.fit(module, numbers(13), ckpt_path=str(folder / "saved.ckpt") if resume else None)
    return {"weights": copied(module.net), "steps": hook.run.step, "said": said}


def test_two_optimizers_that_are_not_in_step_go_on_as_they_were(tmp_path: Path) -> None:
    whole = ranks(2, taking_turns, tmp_path, False, False)
    ranks(2, taking_turns, tmp_path, True, False)
    for mine, other in zip(ranks(2, taking_turns, tmp_path, False, True), whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert mine["steps"] == other["steps"] == 5
        assert not mine["said"]


@pytest.mark.parametrize("save_last", ["link", pytest.param(True, marks=pytest.mark.soak)])
def test_the_last_one_is_found(save_last: Any, tmp_path: Path) -> None:
    resumes_exactly(tmp_path, STREAMING, "last", {"every_n_train_steps": 4, "save_last": save_last})
    assert (tmp_path / "cut/last.ckpt").is_symlink() == (save_last == "link")


def test_a_name_that_is_used_again_has_the_parts_of_its_last_save(tmp_path: Path) -> None:
    save = {"filename": "same", "every_n_train_steps": 4, "enable_version_counter": False, "save_top_k": 1}
    resumes_exactly(tmp_path, STREAMING, "same.ckpt", save)
    assert [name.split("-")[1] for name in names(tmp_path / "cut/same.ckpt.laconic")] == ["00000012"]


def test_a_name_that_was_a_link_leaves_the_parts_of_the_other_alone(tmp_path: Path) -> None:
    given = {"every_n_train_steps": 4, "save_last": "link"}
    whole = ranks(2, train, tmp_path / "whole", STREAMING, given)
    ranks(2, train, tmp_path / "cut", STREAMING, given, kill=9)
    assert (tmp_path / "cut/last.ckpt").resolve().name == "8.ckpt"
    other = {"filename": "last", "every_n_train_steps": 6, "enable_version_counter": False}
    ranks(2, train, tmp_path / "cut", STREAMING, other, resume="4.ckpt", kill=7)
    assert not (tmp_path / "cut/last.ckpt").is_symlink()
    resumed = ranks(2, train, tmp_path / "cut", STREAMING, given, resume="8.ckpt")
    assert same(resumed[0]["weights"], whole[0]["weights"])
    assert not resumed[0]["said"]


# What is removed


def test_parts_go_with_their_checkpoint(tmp_path: Path) -> None:
    save = {"monitor": "held_out", "mode": "min", "save_top_k": 2}
    ranks(2, train, tmp_path, STREAMING, save, limit_val_batches=1, val_check_interval=2)
    assert names(tmp_path) == ["10.ckpt", "10.ckpt.laconic", "12.ckpt", "12.ckpt.laconic"]


def test_a_link_that_is_removed_leaves_the_parts_of_its_target(tmp_path: Path) -> None:
    save = {"every_n_train_steps": 4, "save_last": "link", "last": "last-{step}"}
    ranks(2, train, tmp_path, STREAMING, save)
    kept = [f"{step}.ckpt{more}" for step in (12, 4, 8) for more in ("", ".laconic")]
    assert names(tmp_path) == [*kept, "last-12.ckpt"]


def by_own_names(rank: int, folder: Path) -> Any:
    from tests.integrations.lightning_runs import Module, made, numbers, saver

    class Own(Module):
        def training_step(self, _: Any, number: int) -> torch.Tensor:
            self.log("mine", float(number + rank), on_step=True)  # the second rank is one ahead
            return super().training_step(_, number)

    with as_torchrun_starts(rank, 2):
        save = saver(folder, monitor="mine", mode="max", filename="{mine:.0f}", save_top_k=1, every_n_train_steps=1)
        trainer, _ = made("diloco(4)", [save])
        trainer.fit(Own(rank), numbers(5))


def test_ranks_that_call_a_checkpoint_by_their_own_metrics(tmp_path: Path) -> None:
    """The second rank removes its "4" when the first has just saved it."""
    ranks(2, by_own_names, tmp_path)
    assert names(tmp_path) == ["4.ckpt", "4.ckpt.laconic"]
    assert len(names(next((tmp_path / "4.ckpt.laconic").iterdir()))) == 2


def test_weights_alone_have_no_parts(tmp_path: Path) -> None:
    ranks(2, train, tmp_path, STREAMING, {"save_weights_only": True})
    assert names(tmp_path) == ["12.ckpt", "6.ckpt"]


# Without parts


def lost(outcomes: list[Any], step: int) -> None:
    """One warning, from the first rank, that says what is lost; and all ranks go on together."""
    first, *others = outcomes
    (sentence,) = first["said"]
    assert "without its ranks' own parts" in sentence
    assert f"goes on from step {step}" in sentence
    assert "residuals" in sentence
    for one in others:
        assert not one["said"]
        assert same(one["weights"], first["weights"])


@both
def test_parts_that_were_deleted(strategy: str, tmp_path: Path) -> None:
    ranks(2, train, tmp_path, strategy, {"every_n_train_steps": 4}, kill=9)
    shutil.rmtree(tmp_path / "8.ckpt.laconic")
    outcomes = ranks(2, train, tmp_path, strategy, resume="8.ckpt")
    lost(outcomes, 8)
    assert outcomes[0]["stats"].steps == 12


def test_a_checkpoint_of_after_the_training_takes_no_parts_of_before(tmp_path: Path) -> None:
    done = ranks(2, train, tmp_path, STREAMING, {"filename": "same", "every_n_train_steps": 5}, after="same.ckpt")
    assert names(tmp_path) == ["same.ckpt", "same.ckpt.laconic"]
    assert same(saved(tmp_path / "same.ckpt"), done[0]["weights"])
    lost(ranks(2, train, tmp_path, STREAMING, resume="same.ckpt", max_epochs=3), 12)


def test_one_that_is_on_no_disk_of_ours(tmp_path: Path) -> None:
    first, second = ranks(2, remote, tmp_path)
    assert "not on a local disk" in first["said"][0]
    assert "without its ranks' own parts" in first["said"][1]
    assert len(first["said"]) == 2
    assert not second["said"]
    assert same(first["weights"], second["weights"])


def remote(rank: int, folder: Path) -> Any:
    import fsspec  # type: ignore[import-untyped]

    from tests.integrations.lightning_runs import Kill, Module, copied, made, numbers, saver

    with as_torchrun_starts(rank, 2) as said:
        trainer, _ = made(STREAMING, [saver("memory://runs", every_n_train_steps=4), Kill(5)])
        with suppress(KilledError):
            trainer.fit(Module(rank), numbers(6))
        contents = trainer.strategy.broadcast(fsspec.open("memory://runs/4.ckpt").open().read() if rank == 0 else None)
        with fsspec.open("memory://runs/4.ckpt", "wb") as file:  # each process has a memory of its own
            file.write(contents)
        module = Module(rank)
        made(STREAMING)[0].fit(module, numbers(6), ckpt_path="memory://runs/4.ckpt")
    return {"weights": copied(module.net), "said": said}


def spoilt(rank: int, folder: Path, strategy: str) -> Any:
    try:
        return train(rank, folder, strategy, resume="8.ckpt")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("how", ["truncated", "foreign"])
def test_a_part_that_is_not_whole_or_not_ours_is_an_error_on_all_ranks(how: str, tmp_path: Path) -> None:
    ranks(2, train, tmp_path, STREAMING, {"every_n_train_steps": 4}, kill=9)
    (file,) = (tmp_path / "8.ckpt.laconic").glob("*/rank-00001-of-00002.pt")
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        torch.save({"format": 1, "shards": 1, "tree": torch.nn.Linear(2, 2).state_dict()}, file)
    first, second = ranks(2, spoilt, tmp_path, STREAMING)
    assert "other ranks have something that can't be used" in first
    assert "8.ckpt.laconic can't be read" in first
    assert second.startswith("ValueError")
    assert "8.ckpt.laconic can't be read" in second


@both
def test_another_number_of_ranks(strategy: str, tmp_path: Path) -> None:
    ranks(2, train, tmp_path, strategy, {"every_n_train_steps": 4}, kill=9)
    outcomes = ranks(3, train, tmp_path, strategy, resume="8.ckpt")
    for one in outcomes:
        assert same(one["weights"], outcomes[0]["weights"])
        assert one["stats"].steps == 12
        assert not one["said"]
