"""Lightning under a strategy: one callback. Ranks average every 16 steps, validate and save the averaged model, and resume.

    python examples/lightning_trainer.py checkpoints                      # the Trainer starts two processes
    python examples/lightning_trainer.py checkpoints --resume epoch=0     # goes on from there, to the same bits

About 9 seconds each on 2 cores. Look at the bytes beside those of ddp(), and at the held-out loss, which is the same for both
commands, digit for digit. The same without the callback is plain DDP. `metrics.csv` in the folder has the bytes, waits and
drift as `laconic/...`.
"""

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic
from laconic.integrations.lightning import LaconicCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch, place):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, place):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data(seed, samples):
    """A task that a small network can learn: which of ten directions is the largest."""
    directions = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x @ directions.T).argmax(1))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", help="for checkpoints and logs")
    options.add_argument("--strategy", default="diloco(16, warmup=20)", help="any strategy")
    options.add_argument("--epochs", type=int, default=2, help="of 64 steps each, so that they end in the middle of a period")
    options.add_argument("--resume", help="from this checkpoint in the folder")
    given = options.parse_args()

    pl.seed_everything(1, workers=True, verbose=False)
    hook = LaconicCallback(given.strategy)  # 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=given.epochs,
        logger=CSVLogger(given.folder, name="logs"),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hook, ModelCheckpoint(given.folder, "{epoch}", save_top_k=-1)],  # 2
    )
    path = str(Path(given.folder) / f"{given.resume}.ckpt") if given.resume else None
    model, held_out = Classifier(), DataLoader(data(2, 512), batch_size=64)
    trainer.fit(model, DataLoader(data(1, 4096), batch_size=32), held_out, ckpt_path=path)
    (found,) = trainer.validate(model, held_out, verbose=False)
    if trainer.is_global_zero:
        stats = hook.run.stats()
        plain = laconic.predict("ddp()", model, world_size=2, steps=stats.steps).wire_bytes
        print(f"{given.strategy}: {stats.steps} steps, {stats.wire_bytes:,} bytes; ddp() sends {plain:,}")
        print(f"held-out loss {found['val_loss']:.6f}", flush=True)


if __name__ == "__main__":
    main()
