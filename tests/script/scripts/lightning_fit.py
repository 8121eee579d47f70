"""A Lightning script: one fit, by the Trainer's own DDP."""

import os
import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    def training_step(self, batch: list[torch.Tensor], place: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(out: str, strategy: str) -> None:
    pl.seed_everything(0, verbose=False)
    inputs = torch.randn(256, 20)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :5].argmax(1)), batch_size=16)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader)
    if torch.distributed.is_initialized():  # not where the Trainer has spawned the ranks
        torch.distributed.destroy_process_group()
    torch.save(module.net.state_dict(), os.path.join(out, f"final-{trainer.global_rank}.pt"))


if "auto" in sys.argv:
    import laconic.auto  # noqa: F401

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "ddp")
