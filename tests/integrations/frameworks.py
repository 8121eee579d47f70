"""The same training in three frameworks: what a user writes in each, as one function of what the tests vary.

They run on live ranks, which have a process group already: the frameworks find it, and the environment that torchrun sets.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, BATCH = 12, 4


class KilledError(Exception):
    """Stands for the end of a process: nothing is done after it."""


@dataclass(frozen=True)
class Plan:
    """What is trained."""

    strategy: str | None  # None: the framework's own DDP
    steps: int = 60
    accumulate: int = 1
    save_at: int | None = None  # after this step, by the framework's own means
    stop_at: int | None = None  # after this step the process is as good as dead
    resume: bool = False
    validate_at: int | None = None
    consensus: Any = "mean"
    dropout: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)  # of the framework's own trainer


@dataclass
class Seen:
    """What one rank saw while it trained."""

    losses: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    at_last_step: Any = None  # stats before the end makes replicas equal

    def outcome(self, model: nn.Module, run: Any, warned: list[str]) -> "Outcome":
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        stats, layout = (run.stats(), _layout(run)) if run is not None else (None, None)
        return Outcome(self.losses, self.validated, self.logged, self.at_last_step, weights, stats, layout, warned)


@dataclass
class Outcome(Seen):
    """What came out, on one rank."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    stats: Any = None
    layout: Any = None
    warned: list[str] = field(default_factory=list)


