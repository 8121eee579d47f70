"""Lightning's ModelParallelStrategy: islands of two ranks that share a model by `fully_shard`, and average with each other."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.frameworks import KilledError, as_torchrun_starts
from tests.integrations.test_lightning import Weights, same
from tests.live import ranks

STREAMING = "streaming_diloco(4, fragments=2, delay=1)"


def train(
    rank: int,
    /,
    folder: Path,
    strategy: str | None,
    *,
    distributed: bool = True,
    kill: int | None = None,
    resume: str | None = None,
    **options: Any,
) -> Any:
    """Twelve steps over two islands of two; without a strategy, torch's own averaging over all four."""
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import ModelParallelStrategy

    from tests.integrations.lightning_runs import Kill, made, numbers, saver
    from tests.islands import adam, full, loss, shard, small, tokens

    class Sharded(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = small()
            self.losses: list[float] = []
            self.seen: list[Weights] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh
            shard(self.net, mesh if strategy is None else mesh["tensor_parallel"])

        def training_step(self, _: Any, number: int) -> Any:
            found = loss(self.net, tokens(rank, number))
            self.losses.append(found.item())
            return found

        def validation_step(self, _: Any, number: int) -> None:
            self.seen.append(full(self.net))

        def configure_optimizers(self) -> Any:
            return adam(self.net)

    with as_torchrun_starts(rank, 4) as said:
        sharding = ModelParallelStrategy(2, 2, save_distributed_checkpoint=distributed)
        save = saver(folder, every_n_train_steps=5)
        trainer, hook = made(strategy, [save, Kill(kill)], strategy=sharding, **options)
        module = Sharded()
        with suppress(KilledError):
            trainer.fit(module, numbers(12), numbers(1), ckpt_path=resume and str(folder / resume))
    outcome = {"weights": full(module.net), "losses": module.losses, "seen": module.seen, "said": said}
    return {**outcome, "stats": hook.run.stats() if hook else None}


@pytest.mark.soak
def test_islands_train_and_resume(tmp_path: Path) -> None:
    whole = ranks(4, train, tmp_path / "whole", STREAMING, limit_val_batches=1, val_check_interval=6)
    for one in whole:
        assert same(one["weights"], whole[0]["weights"])
        assert one["stats"].steps == 12
        assert same(one["seen"][0], whole[0]["seen"][0]), "a validation in mid-period, with an exchange outstanding"
        assert not one["said"]
    assert sum(whole[0]["losses"][-3:]) < sum(whole[0]["losses"][:3])
    cut = ranks(4, train, tmp_path / "cut", STREAMING, kill=7)
    assert not same(cut[0]["weights"], cut[2]["weights"])
    assert (tmp_path / "cut/5.ckpt/laconic").is_dir()
    resumed = ranks(4, train, tmp_path / "cut", STREAMING, resume="5.ckpt")
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert len(mine["losses"]) == 7
        assert not mine["said"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy", ["ddp()", "ddp(reducer=ErrorFeedback(Quantized(8)))", "diloco(4)", "local_sgd(3)", STREAMING]
)
@pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])
def test_a_resumed_training_is_the_same_training(strategy: str, distributed: bool, tmp_path: Path) -> None:
    whole = ranks(4, train, tmp_path / "whole", strategy, distributed=distributed)
    ranks(4, train, tmp_path / "cut", strategy, kill=7, distributed=distributed)
    inside, beside = tmp_path / "cut/5.ckpt/laconic", tmp_path / "cut/5.ckpt.laconic"
    assert (inside.is_dir(), beside.is_dir()) == (distributed, not distributed)
    resumed = ranks(4, train, tmp_path / "cut", strategy, resume="5.ckpt", distributed=distributed)
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine["weights"], other["weights"])
        assert same(mine["weights"], resumed[0]["weights"])
        assert not mine["said"]
        assert mine["stats"].steps == 12


@pytest.mark.soak
def test_ddp_is_torchs_own_averaging(tmp_path: Path) -> None:
    """Torch sums over the shards of all islands in another order."""
    ours, plain = ranks(4, train, tmp_path / "ours", "ddp()"), ranks(4, train, tmp_path / "plain", None)
    for name, tensor in plain[0]["weights"].items():
        torch.testing.assert_close(ours[0]["weights"][name], tensor)
    assert ours[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-4)
