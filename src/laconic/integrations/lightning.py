"""Lightning: `Trainer(strategy="ddp", callbacks=[LaconicCallback("streaming_diloco(32)")])`, and Fabric.

Works with `lightning` and with `pytorch_lightning`.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from laconic.checkpoint.contents import set_random
from laconic.integrations.training import (
    Consensus,
    IdleRun,
    Training,
    alone,
    check,
    ddp_in,
    folder_of,
    remove,
    told_to_all,
    warn_once,
)
from laconic.run.attach import attach as attach_run
from laconic.run.run import Run
from laconic.strategies.strategy import Strategy

if "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
else:
    try:
        from pytorch_lightning import Callback
        from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
    except ImportError:
        try:
            from lightning.pytorch import Callback
            from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
        except ImportError as error:
            raise ImportError("laconic.integrations.lightning needs Lightning: pip install 'laconic[lightning]'") from error

KEY = "laconic"
NO_PARTS = ""  # the mark of a checkpoint that was saved without the ranks' own parts: those beside it are of another save


class LaconicCallback(Callback):  # type: ignore[misc]  # Lightning's classes are not typed here
    """Train by a strategy in `Trainer.fit`; nothing else of the script changes.

    - `strategy`: an object such as `laconic.diloco(32)`, or its text.
    - `consensus`: what `validate` in mid-training and checkpoints see of replicas that differ: their "mean"; the outer
      optimizer's model, "anchor"; or each rank's own, "local".
    - `check_every`: as in `laconic.attach`.

    With `strategy="ddp"` (or another start method of it) it is attached to Lightning's DDP. With a ModelParallelStrategy, the
    dimension `data_parallel` of its mesh counts islands, and the module's `configure_model` shards over `tensor_parallel`.
    The Trainer's optimizers, gradient accumulation, clipping and GradScaler work as they do.

    Checkpoints: Lightning's file has the model to use. Beside it is a folder, `NAME.ckpt.laconic`, with a file a rank:
    `fit(ckpt_path=...)` resumes to the same bits with it, and warns without it. Bytes: `validate` and each checkpoint send
    parameters once where replicas differ, and nothing where they don't.

    `run` is what `laconic.attach` returned, from `on_train_start` on; after training it has the final `stats()`.

    >>> from laconic.integrations.lightning import LaconicCallback
    >>> callback = LaconicCallback("diloco(16, warmup=100)")
    >>> callback.strategy.warmup
    100
    """

    def __init__(self, strategy: Strategy | str, *, consensus: Consensus = "mean", check_every: int = 0) -> None:
        self.strategy, self.consensus, self.check_every = check(strategy, consensus), consensus, check_every
        self.run: Run | None = None
        self._training: Training | None = None
        self._evaluation: ExitStack | None = None
        self._mark: str | None = None  # of the save that is going on
        self._loaded: dict[str, Any] = {}  # what Lightning has loaded of this callback's state
        self._random: Any = None  # where generators go at the first batch after a resume
        self._logged_step = 0

    # Beginning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what can't work before anything is built."""
        if stage != "fit":
            return
        others = [one for one in trainer.callbacks if isinstance(one, LaconicCallback)]
        if len(others) > 1:
            given = " and ".join(str(one.strategy) for one in others)
            raise ValueError(f"the Trainer has {len(others)} LaconicCallbacks, of {given}; a model is trained by one strategy")
        if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy | ModelParallelStrategy):
            raise ValueError(
                f"{self.strategy} needs Trainer(strategy='ddp'), or a ModelParallelStrategy whose islands it averages, got "
                f"{type(trainer.strategy).__name__}, which communicates in its own way"
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
        training.replace(trainer.strategy, "remove_checkpoint", _removing)
        if trainer.ckpt_path is not None or self._loaded:  # without a path: Lightning has found what a cluster's restart left
            self._resume(training, trainer.ckpt_path)
        self._logged_step = self.run.step

    def _resume(self, training: Training, path: str | Path | None) -> None:
        state, self._loaded = self._loaded, {}
        folder = None if path is None else folder_of(path)
        self._random = training.resume(folder, mark=state.get("mark") or NO_PARTS, step=state.get("step")).random

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """After a resume: generators go back once the loader's iterator is there, which draws a seed from them."""
        if self._random is not None:
            set_random(self._random)
            self._random = None

    # Training

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log bytes, waits and drift in the steps in which the Trainer logs."""
        if self._training is None or self.run is None or trainer.logger is None:
            return
        step = self.run.step
        if step != self._logged_step and step % trainer.log_every_n_steps == 0:
            self._logged_step = step
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
        filepath = self._trainer.strategy.broadcast(filepath)
        if getattr(self._trainer.strategy, "_save_distributed_checkpoint", False) and "://" not in str(filepath):
            Path(filepath).mkdir(parents=True, exist_ok=True)  # it will be a directory, and the parts are inside
        folder = None if weights_only else folder_of(filepath)
        if folder is not None:
            callback._mark = training.save(folder)
        elif not weights_only:
            warn_once(f"{filepath} is not on a local disk: ranks' own parts are not saved, and a resume will not be exact")
        try:
            with training.evaluating():
                self._save(filepath, weights_only, storage_options)
            if folder is not None and callback._mark is not None:
                training.keep_only(folder, callback._mark)
        finally:
            callback._mark = None
            if validating:
                callback.on_validation_start(None, None)


def _removing(remove_checkpoint: Any) -> Any:
    def remove_with_parts(filepath: str | Path) -> None:
        remove_checkpoint(filepath)
        remove(folder_of(filepath))

    return remove_with_parts


def attach(
    fabric: Any,
    model: Any,
    optimizer: Any | Sequence[Any],
    strategy: Strategy | str,
    *,
    consensus: Consensus = "mean",
    check_every: int = 0,
) -> Run | IdleRun:
    """Fabric: attach to what `fabric.setup(model, optimizer)` returned; as `laconic.attach` otherwise.

        model, optimizer = fabric.setup(model, optimizer)
        with attach(fabric, model, optimizer, "diloco(32)") as run:
            fabric.load("last.ckpt", state)     # where there is one: resumes exactly
            for batch in loader: ...
                fabric.save("last.ckpt", state)  # the model of all ranks, and each rank's own part in last.ckpt.laconic

    `consensus`: which model `fabric.save` saves, where replicas differ. In a single process without a process group nothing is
    attached, and what is returned does nothing.
    """
    with told_to_all():
        chosen = check(strategy, consensus)
        if alone(chosen):
            return IdleRun(chosen)
        ddp, mesh = ddp_in(model), getattr(fabric.strategy, "device_mesh", None)
        if ddp is None and mesh is None:
            raise ValueError(
                f"{chosen} needs what fabric.setup(model, optimizer) returns under Fabric(strategy='ddp') or a "
                f"ModelParallelStrategy; got a {type(model).__name__} without a DistributedDataParallel in it under "
                f"{type(fabric.strategy).__name__}"
            )
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    islands = {} if mesh is None else {"mesh": mesh, "replicate": "data_parallel"}
    run = attach_run(
        getattr(model, "module", model) if ddp is None else ddp,
        [_stepped(one) for one in given],
        chosen,
        scaler=getattr(fabric.strategy.precision, "scaler", None),
        check_every=check_every,
        **islands,
    )
    training = Training(run, consensus)
    training.replace(fabric, "save", lambda save: _FabricSaver(fabric, training, save))
    training.replace(fabric, "load", lambda load: _FabricLoader(fabric, training, load))
    return run


def _stepped(optimizer: Any) -> Optimizer:
    """The optimizer whose `step` Fabric calls: its wrapper looks like one, and never steps itself."""
    inner = vars(optimizer).get("_optimizer") if type(optimizer).__name__.startswith("Fabric") else None
    return inner if isinstance(inner, Optimizer) else optimizer


class _FabricSaver:
    def __init__(self, fabric: Any, training: Training, save: Any) -> None:
        self._fabric, self._training, self._save = fabric, training, save

    def __call__(self, path: str | Path, state: dict[str, Any], filter: Any = None) -> None:  # noqa: A002  # Fabric's name
        path, mark = self._fabric.broadcast(path), None
        folder = folder_of(path)
        if folder is not None:
            mark = self._training.save(folder)
        else:
            warn_once(f"{path} is not on a local disk: ranks' own parts are not saved, and a resume will not be exact")
        with self._training.evaluating():
            self._save(path, {**state, KEY: {"step": self._training.run.step, "mark": mark}}, filter)
        if folder is not None and mark is not None:
            self._training.keep_only(folder, mark)


class _FabricLoader:
    def __init__(self, fabric: Any, training: Training, load: Any) -> None:
        self._fabric, self._training, self._load = fabric, training, load

    def __call__(self, path: str | Path, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        rest: dict[str, Any] = self._load(path, state, strict, **options)
        found = rest.pop(KEY, {})
        folder = folder_of(self._fabric.broadcast(path))
        loaded = self._training.resume(folder, mark=found.get("mark") or NO_PARTS, step=found.get("step"))
        if loaded.random is not None:
            set_random(loaded.random)
        return rest
