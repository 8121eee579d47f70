"""What tests of the Lightning integration train: modules, a trainer, and what is seen of them. Imported on ranks alone."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from laconic.integrations.lightning import LaconicCallback
from tests.integrations.frameworks import KilledError, Net, batch, optimizer_of

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

Weights = dict[str, Tensor]


def copied(module: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


class Module(pl.LightningModule):  # type: ignore[misc]
    """The regression of all frameworks; what a batch holds follows from its epoch and its number alone."""

    def __init__(self, rank: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.net, self.rank = Net(dropout), rank
        self.losses: list[float] = []
        self.fed: list[int] = []  # what the loader gave
        self.seen: list[Weights] = []  # by validation
        self.tested: list[Weights] = []

    def training_step(self, item: Any, number: int) -> Tensor:
        self.fed.append(int(item))
        loss: Tensor = self.net(**batch(self.rank, 100 * self.current_epoch + number))["loss"]
        self.losses.append(float(loss))
        return loss

    def validation_step(self, _: Any, number: int) -> None:
        self.seen.append(copied(self.net))
        self.log("held_out", 1.0 / (1 + self.global_step), sync_dist=True)

    def test_step(self, number: Tensor) -> None:
        self.tested.append(copied(self.net))

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


class Gan(pl.LightningModule):  # type: ignore[misc]
    """Two optimizers that take turns, as Lightning's own example has it; `every`: the generator's steps are rarer."""

    def __init__(self, rank: int, turns: int = 1, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rank, self.turns, self.every = rank, turns, every
        torch.manual_seed(3)
        self.net = nn.ModuleDict({"g": _mlp(4, 3), "d": _mlp(3, 1)})

    def training_step(self, _: Any, number: int) -> None:
        generator, discriminator = self.optimizers()
        numbers = torch.Generator().manual_seed(1000 * self.rank + number)
        for turn in range(self.turns):
            noise, real = torch.randn(8, 4, generator=numbers), 2 * torch.randn(8, 3, generator=numbers) + 1
            if (number + turn) % self.every == 0:
                self._step(generator, self._fooled, noise)
            self._step(discriminator, self._told_apart, noise, real)

    def _step(self, optimizer: Any, loss: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss(*inputs))
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def _fooled(self, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-self.net["d"](self.net["g"](noise))).mean()

    def _told_apart(self, noise: Tensor, real: Tensor) -> Tensor:
        made, true = self.net["d"](self.net["g"](noise).detach()), self.net["d"](real)
        return nn.functional.softplus(made).mean() + nn.functional.softplus(-true).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net["g"].parameters(), 1e-2), torch.optim.Adam(self.net["d"].parameters(), 1e-2)


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Kill(Callback):  # type: ignore[misc]
    """The process is as good as dead after this step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KilledError


class Look(Callback):  # type: ignore[misc]
    """Keeps this rank's own weights after each batch."""

    def __init__(self) -> None:
        self.own: list[Weights] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.own.append(copied(module.net))

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        mine = copied(module.net)
        assert all(torch.equal(mine[name], one) for name, one in (self.own[-1:] or [{}])[0].items()), "it goes on with its own"


def made(text: str | None, callbacks: Iterable[Any] = (), *, consensus: Any = "mean", **options: Any) -> tuple[Any, Any]:
    """A Trainer over all ranks and its LaconicCallback; without a strategy, Lightning's own and None."""
    hook = LaconicCallback(text, consensus=consensus) if text else None
    callbacks = [*callbacks, *([hook] if hook else [])]
    world = dist.get_world_size() if dist.is_initialized() else 1
    given: dict[str, Any] = {
        "accelerator": "cpu", "devices": world, "strategy": "ddp", "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
        "use_distributed_sampler": False, "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
    }  # fmt: skip
    return pl.Trainer(callbacks=callbacks, **{**given, **options}), hook


def numbers(batches: int) -> Any:
    return DataLoader(range(batches), batch_size=1)  # type: ignore[arg-type]  # a range is a dataset


class Eager:
    """A loader that asks its sampler for an epoch when its iterator is made, as one with workers does."""

    def __init__(self, batches: int) -> None:
        self.sampler: Any = DistributedSampler(range(batches), 1, 0)  # type: ignore[arg-type]  # as above

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        torch.rand(1)  # a seed for its workers
        return iter(list(self.sampler))


def saver(folder: Path | str, last: str = "last", **options: Any) -> Any:
    """Checkpoints that are called by their step, and are all kept."""
    found = ModelCheckpoint(folder, **{"filename": "{step}", "save_top_k": -1, "auto_insert_metric_name": False, **options})
    found.CHECKPOINT_NAME_LAST = last
    return found
