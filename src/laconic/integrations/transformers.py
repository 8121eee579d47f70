"""Transformers: `LaconicTrainer(strategy="diloco(32)", model=..., args=...)` in the place of `Trainer`.

A callback alone can't do it: Transformers gives callbacks neither the trainer nor its DistributedDataParallel, and evaluation
and saving need the model of all ranks while they run.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from laconic.advisor.attach import attach
from laconic.integrations.training import Consensus, IdleRun, Training, alone, check, ddp_in, remove, told_to_all
from laconic.run.run import Run
from laconic.strategies.strategy import Strategy

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        "laconic.integrations.transformers needs Transformers; in laconic's folder: pip install '.[transformers]'"
    ) from error

__all__ = ["LaconicMixin", "LaconicTrainer"]

FOLDER = "laconic"  # in each `checkpoint-N`


class LaconicMixin:
    """Makes any Trainer train by a strategy: derive from it and from the Trainer.

    `laconic_run` is the run while it trains and, afterwards, has its `stats()`. See `LaconicTrainer` for what happens.

    Arguments:
      `args`, `kwargs`: what the Trainer takes.
      `strategy`: an object such as `laconic.diloco(32)`, or its text. Default None: plain DDP, as without this class.
      `consensus`: the model that `evaluate`, `predict` and `save_model` use while replicas differ: their "mean"; the outer
        optimizer's, "anchor"; or each rank's own, "local". Default "mean".

    >>> from laconic.integrations.transformers import LaconicMixin
    >>> from transformers import Seq2SeqTrainer
    >>> class MyTrainer(LaconicMixin, Seq2SeqTrainer):
    ...     pass
    """

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | str | None = None,
        consensus: Consensus = "mean",
        **kwargs: Any,  # what the Trainer takes
    ) -> None:
        self._strategy = None if strategy is None else check(strategy, consensus)
        self._consensus: Consensus = consensus
        self.laconic_run: Run | IdleRun | None = None
        self._training: Training | None = None
        self._resumed_from: str | None = None
        super().__init__(*args, **kwargs)
        if self._strategy is not None:  # before all others: at the end of the training they find replicas that are equal
            self.callback_handler.callbacks.insert(0, _Hooks(self))  # type: ignore[attr-defined]  # the Trainer's

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; other ranks are told of an exception.

        Arguments:
          `resume_from_checkpoint`: a `checkpoint-N`, or True for the last one. With its folder `laconic` the run resumes to the
            same bits, else from the saved model, with one warning. Default None: from the start.
          `args`, `kwargs`: what the Trainer takes.
        """
        self._refuse_sharding()
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(self.args.output_dir)  # type: ignore[attr-defined]
        self._resumed_from = path or None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._end(error)
            raise

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, of the model of all ranks; `args` and `kwargs` are what the Trainer takes."""
        with self._evaluating():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, of the model of all ranks; `args` and `kwargs` are what the Trainer takes."""
        with self._evaluating():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, of the model of all ranks; all ranks together, while it trains.

        Arguments:
          `output_dir`: where to. Default None: the Trainer's own.
        """
        checkpoint = _internal_call and output_dir is not None  # the Trainer begins `checkpoint-N` with this
        whole = checkpoint and not self.args.save_only_model  # type: ignore[attr-defined]
        training, folder = self._training if whole else None, Path(str(output_dir), FOLDER)
        if training is not None:
            remove(folder)  # parts of a former save there never go with what is written now
        with self._evaluating():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if training is not None:
            training.save(folder)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, which counts the tokens of all ranks. In a step that ranks take apart, each counts its own."""
        settings: Any = self.args  # type: ignore[attr-defined]
        if self._training is None or not self._training.apart or not settings.average_tokens_across_devices:
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        settings.average_tokens_across_devices = False
        try:
            samples, tokens = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        finally:
            settings.average_tokens_across_devices = True
        # The loss is divided by this and multiplied by the number of ranks: as if all had as many.
        return samples, None if tokens is None else tokens * settings.world_size

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; the rows of training have bytes, waits and drift as well.

        Arguments:
          `logs`: the row.
          `args`, `kwargs`: what the Trainer takes.
        """
        if self._training is not None and "loss" in logs:
            logs = {**logs, **self._training.metrics()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        """The best weights replace those of the last step: what is outstanding for these is completed before."""
        self._end(None)
        super()._load_best_model()  # type: ignore[misc]

    def _evaluating(self) -> Any:
        return nullcontext() if self._training is None else self._training.evaluating()

    def _begin(self) -> None:
        """Attach to the DDP and the optimizer that the Trainer has prepared, and loaded if it resumes."""
        assert self._strategy is not None
        trainer: Any = self
        self._end(RuntimeError("the Trainer begins anew, with another batch size"))  # auto_find_batch_size
        if alone(self._strategy):
            self.laconic_run = IdleRun(self._strategy)
            return
        with told_to_all():
            ddp = self._ddp(self._strategy)
        try:
            run = attach(ddp, trainer.optimizer, self._strategy, scaler=trainer.accelerator.scaler)
        except ValueError as error:
            if "find_unused_parameters" in str(error):
                error.add_note("the Trainer builds it so unless it has TrainingArguments(ddp_find_unused_parameters=False)")
            raise
        self.laconic_run, self._training = run, Training(run, self._consensus)
        if self._resumed_from is not None:
            self._training.resume(Path(self._resumed_from) / FOLDER, step=trainer.state.global_step)

    def _refuse_sharding(self) -> None:
        """Before the Trainer shards anything."""
        trainer: Any = self
        for enabled, name in ((trainer.is_deepspeed_enabled, "DeepSpeed"), (trainer.is_fsdp_enabled, "FSDP")):
            if enabled and self._strategy is not None:
                raise ValueError(
                    f"{self._strategy} can't be attached under the Trainer with {name}, which communicates in its own way; "
                    "train with plain DDP, or shard by fully_shard in a loop of your own: laconic.attach(mesh=)"
                )

    def _ddp(self, strategy: Strategy) -> DistributedDataParallel:
        """The DDP that the Trainer has made, or an error that says why there is none."""
        trainer: Any = self
        ddp = ddp_in(trainer.model_wrapped)
        if ddp is None:
            raise ValueError(
                f"{strategy} needs a model that the Trainer wraps in DistributedDataParallel, and it has wrapped this "
                f"{type(trainer.model).__name__} in a {type(trainer.model_wrapped).__name__}"
            )
        return ddp

    def _end(self, error: BaseException | None) -> None:
        training, self._training = self._training, None
        if training is not None:
            training.end(error)


class _Hooks(TrainerCallback):  # type: ignore[misc]  # Transformers' classes are not typed here
    """When the Trainer begins and ends."""

    def __init__(self, trainer: LaconicMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._end(None)


class LaconicTrainer(LaconicMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` by a strategy.

    `TrainingArguments` stay as they are. (One means less: `average_tokens_across_devices`, a collective in each step, is for
    the steps in which all ranks average their gradients. In the others, a rank divides its loss by its own tokens.)

    `evaluate`, `predict`, `save_model` and checkpoints use the model of all ranks. `resume_from_checkpoint` resumes to the same
    bits: each `checkpoint-N` has a folder `laconic` with a file a rank. Rows of the log have `laconic/wire_bytes`,
    `laconic/wait_seconds` (a step), `laconic/total_wire_bytes` and `laconic/drift`, so all reporters show them. `laconic_run`
    is the run. For other Trainers there is `LaconicMixin`.

    Bytes: those of the strategy; an evaluation or a checkpoint sends parameters once where replicas differ.

    Memory: that of the strategy, and a copy of the parameters during an evaluation or a checkpoint where replicas differ.

    Not: DeepSpeed and FSDP under the Trainer are refused. In a single process without a process group nothing is attached, and
    a warning says so.

    Arguments:
      `strategy`: an object such as `laconic.diloco(32)`, or its text. Default None: plain DDP.
      `consensus`: the model that is evaluated and saved while replicas differ: their "mean"; the outer optimizer's, "anchor";
        or each rank's own, "local". Default "mean".
      `args`, `kwargs`: all other arguments are the Trainer's own.

    >>> from laconic.integrations.transformers import LaconicTrainer
    >>> trainer = LaconicTrainer(  # doctest: +SKIP
    ...     strategy="int8()", model=model, args=args, train_dataset=data
    ... )
    >>> trainer.train()  # doctest: +SKIP
    >>> trainer.laconic_run.stats().wire_bytes_per_step  # doctest: +SKIP
    """
