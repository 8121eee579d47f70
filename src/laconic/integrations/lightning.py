"""Lightning: `Trainer(strategy="ddp", callbacks=[LaconicCallback("streaming_diloco(32)")])`, and Fabric's `attach`.

For `pytorch_lightning`, which the tests run, and for `lightning`, which has the same classes under other names.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from laconic.advisor.attach import attach as attach_run
from laconic.checkpoint.contents import set_random
from laconic.integrations.fabric import attach as attach
from laconic.integrations.private_parts import (
    BROADCAST_SIGTERM,
    data_fetcher,
    logs_now,
    replace_sigterm_handler,
    saves_directories,
    signal_connector,
)
from laconic.integrations.training import (
    NO_PARTS,
    Consensus,
    Training,
    alone,
    check,
    folder_for,
    folder_with,
    remove,
    warn_once,
)
from laconic.run.run import Run
from laconic.strategies.strategy import Strategy

__all__ = ["LaconicCallback", "attach"]

if "lightning.pytorch" in sys.modules:
    from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy
else:
    try:
        from pytorch_lightning.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
        from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy
    except ImportError:
        try:
            from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
            from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy
        except ImportError as error:
            raise ImportError(
                "laconic.integrations.lightning needs Lightning; in laconic's folder: pip install '.[lightning]'"
            ) from error


class LaconicCallback(Callback):  # type: ignore[misc]  # Lightning's classes are not typed here
    """Train by a strategy in `Trainer.fit`; nothing else of the script changes.

    With `strategy="ddp"` (or another start method of it) it is attached to Lightning's DDP. With a ModelParallelStrategy, the
    dimension `data_parallel` of its mesh counts islands, and the module's `configure_model` shards over `tensor_parallel`.
    The Trainer's optimizers, gradient accumulation, clipping and GradScaler work as they do.

    Checkpoints: Lightning's file has the model to use. Beside it is a folder, `NAME.ckpt.laconic`, with a file a rank; where
    Lightning saves a directory, the folder is inside. `fit(ckpt_path=...)` resumes to the same bits with it, and warns without
    it.

    `run` is what `laconic.attach` returned, from `on_train_start` on; after training it has the final `stats()`. The steps in
    which the Trainer logs have `laconic/wire_bytes` and `laconic/wait_seconds` (a step), `laconic/total_wire_bytes` and
    `laconic/drift` (at the last sync). All other methods are hooks that the Trainer calls.

    Bytes: those of the strategy; `validate` in `fit` and each checkpoint send parameters once where replicas differ.

    Memory: that of the strategy, and a copy of the parameters during a validation or a checkpoint where replicas differ.

    Not: DeepSpeed, XLA and FSDP1 strategies are refused, and so are two of these callbacks. In a single process without a
    process group nothing is attached, and a warning says so.

    Arguments:
      `strategy`: an object such as `laconic.diloco(32)`, or its text.
      `consensus`: what `validate` in `fit` and checkpoints see of replicas that differ: their "mean"; the outer optimizer's
        model, "anchor"; or each rank's own, "local". Default "mean".
      `check_every`: as in `laconic.attach`. Default 0.

    What the strategy can't be is a ValueError at once; what doesn't fit the Trainer, at the start of `fit`.

    >>> from laconic.integrations.lightning import LaconicCallback
    >>> callback = LaconicCallback("diloco(16, warmup=100)")
    >>> callback.strategy.warmup
    100
    >>> trainer = Trainer(  # doctest: +SKIP
    ...     strategy="ddp", devices=2, accelerator="cpu", callbacks=[callback]
    ... )
    >>> trainer.fit(model, loader)  # doctest: +SKIP
    """

    def __init__(self, strategy: Strategy | str, *, consensus: Consensus = "mean", check_every: int = 0) -> None:
        self.strategy, self.consensus, self.check_every = check(strategy, consensus), consensus, check_every
        self.run: Run | None = None
        self._training: Training | None = None
        self._evaluation: ExitStack | None = None
        self._mark: str | None = None  # of the save that is going on
        self._loaded: dict[str, Any] = {}  # what Lightning has loaded of this callback's state
        self._logged_step = 0

    # Beginning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what can't work before anything is built."""
        if stage != "fit":
            return
        self.run, self._loaded = None, {}  # `Trainer.test` may have loaded it; of a resume it comes after this
        others = [one for one in trainer.callbacks if isinstance(one, LaconicCallback)]
        if len(others) > 1:
            given = " and ".join(str(one.strategy) for one in others)
            raise ValueError(f"the Trainer has {len(others)} LaconicCallbacks, of {given}; a model is trained by one strategy")
        ours, theirs = Callback.__module__.split(".")[0], type(trainer.strategy).__module__.split(".")[0]
        if {ours, theirs} == {"lightning", "pytorch_lightning"}:
            raise ValueError(
                f"the Trainer is of {theirs}, and laconic took {ours}; import {theirs} before laconic.integrations"
            )
        known = isinstance(trainer.strategy, DDPStrategy | ModelParallelStrategy)
        if trainer.world_size > 1 and (not known or isinstance(trainer.strategy, DeepSpeedStrategy | XLAStrategy)):
            raise ValueError(
                f"{self.strategy} needs Trainer(strategy='ddp'), or a ModelParallelStrategy whose islands it averages, got "
                f"{type(trainer.strategy).__name__}, which communicates in its own way"
            )
        for one in trainer.callbacks:
            if isinstance(one, WeightAveraging | StochasticWeightAveraging) and self.strategy.averaging is not None:
                warn_once(
                    f"{type(one).__name__} averages over time what each rank has, and the strategy {self.strategy} lets ranks "
                    "differ: so do its models when training has ended; use the first rank's, which checkpoints hold"
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, and go on where the checkpoint was saved if there is one."""
        if alone(self.strategy):
            return
        islands: dict[str, Any] = {}
        if isinstance(trainer.strategy, ModelParallelStrategy):
            islands = {"mesh": trainer.strategy.device_mesh, "replicate": "data_parallel"}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.run = attach_run(
            trainer.strategy.model, trainer.optimizers, self.strategy, scaler=scaler, check_every=self.check_every, **islands
        )
        training = self._training = Training(self.run, self.consensus)
        training.replace(trainer, "save_checkpoint", lambda save: _Saver(self, trainer, save))
        training.replace(trainer.strategy, "remove_checkpoint", lambda remove_: _removing(remove_, trainer.is_global_zero))
        _leave_sigterm_to_each_rank(training, trainer)
        if self._loaded:
            self._resume(training, trainer)
        self._logged_step = self.run.step

    def _resume(self, training: Training, trainer: Any) -> None:
        state, self._loaded = self._loaded, {}
        mark = state.get("mark") or NO_PARTS
        loaded = training.resume(folder_with(trainer.ckpt_path, mark), mark=mark, step=state.get("step"))
        if loaded.random is None:
            return
        set_random(loaded.random)
        # The loader's iterator is there already, and has drawn a seed. In the middle of an epoch, the one that it replaces had
        # been there when the checkpoint was saved. After an epoch, the next one's is made anew, from generators as they were,
        # and for the next epoch: Lightning says so to samplers afterwards, when a loader's workers have the first batches.
        progress, fetcher = trainer.fit_loop.epoch_progress.current, data_fetcher(trainer)
        loaders = fetcher.combined_loader.flattened
        if 0 < progress.ready == progress.processed and not any(hasattr(loader, "load_state_dict") for loader in loaders):
            for loader in loaders:
                for holder in (loader, getattr(loader, "batch_sampler", None)):
                    getattr(getattr(holder, "sampler", None), "set_epoch", _nothing)(progress.processed)
            iter(fetcher)

    # Training

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log bytes, waits and drift in the steps in which the Trainer logs."""
        if self._training is None or self.run is None or trainer.logger is None or self.run.step == self._logged_step:
            return
        if logs_now(trainer):
            self._logged_step = self.run.step
            pl_module.log_dict(self._training.metrics(), on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """In mid-training: the model that is validated is that of all ranks."""
        if self._training is not None:
            self._evaluation = ExitStack()
            self._evaluation.enter_context(self._training.evaluating())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Each rank goes on with its own."""
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What Lightning's file has of this callback: enough to find the ranks' own parts, and to go on without them."""
        if self.run is None:
            return {}
        return {"strategy": str(self.run.strategy), "step": self.run.step, "mark": self._mark}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning loads before the DDP is there: it is kept until training starts."""
        self._loaded = state_dict

    # The end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Replicas become equal."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The other ranks are told."""
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        self.on_validation_end(None, None)  # an exception may have come in the middle of one
        if training is not None:
            training.end(error)


class _Saver:
    """Stands for `Trainer.save_checkpoint` in a training: ranks save their parts, then Lightning saves the model of all."""

    def __init__(self, callback: LaconicCallback, trainer: Any, save: Any) -> None:
        self._callback, self._trainer, self._save = callback, trainer, save

    def __call__(self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None) -> None:
        callback, training = self._callback, self._callback._training
        assert training is not None, "it is taken off with the run"
        validating = callback._evaluation is not None  # a module may save in the middle of a validation
        callback.on_validation_end(None, None)
        try:
            filepath = self._trainer.strategy.broadcast(filepath)
            directory = saves_directories(self._trainer.strategy)
            folder = None if weights_only else folder_for(filepath, directory=directory)
            if folder is not None:
                callback._mark = training.save(folder)
            elif not weights_only:
                warn_once(f"{filepath} is not on a local disk: ranks' own parts are not saved, and a resume will not be exact")
            with training.evaluating():
                self._save(filepath, weights_only, storage_options)
            if folder is not None and callback._mark is not None:
                training.keep_only(folder, callback._mark)
        finally:
            callback._mark = None
        if validating:  # not after an error: nobody may be there to take the mean with
            callback.on_validation_start(None, None)


def _removing(remove_checkpoint: Any, first: bool) -> Any:
    def remove_with_parts(filepath: str | Path) -> None:
        remove_checkpoint(filepath)
        # Ranks may call a checkpoint by metrics of their own. What the first has not removed is there under that name.
        if first or not Path(filepath).exists():
            remove(folder_for(filepath, directory=False))

    return remove_with_parts


def _leave_sigterm_to_each_rank(training: Training, trainer: Any) -> None:
    """A rank that gets a SIGTERM raises at the end of its batch, and the others learn of it as of any error.

    Lightning 2.6 broadcasts it from the first rank instead. Before each batch, where all ranks wait for each other: with steps
    that take 0 or 20 ms at random, diloco(16) took 1.4 times as long. And in the signal handler, in any order with the other
    collectives: where one rank got a SIGTERM in mid-step, all hung, with laconic and without.
    """
    connector = signal_connector(trainer)

    def note(number: int, frame: object) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)  # the processes that it has started, as Lightning does
        connector.received_sigterm = True

    if replace_sigterm_handler(trainer, note):
        training.replace(trainer.fit_loop.epoch_loop, BROADCAST_SIGTERM, lambda _: _nothing)


def _nothing(*_: object) -> None:
    pass
