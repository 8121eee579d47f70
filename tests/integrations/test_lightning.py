"""Lightning: what its users do in a training. Checkpoints, failures and sharded models have files of their own."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.frameworks import as_torchrun_starts
from tests.live import ranks

EF = "ddp(reducer=ErrorFeedback(Quantized(8)))"
Weights = dict[str, torch.Tensor]


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def mean(replicas: list[Weights]) -> Weights:
    """As it is computed on the cable: multiplied by 1/N, then summed. Exact for two."""
    return {name: sum((one[name] / len(replicas) for one in replicas), torch.zeros(())) for name in replicas[0]}


def equal(outcomes: list[Any]) -> bool:
    return all(same(outcomes[0]["weights"], one["weights"]) for one in outcomes[1:])


# Optimization


def gan(rank: int, strategy: str | None, turns: int, every: int) -> Any:
    from tests.integrations.lightning_runs import Gan, copied, made, numbers

    with as_torchrun_starts(rank, 2) as said:
        module = Gan(rank, turns, every)
        trainer, hook = made(strategy, strategy="ddp_find_unused_parameters_true")
        trainer.fit(module, numbers(12))
    return {"weights": copied(module.net), "stats": hook and hook.run.stats(), "said": said}


@pytest.mark.parametrize(("turns", "every", "steps"), [(1, 1, 12), (2, 1, 24), (1, 3, 4)], ids=["each", "twice", "rare"])
def test_two_optimizers_that_take_turns(turns: int, every: int, steps: int) -> None:
    """A step is complete when both have made one: two of them in a training_step, or one in three."""
    plain = ranks(2, gan, None, turns, every)
    ours = ranks(2, gan, "ddp()", turns, every)
    assert equal(ours)
    assert same(ours[0]["weights"], plain[0]["weights"])
    assert ours[0]["stats"].steps == steps
    for strategy in ("int8()", "diloco(3)", "streaming_diloco(3, fragments=2, delay=1, warmup=2)"):
        outcomes = ranks(2, gan, strategy, turns, every)
        assert equal(outcomes), strategy
        assert not same(outcomes[0]["weights"], plain[0]["weights"]), strategy
        assert outcomes[0]["stats"].steps == steps, strategy
        assert not outcomes[0]["said"], strategy
        if strategy == "diloco(3)":
            assert outcomes[0]["stats"].syncs == steps // 3


def automatic(rank: int, /, strategy: str | None, **options: Any) -> Any:
    from tests.integrations.lightning_runs import Module, copied, made, numbers

    with as_torchrun_starts(rank, 2):
        module = Module(rank)
        trainer, hook = made(strategy, **options)
        torch.manual_seed(rank)
        trainer.fit(module, numbers(14))
    return {"weights": copied(module.net), "losses": module.losses, "stats": hook and hook.run.stats()}


@pytest.mark.parametrize("algorithm", ["norm", pytest.param("value", marks=pytest.mark.soak)])
def test_clipping_and_accumulation_are_lightnings_own(algorithm: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 4}
    plain, ours = ranks(2, automatic, None, **options), ranks(2, automatic, "ddp()", **options)
    unclipped = ranks(2, automatic, "ddp()", accumulate_grad_batches=4)
    for mine, theirs, other in zip(ours, plain, unclipped, strict=True):
        assert same(mine["weights"], theirs["weights"])
        assert mine["losses"] == theirs["losses"]
        assert mine["stats"].steps == mine["stats"].exchanges == 4  # of 14 batches; Lightning steps on an epoch's last
        assert not same(mine["weights"], other["weights"])


def scaled(rank: int, strategy: str, bad_rank: int | None) -> Any:
    from pytorch_lightning.plugins import MixedPrecision

    from tests.integrations.lightning_runs import Module, copied, made, numbers

    class Spoilt(Module):
        def training_step(self, _: Any, number: int) -> torch.Tensor:
            return super().training_step(_, number) * (float("inf") if number == 6 and rank == bad_rank else 1)

    with as_torchrun_starts(rank, 2) as said:
        module = Spoilt(rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        trainer, hook = made(strategy, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler), gradient_clip_val=10.0)
        torch.manual_seed(rank)
        trainer.fit(module, numbers(20))
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    outcome = {"weights": copied(module.net), "losses": module.losses, "stats": hook.run.stats(), "said": said}
    return {**outcome, "made": steps, "scale": scaler.get_scale(), "replaced": "step" in vars(scaler)}


@pytest.mark.parametrize(
    ("strategy", "skip"), [(EF, [0, 1]), ("diloco(4)", [1]), ("streaming_diloco(4, fragments=2, delay=1)", [1])]
)
def test_a_loss_that_is_not_finite_is_skipped_and_counted(strategy: str, skip: list[int]) -> None:
    calm = ranks(2, scaled, strategy, None)
    spoilt = ranks(2, scaled, strategy, 1)
    for rank, (one, good) in enumerate(zip(spoilt, calm, strict=True)):
        assert good["made"] == {20.0}
        assert sum(good["losses"][-5:]) < 0.7 * sum(good["losses"][:5])
        assert one["made"] == {19.0 if rank in skip else 20.0}
        assert one["scale"] == (128.0 if rank in skip else 256.0)
        assert one["stats"].steps == good["stats"].steps == 20
        assert one["stats"].collectives == good["stats"].collectives
        assert not one["replaced"]
        assert all(tensor.isfinite().all() for tensor in one["weights"].values())
    assert equal(spoilt)
    assert equal(calm)


# Epochs


def epochs(rank: int, strategy: str) -> Any:
    from pytorch_lightning.callbacks import Callback, EarlyStopping

    from tests.integrations.lightning_runs import Module, copied, made, numbers

    seen: dict[str, list[Weights]] = {"start": [], "end": []}

    class Look(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen["start"].append(copied(module.net))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen["end"].append(copied(module.net))

    with as_torchrun_starts(rank, 2) as said:
        module = Module(rank)
        stop = EarlyStopping("held_out", mode="max", patience=2)  # it falls all the time
        trainer, hook = made(strategy, [Look(), stop], max_epochs=9, limit_train_batches=5, limit_val_batches=1)
        trainer.fit(module, numbers(50), numbers(2))
        first = copied(module.net), trainer.current_epoch, hook.run.stats()
        trainer.test(module, numbers(1), verbose=False)
        stop.wait_count, trainer.should_stop, trainer.fit_loop.max_epochs = 0, False, 5
        trainer.fit(module, numbers(50), numbers(2))
    return {
        "weights": copied(module.net),
        "first": first,
        "tested": module.tested,
        "stats": hook.run.stats(),
        "said": said,
        **seen,
    }


def test_early_stopping_then_a_test_then_a_second_fit() -> None:
    outcomes = ranks(2, epochs, "diloco(4)")
    assert equal(outcomes)
    ends = [[one["end"][fit] for one in outcomes] for fit in (0, 1)]
    for one in outcomes:
        weights, epoch, stats = one["first"]
        assert epoch == 3, "the third validation was the second that did not rise"
        assert (stats.steps, stats.syncs) == (15, 3)
        assert not same(ends[0][0], ends[0][1]), "there was something to make equal"
        for seen in (weights, one["tested"][0], one["start"][1]):
            assert same(seen, mean(ends[0]))
        assert one["stats"].steps == 10, "Lightning begins a second fit with new optimizers, and so does the strategy"
        assert same(one["weights"], mean(ends[1]))
        assert not one["said"]


# Validation


def validated(rank: int, /, strategy: str, consensus: str, **options: Any) -> Any:
    from pytorch_lightning.callbacks import Callback

    from tests.integrations.lightning_runs import Module, copied, made, numbers

    own: list[Weights] = []

    class Look(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            own.append(copied(module.net))

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            assert not own or same(own[-1], copied(module.net)), "after a validation, each goes on with its own"

    with as_torchrun_starts(rank, 2):
        module = Module(rank)
        trainer, hook = made(strategy, [Look()], consensus=consensus, limit_val_batches=1, val_check_interval=3, **options)
        trainer.fit(module, numbers(9), numbers(2))
    return {"own": own, "seen": module.seen, "weights": copied(module.net), "stats": hook.run.stats()}


@pytest.mark.parametrize("consensus", ["mean", "anchor", "local"])
def test_what_a_validation_in_mid_period_sees(consensus: str) -> None:
    outcomes = ranks(2, validated, "diloco(4)", consensus, num_sanity_val_steps=1)
    for one in outcomes:
        start, *seen = one["seen"]
        assert same(start, outcomes[0]["seen"][0]), "a sanity check, before training"
        for step, found in zip((3, 6, 9), seen, strict=True):
            replicas = [each["own"][step - 1] for each in outcomes]
            assert not same(replicas[0], replicas[1])
            if consensus == "local":
                assert same(found, one["own"][step - 1])
            if consensus == "mean":
                assert same(found, mean(replicas))
            if consensus == "anchor" and step > 4:
                synced = one["own"][step // 4 * 4 - 1]  # what the last sync left
                assert same({**found, "seen": synced["seen"]}, synced)
        if consensus == "anchor":
            assert all(torch.equal(seen[0][name], start[name]) for name in start if name != "seen")
    assert (outcomes[0]["stats"].background_bytes > 0) == (consensus == "mean")


# Metrics


def logged(rank: int, /, folder: Path, **options: Any) -> Any:
    from pytorch_lightning.loggers import CSVLogger

    from tests.integrations.lightning_runs import Gan, Module, made, numbers

    with as_torchrun_starts(rank, 2):
        logger = CSVLogger(folder, flush_logs_every_n_steps=1)
        given = {"logger": logger, "log_every_n_steps": 4, "strategy": "ddp_find_unused_parameters_true"}
        trainer, hook = made("diloco(2)", **{**given, **options})
        for fit in (1, 2):
            trainer.fit_loop.max_epochs = fit
            trainer.fit(Module(rank) if fit == 1 else Gan(rank), numbers(10))
    return hook.run.stats()


def rows(folder: Path) -> list[dict[str, str]]:
    path = folder / "lightning_logs/version_0/metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("laconic/wire_bytes")]


def test_metrics_arrive_in_the_log(tmp_path: Path) -> None:
    stats = ranks(2, logged, tmp_path)[0]
    found = rows(tmp_path)
    assert [int(row["step"]) + 1 for row in found[:2]] == [4, 8]
    assert len(found) == 5, "of the second fit, in which a batch has two optimizer steps: 12, 16 and 20 of 20 batches"
    for row in found:
        assert float(row["laconic/wire_bytes"]) > 0
        assert float(row["laconic/wait_seconds"]) >= 0
        assert float(row["laconic/drift"]) > 0
    per_step = float(found[-1]["laconic/total_wire_bytes"]) - float(found[-2]["laconic/total_wire_bytes"])
    assert float(found[-1]["laconic/wire_bytes"]) == per_step / 4
    assert float(found[-1]["laconic/total_wire_bytes"]) <= stats.wire_bytes


LOG_NOTHING: list[dict[str, Any]] = [
    {"logger": False}, {"log_every_n_steps": 0}, {"fast_dev_run": 2},
    {"barebones": True, "logger": False, "log_every_n_steps": None},
]  # fmt: skip


@pytest.mark.parametrize("options", LOG_NOTHING, ids=lambda options: next(iter(options)))
def test_trainers_that_log_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    assert ranks(2, logged, tmp_path, **options)[0].steps > 0
    assert not rows(tmp_path)
