"""Lightning's Fabric: a loop of the user's own, whose saving and loading know of the strategy."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.frameworks import Net, as_torchrun_starts, batch, optimizer_of
from tests.integrations.test_lightning import EF, Weights, mean, same
from tests.live import ranks

STREAMING = "streaming_diloco(5, fragments=2, delay=2)"


def fabric(rank: int, world: int, **options: Any) -> Any:
    from lightning_fabric import Fabric

    return Fabric(**{"accelerator": "cpu", "devices": world, "strategy": "ddp", **options})


def copied(module: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(
    rank: int,
    /,
    folder: Path,
    strategy: str | None,
    *,
    steps: int = 12,
    save_at: int | None = None,
    resume: str | None = None,
    early: bool = False,
    consensus: Any = "mean",
    accumulate: int = 1,
    clip: float | None = None,
    **options: Any,
) -> Any:
    """So many steps; without a strategy, Fabric's own DDP."""
    from laconic.integrations.lightning import attach

    world = dist.get_world_size()
    with as_torchrun_starts(rank, world) as said:
        one = fabric(rank, world, **options)
        one.launch()
        net = Net(0.3)
        model, optimizer = one.setup(net, optimizer_of(net))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        rest, done, own = None, 0, []
        if early and resume is not None:
            one.load(folder / resume, state)
        run = attach(one, model, optimizer, strategy, consensus=consensus) if strategy else None
        torch.manual_seed(rank)
        if resume is not None:
            rest = None if early else one.load(folder / resume, state)
            done = state["step"]
        for step in range(done, steps):
            for part in range(accumulate):
                with one.no_backward_sync(model, enabled=part + 1 < accumulate):
                    one.backward(model(**batch(rank, accumulate * step + part))["loss"] / accumulate)
            if clip is not None:
                one.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
            own.append(copied(net))
            if step + 1 == save_at and resume is None:
                one.save(folder / "saved.ckpt", {**state, "step": step + 1})
        if run is not None:
            run.__exit__(None, None, None)
    outcome = {"weights": copied(net), "own": own, "said": said, "rest": rest}
    left = [method for method in ("save", "load") if method in vars(one)]
    return {**outcome, "stats": run.stats() if run is not None else None, "left": left}


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "clip": 0.05}], ids=["", "accumulated, clipped"])
def test_ddp_is_fabrics_own_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = ranks(2, train, tmp_path, None, **options), ranks(2, train, tmp_path, "ddp()", **options)
    for mine, theirs in zip(ours, plain, strict=True):
        assert same(mine["weights"], theirs["weights"])
        assert mine["stats"].steps == mine["stats"].exchanges == 12
        assert not mine["left"], "Fabric is as it was"