class Net(nn.Module):
    """A regression with a buffer and dropout, whose forward is what Transformers expects."""

    seen: Tensor

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(7)
        layers = [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
        self.body = nn.Sequential(*layers)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen += 1
        prediction = self.body(x).squeeze(-1)
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


def sample(number: int) -> dict[str, Tensor]:
    """One sample, the same for everybody."""
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
    return {"x": x, "labels": x[:6].sum().tanh()}


def batch(rank: int, place: int, size: int = BATCH) -> dict[str, Tensor]:
    """The `place`-th batch of a rank."""
    samples = [sample(100_000 * rank + size * place + n) for n in range(size)]
    return {key: torch.stack([one[key] for one in samples]) for key in ("x", "labels")}


def held_out() -> list[dict[str, Tensor]]:
    return [sample(10_000_000 + n) for n in range(32)]


def mean_loss(model: Callable[..., dict[str, Tensor]], rank: int, world: int) -> float:
    """Of this rank's share of the held-out samples."""
    share = held_out()[rank::world]
    with torch.no_grad():
        found = model(torch.stack([one["x"] for one in share]), torch.stack([one["labels"] for one in share]))
    return float(found["loss"])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@contextmanager
def as_torchrun_starts(rank: int, world: int) -> Iterator[list[str]]:
    """The environment of a rank, and the sentences of laconic that were warned meanwhile."""
    before = dict(os.environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        ROLE_RANK=str(rank), ROLE_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
        TORCHELASTIC_RUN_ID="tests", TORCHELASTIC_USE_AGENT_STORE="False", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    said: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        os.environ.clear()
        os.environ.update(before)
        said += [str(one.message) for one in caught if "laconic" in str(one.filename) or "strategy" in str(one.message)]


# Lightning


def lightning(rank: int, folder: str, plan: Plan) -> Outcome:
    import logging

    import pytorch_lightning as pl
    import torch.distributed as dist
    from pytorch_lightning.callbacks import Callback, ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    from laconic.integrations.lightning import LaconicCallback

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    world, seen = dist.get_world_size(), Seen()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(plan.dropout)

        def training_step(self, _: Any, number: int) -> Tensor:
            found = self.net(**batch(rank, number))["loss"]
            seen.losses.append(float(found))
            return found  # type: ignore[no-any-return]

        def validation_step(self, _: Any, number: int) -> None:
            seen.validated.append(mean_loss(self.net, rank, world))

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    class Last(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == plan.stop_at:
                raise KilledError

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.logged.append({key: float(value) for key, value in trainer.callback_metrics.items()})
            if trainer.global_step == plan.steps and hook is not None and hook.run is not None:
                seen.at_last_step = hook.run.stats()

    save = ModelCheckpoint(folder, "saved", every_n_train_steps=plan.save_at or 10**9, save_top_k=-1)
    callbacks: list[Any] = [save, Last()]  # Lightning calls those that save last of all
    hook = None
    if plan.strategy is not None:
        hook = LaconicCallback(plan.strategy, consensus=plan.consensus)
        callbacks.append(hook)
    with as_torchrun_starts(rank, world) as said:
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy="ddp", max_steps=plan.steps, callbacks=callbacks, barebones=False,
            accumulate_grad_batches=plan.accumulate, enable_progress_bar=False, enable_model_summary=False,
            logger=CSVLogger(folder), log_every_n_steps=5, num_sanity_val_steps=0,
            val_check_interval=plan.validate_at * plan.accumulate if plan.validate_at else None,
            limit_val_batches=1 if plan.validate_at else 0, check_val_every_n_epoch=None, use_distributed_sampler=False,
            **plan.options,
        )  # fmt: skip
        module = Module()
        numbers: Any = range(plan.steps * plan.accumulate)
        loader: Any = torch.utils.data.DataLoader(numbers, batch_size=1)
        torch.manual_seed(rank)
        resumed = f"{folder}/saved.ckpt" if plan.resume else None
        with suppress(KilledError):
            trainer.fit(module, loader, [0], ckpt_path=resumed)
    run = hook and hook.run
    return seen.outcome(module.net, run, said)


# Accelerate


def accelerate(rank: int, folder: str, plan: Plan) -> Outcome:
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from laconic.integrations.accelerate import attach

    world, seen = dist.get_world_size(), Seen()
    with as_torchrun_starts(rank, world) as said:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulate, **plan.options)
        model = Net(plan.dropout)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        run = attach(accelerator, model, optimizer, plan.strategy, consensus=plan.consensus) if plan.strategy else None
        torch.manual_seed(rank)
        step = 0
        try:
            if plan.resume:
                accelerator.load_state(f"{folder}/saved")
                step = int(model.module.seen) // plan.accumulate if plan.save_at is None else plan.save_at
            while step < plan.steps:
                for part in range(plan.accumulate):
                    with accelerator.accumulate(model):
                        loss = model(**batch(rank, plan.accumulate * step + part))["loss"]
                        seen.losses.append(float(loss))
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                step += 1
                if step == plan.validate_at and run is not None:
                    model.eval()
                    with run.consensus():
                        seen.validated.append(mean_loss(model.module, rank, world))
                    model.train()
                if step == plan.save_at and not plan.resume:
                    accelerator.save_state(f"{folder}/saved")
                if step == plan.stop_at:
                    raise KilledError
            if run is not None:
                seen.at_last_step = run.stats()
                run.__exit__(None, None, None)
        except KilledError as error:
            if run is not None:
                run.__exit__(type(error), error, None)
    return seen.outcome(model.module, run, said)


# Transformers


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return self._samples[place]


def transformers(rank: int, folder: str, plan: Plan) -> Outcome:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import TrainerCallback, TrainingArguments

    from laconic.integrations.transformers import LaconicTrainer

    world, seen = dist.get_world_size(), Seen()

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == plan.stop_at:
                raise KilledError

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == plan.steps and trainer.laconic_run is not None:
                seen.at_last_step = trainer.laconic_run.stats()
            control.should_save = state.global_step == plan.save_at
            control.should_evaluate = state.global_step == plan.validate_at

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            seen.validated.append(metrics["eval_loss"])

    with as_torchrun_starts(rank, world) as said:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        given: dict[str, Any] = {"max_grad_norm": 0.0, "logging_steps": 5, **plan.options}
        arguments = TrainingArguments(
            output_dir=folder, max_steps=plan.steps, per_device_train_batch_size=BATCH, use_cpu=True, report_to="none",
            gradient_accumulation_steps=plan.accumulate, disable_tqdm=True, save_strategy="no", eval_strategy="no",
            lr_scheduler_type="constant", remove_unused_columns=False, dataloader_pin_memory=False,
            per_device_eval_batch_size=64, label_names=["labels"], **given,
        )  # fmt: skip
        model = Net(plan.dropout)
        trainer = LaconicTrainer(
            strategy=plan.strategy, consensus=plan.consensus, model=model, args=arguments,
            train_dataset=Samples([sample(n) for n in range(BATCH * world * plan.accumulate * (plan.steps // 2))]),
            eval_dataset=Samples(held_out()), optimizers=(optimizer_of(model), None), callbacks=[Kill()],
        )  # fmt: skip
        torch.manual_seed(rank)
        with suppress(KilledError):
            trainer.train(resume_from_checkpoint=True if plan.resume else None)
        seen.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        seen.logged = list(trainer.state.log_history)
    return seen.outcome(model, trainer.laconic_run, said)


FRAMEWORKS: dict[str, Callable[[int, str, Plan], Outcome]] = {
    "lightning": lightning, "accelerate": accelerate, "transformers": transformers,
}  # fmt: skip


def fit(rank: int, framework: str, folder: Path, plan: Plan) -> Outcome:
    return FRAMEWORKS[framework](rank, str(folder), plan)


def _layout(run: Any) -> Any:
    try:
        return [[name.removeprefix("net.") for name in names] for names in run.layout()]
    except RuntimeError:  # no bucket has been seen
        return None
