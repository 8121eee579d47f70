"""What each integration costs beside a hand-written `laconic.attach` in the same framework: fits of both, in turn.

Without the integration, a few lines of the user's own call `laconic.attach` where the framework has built its DDP. Nothing is
validated, saved or resumed then, and nothing is logged. The integration does all of that; here it only trains and logs.
"""

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from benchmarks.harness import Ratio, Timing, ratio, report
from laconic.integrations.training import Training
from tests.integrations.frameworks import as_torchrun_starts
from tests.live import ranks_within

LAYERS, WIDTH, BATCH, STEPS, SKIPPED, REPEATS = 8, 512, 64, 60, 12, 10
STRATEGIES = ["ddp()", "int8()", "diloco(16)"]
OURS, BY_HAND = "integration", "laconic.attach by hand"

Fit = Callable[[str, bool, str], float]
"""Trains by a strategy, with the integration or by hand, and returns seconds a step; the last argument is a folder."""


class Net(nn.Module):
    """Square layers; its forward is what Transformers expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.body(x).square().mean()}


class Clock:
    """Seconds a step, but for the first ones."""

    def __init__(self) -> None:
        self.steps, self._began = 0, 0.0

    def tick(self) -> None:
        self.steps += 1
        if self.steps == SKIPPED:
            self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return (time.perf_counter() - self._began) / (self.steps - SKIPPED)


def lightning(strategy: str, ours: bool, folder: str) -> float:
    """Trainer.fit."""
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger

    from laconic.integrations.lightning import LaconicCallback

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    clock, batch = Clock(), torch.ones(BATCH, WIDTH)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, _: Any, number: int) -> Tensor:
            return self.net(batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Ticks(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if not ours:
                self.run = laconic.attach(trainer.strategy.model, trainer.optimizers, strategy)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

        def on_train_end(self, *_: Any) -> None:
            self.seconds = clock.seconds
            if not ours:
                self.run.sync()
                self.run.detach()

    ticks = Ticks()
    callbacks = [LaconicCallback(strategy), ticks] if ours else [ticks]
    callbacks.reverse()  # the end of the clock comes before the end of the run
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, callbacks=callbacks, logger=CSVLogger(folder),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=10,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), [0] * STEPS)
    return ticks.seconds


def accelerate(strategy: str, ours: bool, folder: str) -> float:
    """A loop over a prepared model."""
    from accelerate import Accelerator

    from laconic.integrations.accelerate import attach

    accelerator, clock, batch = Accelerator(cpu=True), Clock(), torch.ones(BATCH, WIDTH)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with attach(accelerator, model, optimizer, strategy) if ours else laconic.attach(model, optimizer, strategy):
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            clock.tick()
        return clock.seconds


def transformers(strategy: str, ours: bool, folder: str) -> float:
    """Trainer.train."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from laconic.integrations.transformers import LaconicTrainer

    clock = Clock()

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if not ours:
                self.run = laconic.attach(trainer.model_wrapped, trainer.optimizer, strategy)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()
            if clock.steps == STEPS:
                self.seconds = clock.seconds
                if not ours:
                    self.run.sync()
                    self.run.detach()

    model, ticks = Net(), Ticks()
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=10, max_grad_norm=0.0, remove_unused_columns=False, dataloader_pin_memory=False,
        ddp_find_unused_parameters=False, log_level="error",
    )  # fmt: skip
    data = [{"x": torch.ones(WIDTH), "labels": torch.zeros(())}] * (BATCH * 2 * 4)
    given: dict[str, Any] = {"model": model, "args": arguments, "train_dataset": data, "callbacks": [ticks]}
    given["optimizers"] = (torch.optim.SGD(model.parameters(), lr=1e-3), None)
    trainer = LaconicTrainer(strategy=strategy, **given) if ours else Trainer(**given)
    trainer.train()
    return ticks.seconds


FITS: dict[str, Fit] = {"Lightning": lightning, "Accelerate": accelerate, "Transformers": transformers}


def measure(rank: int, framework: str, strategy: str, folder: str) -> tuple[dict[str, Timing], float]:
    """Seconds a step of each way; and the seconds of a step that are spent in the integration's own code."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {OURS: [], BY_HAND: []}
    own = 0.0

    def timed(method: Callable[[Training], Any]) -> Callable[[Training], Any]:
        def call(self: Training) -> Any:
            nonlocal own
            start = time.perf_counter()
            found = method(self)
            own += time.perf_counter() - start
            return found

        return call

    with as_torchrun_starts(rank, 2):
        for repeat in range(REPEATS):
            for name in (OURS, BY_HAND) if repeat % 2 else (BY_HAND, OURS):
                dist.barrier()
                seconds[name].append(FITS[framework](strategy, name == OURS, folder))
        methods = {"stepped": Training.stepped, "metrics": Training.metrics}
        for name, method in methods.items():
            setattr(Training, name, timed(method))
        try:
            FITS[framework](strategy, True, folder)
        finally:
            for name, method in methods.items():
                setattr(Training, name, method)
    return {name: Timing(found) for name, found in seconds.items()}, own / STEPS


def main() -> None:
    """Two ranks, one core each, for every framework and strategy."""
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for framework in FITS:
        for strategy in STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                timings, own = ranks_within(1800, 2, measure, framework, strategy, folder)[0]
            found = ratio(f"{framework}, {strategy}", timings[OURS], timings[BY_HAND])
            ratios.append(found)
            median = statistics.median(timings[OURS].seconds)
            rows.append(
                {
                    "framework": framework,
                    "strategy": strategy,
                    "ms a step": f"{median * 1e3:.2f}",
                    "by hand": f"{timings[BY_HAND].median * 1e3:.2f}",
                    "relative": f"{found.value:.3f} ± {found.value * found.noise:.3f}",
                    "own code, % of a step": f"{100 * own / median:.2f}",
                }
            )
    legend = (
        f"Seconds a step of {LAYERS} layers of {WIDTH}x{WIDTH}, batches of {BATCH}, SGD, 2 ranks over loopback; {REPEATS} fits "
        f"of {STEPS} steps of each kind in turn, without their first {SKIPPED} steps. By hand: laconic.attach in the same "
        "framework. Relative: the median of pairs. Own code: what the integration does at each step and to log every 10 steps."
    )
    report("framework_cost", "What an integration costs", rows, legend, ratios)


if __name__ == "__main__":
    main()