@pytest.mark.parametrize("strategy", [EF, "diloco(5)", STREAMING])
def test_a_resumed_training_is_the_same_training(strategy: str, tmp_path: Path) -> None:
    """In mid-period, with an exchange outstanding; the file has the mean of the replicas."""
    whole = ranks(2, train, tmp_path, strategy)
    cut = ranks(2, train, tmp_path, strategy, save_at=6, steps=8, clip=100.0)
    resumed = ranks(2, train, tmp_path, strategy, resume="saved.ckpt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["saved.ckpt", "saved.ckpt.laconic"]
    assert same(whole[0]["weights"], whole[1]["weights"])
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert len(mine["own"]) == 6
        assert mine["stats"].steps == 12
        assert mine["rest"] == {}, "what is laconic's is not the user's"
        assert not mine["said"]
    found, replicas = torch.load(tmp_path / "saved.ckpt", weights_only=True)["model"], [one["own"][5] for one in cut]
    assert same(replicas[0], replicas[1]) == (strategy == EF)
    assert same(found, mean(replicas))


@pytest.mark.parametrize("consensus", ["anchor", "local"])
def test_another_consensus_is_saved(consensus: str, tmp_path: Path) -> None:
    outcomes = ranks(2, train, tmp_path, "diloco(4)", consensus=consensus, save_at=6)
    found = torch.load(tmp_path / "saved.ckpt", weights_only=True)["model"]
    if consensus == "local":
        assert same(found, outcomes[0]["own"][5])
    else:
        assert same({**found, "seen": torch.zeros(())}, {**outcomes[1]["own"][3], "seen": torch.zeros(())})


def test_a_checkpoint_of_a_training_without_a_strategy(tmp_path: Path) -> None:
    """Loaded when the strategy is attached already: it begins from there, as if it had been loaded before."""
    ranks(2, train, tmp_path, None, save_at=6, steps=6)
    early = ranks(2, train, tmp_path, "diloco(4)", resume="saved.ckpt", early=True)
    for mine, other in zip(ranks(2, train, tmp_path, "diloco(4)", resume="saved.ckpt"), early, strict=True):
        assert same(mine["weights"], other["weights"])
        assert (mine["stats"].steps, mine["stats"].syncs) == (6, 1)
        assert not mine["said"]


def test_a_resume_without_parts(tmp_path: Path) -> None:
    ranks(2, train, tmp_path, STREAMING, save_at=6, steps=7)
    shutil.rmtree(tmp_path / "saved.ckpt.laconic")
    first, second = ranks(2, train, tmp_path, STREAMING, resume="saved.ckpt")
    (sentence,) = first["said"]
    assert "without its ranks' own parts" in sentence
    assert "goes on from step 6" in sentence
    assert not second["said"]
    assert same(first["weights"], second["weights"])


def other_things(rank: int, folder: Path) -> Any:
    """What is saved and loaded without the model is Fabric's alone; a checkpoint can be looked at without a resume."""
    from laconic.integrations.lightning import attach

    with as_torchrun_starts(rank, 2) as said:
        one = fabric(rank, 2)
        one.launch()
        net, ema = Net(0.0), Net(0.0)
        model, optimizer = one.setup(net, optimizer_of(net))
        with attach(one, model, optimizer, "diloco(4)") as run:
            for step in range(6):
                one.backward(model(**batch(rank, step))["loss"])
                optimizer.step()
                optimizer.zero_grad()
            before = copied(net)
            one.save(folder / "ema.ckpt", {"ema": ema, "step": 6})
            one.load(folder / "ema.ckpt", {"ema": ema})
            one.save(folder / "all.ckpt", {"model": net})
            raw = one.load(folder / "all.ckpt")
            kept, steps = same(before, copied(net)), run.step
    return {"kept": kept, "steps": steps, "raw": sorted(raw), "said": said}


def test_what_has_nothing_to_do_with_the_model(tmp_path: Path) -> None:
    for one in ranks(2, other_things, tmp_path):
        assert one["kept"]
        assert one["steps"] == 6
        assert one["raw"] == ["laconic", "model"]
        assert not one["said"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["all.ckpt", "all.ckpt.laconic", "ema.ckpt"]


def scaled(rank: int, strategy: str) -> Any:
    from lightning_fabric.plugins import MixedPrecision

    from laconic.integrations.lightning import attach

    with as_torchrun_starts(rank, 2) as said:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        one = fabric(rank, 2, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
        one.launch()
        net = Net(0.0)
        model, optimizer = one.setup(net, optimizer_of(net))
        with attach(one, model, optimizer, strategy) as run:
            for step in range(12):
                loss = model(**batch(rank, step))["loss"]
                one.backward(loss * float("inf") if step == 5 and rank == 1 else loss)
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": copied(net), "stats": run.stats(), "scale": scaler.get_scale(), "said": said}


@pytest.mark.parametrize(("strategy", "scales"), [(EF, [128.0, 128.0]), ("diloco(4)", [256.0, 128.0])])
def test_a_loss_that_is_not_finite_is_skipped_and_counted(strategy: str, scales: list[float]) -> None:
    outcomes = ranks(2, scaled, strategy)
    assert same(outcomes[0]["weights"], outcomes[1]["weights"])
    assert [one["scale"] for one in outcomes] == scales
    for one in outcomes:
        assert one["stats"].steps == 12
        assert all(tensor.isfinite().all() for tensor in one["weights"].values())


# What is refused


def refused(rank: int, case: str) -> str:
    from laconic.integrations.lightning import attach

    with as_torchrun_starts(rank, 2):
        one = fabric(rank, 2)
        one.launch()
        net = Net()
        optimizer = optimizer_of(net)
        model, prepared = one.setup(net, optimizer)
        given: Any = {"strategy": "diloco(4)", "model": model, "consensus": "mean"}
        given |= {
            "order": {"model": net if rank == 1 else model},
            "typo": {"strategy": "dilocco(4)"},
            "consensus": {"consensus": "median"},
            "anchor": {"strategy": "int8()", "consensus": "anchor"},
        }[case]
        try:
            attach(one, given["model"], prepared, given["strategy"], consensus=given["consensus"])
        except ValueError as error:
            return str(error)
    return "nothing was refused"


REFUSED = {
    "order": "needs what fabric.setup(model, optimizer) returns under Fabric(strategy='ddp')",
    "typo": "did you mean 'diloco'",
    "consensus": "consensus must be 'mean', 'anchor' or 'local', got 'median'",
    "anchor": "and int8() has none; use 'mean'",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_on_all_ranks(case: str) -> None:
    """Also where one rank alone is wrong: the other would wait for it."""
    for sentence in ranks(2, refused, case):
        assert REFUSED[case] in sentence


def alone(rank: int, folder: Path) -> Any:
    from laconic.integrations.lightning import attach

    dist.destroy_process_group()
    found = []
    with as_torchrun_starts(0, 1) as said:
        for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
            del os.environ[name]
        for strategy in ("diloco(4)", None):
            one = fabric(0, 1, strategy="auto")
            net = Net(0.0)
            model, optimizer = one.setup(net, optimizer_of(net))
            run = attach(one, model, optimizer, strategy) if strategy else None
            for step in range(6):
                one.backward(model(**batch(0, step))["loss"])
                optimizer.step()
                optimizer.zero_grad()
                one.save(folder / "saved.ckpt", {"model": model})
            assert run is None or (run.step, run.stats().wire_bytes) == (0, 0)
            found.append(copied(net))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for whoever destroys it
    return found, said


def test_a_single_process_trains_as_without_it(tmp_path: Path) -> None:
    (((ours, plain), said),) = ranks(1, alone, tmp_path)
    assert same(ours, plain)
    assert len(said) == 1
    assert "not attached" in said[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved.ckpt"]


# Islands


def islands(rank: int, folder: Path, distributed: bool, resume: bool, steps: int) -> Any:
    from lightning_fabric.strategies import ModelParallelStrategy

    from laconic.integrations.lightning import attach
    from tests.islands import adam, full, loss, shard, small, tokens

    with as_torchrun_starts(rank, 4) as said:
        sharding = ModelParallelStrategy(
            lambda model, mesh: shard(model, mesh["tensor_parallel"]), 2, 2, save_distributed_checkpoint=distributed
        )
        one = fabric(rank, 4, strategy=sharding)
        one.launch()
        model = one.setup_module(small())
        optimizer = one.setup_optimizers(adam(model))
        state, done = {"model": model, "optimizer": optimizer, "step": 5}, 0
        with attach(one, model, optimizer, "streaming_diloco(4, fragments=2, delay=1)") as run:
            if resume:
                one.load(folder / "saved", state)
                done = state["step"]
            for step in range(done, steps):
                one.backward(loss(model, tokens(rank, step)))
                optimizer.step()
                optimizer.zero_grad()
                if step + 1 == 5 and not resume:
                    one.save(folder / "saved", state)
    return {"weights": full(model.module), "stats": run.stats(), "said": said}


@pytest.mark.soak
@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["directory", "file"])
def test_islands_train_and_resume(distributed: bool, tmp_path: Path) -> None:
    whole = ranks(4, islands, tmp_path / "whole", distributed, False, 12)
    ranks(4, islands, tmp_path / "cut", distributed, False, 7)
    resumed = ranks(4, islands, tmp_path / "cut", distributed, True, 12)
    inside, beside = tmp_path / "cut/saved/laconic", tmp_path / "cut/saved.laconic"
    assert (inside.is_dir(), beside.is_dir()) == (distributed, not distributed)
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert same(mine["weights"], resumed[0]["weights"])
        assert mine["stats"].steps == 12
        assert not mine["said"]
