"""Accelerate: after `accelerator.prepare(...)`, `with attach(accelerator, model, optimizer, "diloco(32)") as run:`."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from laconic.advisor.attach import attach as attach_run
from laconic.integrations.private_parts import prepared_models, prepared_optimizers
from laconic.integrations.training import Consensus, IdleRun, Training, alone, check, ddp_in, remove, told_to_all
from laconic.run.run import Run
from laconic.strategies.local_recipes import local_sgd
from laconic.strategies.strategy import Strategy

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "laconic.integrations.accelerate needs Accelerate; in laconic's folder: pip install '.[accelerate]'"
    ) from error

__all__ = ["LocalSGD", "attach"]

FOLDER = "laconic"  # in the directory of `accelerator.save_state`


def attach(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any | Sequence[Any],
    strategy: Strategy | str,
    *,
    consensus: Consensus = "mean",
    check_every: int = 0,
) -> Run | IdleRun:
    """Attach to what `accelerator.prepare` returned; as `laconic.attach` otherwise.

    Steps are counted as Accelerate makes them: under `accelerator.accumulate`, one for all micro-batches of a step, and one
    where its GradScaler skips.

    `accelerator.save_state(folder)`, which all ranks call together, saves the model of all ranks, and each rank's own part in
    `folder/laconic`. `load_state(folder)` goes on from there to the same bits; call it after `attach`. Elsewhere, write
    `with run.consensus():` around an evaluation, `accelerator.save_model` and `get_state_dict`.

    Bytes: those of the strategy. `save_state` sends parameters once where replicas differ.

    Memory: that of the strategy, and a copy of the parameters during `save_state` where replicas differ.

    Not: DeepSpeed, FSDP and Megatron under Accelerate are refused. In a single process without a process group nothing is
    attached, a warning says so, and what is returned does nothing.

    Arguments:
      `accelerator`: the Accelerator. Its GradScaler is used, if it has one.
      `model`: what `accelerator.prepare` returned for the model.
      `optimizer`: what it returned for the optimizer, or a list of several.
      `strategy`: an object such as `laconic.diloco(32)`, or its text.
      `consensus`: which model `save_state` saves where replicas differ: their "mean"; the outer optimizer's, "anchor"; or the
        first rank's own, "local". Default "mean".
      `check_every`: as in `laconic.attach`. Default 0.

    It raises what `laconic.attach` raises, on all ranks, and a ValueError for a model that is not prepared.

    >>> from laconic.integrations.accelerate import attach
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> with attach(accelerator, model, optimizer, "diloco(32)") as run:  # doctest: +SKIP
    ...     for batch in loader:
    ...         accelerator.backward(loss(model, batch))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """
    with told_to_all():
        chosen = check(strategy, consensus)
        if accelerator.distributed_type == DistributedType.NO and alone(chosen):
            return IdleRun(chosen)
        ddp = _ddp(accelerator, model, chosen)
    run = attach_run(ddp, optimizer, chosen, scaler=accelerator.scaler, check_every=check_every)
    training = Training(run, consensus)
    _Checkpoints(accelerator, model, training)
    return run


def _ddp(accelerator: Accelerator, model: torch.nn.Module, strategy: Strategy) -> DistributedDataParallel:
    """The DDP that `prepare` has made, or an error that says why there is none."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{strategy} can't be attached under Accelerate with {kind.value}, which communicates in its own way; choose "
            "multi-GPU or multi-CPU in `accelerate config`. Models that fully_shard shards: see laconic.attach(mesh=)"
        )
    ddp = ddp_in(model)
    if ddp is None:
        raise ValueError(
            f"{strategy} needs the model that accelerator.prepare returns, and this {type(model).__name__} has no "
            "DistributedDataParallel around it: write model, optimizer = accelerator.prepare(model, optimizer) first"
        )
    return ddp


class _Checkpoints:
    """What `save_state` and `load_state` do besides, as long as the run lasts."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, training: Training) -> None:
        self._training, self._name = training, _name(accelerator, model)
        self._folder: Path | None = None  # of the ranks' own parts, in the directory that Accelerate has chosen
        training.until_the_end(accelerator.register_save_state_pre_hook(self._saving).remove)
        training.until_the_end(accelerator.register_load_state_pre_hook(self._loading).remove)
        training.replace(accelerator, "save_state", lambda save: self._save_state(save))
        training.replace(accelerator, "load_state", lambda load: self._load_state(load))

    def _saving(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        """On all ranks, before Accelerate writes. Parts of a former save there never go with what is written now."""
        self._folder = Path(output_dir) / self._name
        remove(self._folder)

    def _loading(self, models: list[torch.nn.Module], input_dir: str) -> None:
        """On all ranks, before Accelerate reads."""
        self._folder = Path(input_dir) / self._name

    def _save_state(self, save: Any) -> Any:
        def save_state(*args: Any, **kwargs: Any) -> Any:
            with self._training.evaluating():  # for all of it: hooks of the user's own may write the model, too
                result = save(*args, **kwargs)
            assert self._folder is not None, "Accelerate calls its hooks"
            self._training.save(self._folder)
            return result

        return save_state

    def _load_state(self, load: Any) -> Any:
        def load_state(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            assert self._folder is not None, "Accelerate calls its hooks"
            self._training.resume(self._folder)
            return result

        return load_state


def _name(accelerator: Accelerator, model: torch.nn.Module) -> str:
    """A folder a model, numbered as Accelerate numbers its files: two runs of one accelerator are saved at once.

    Accelerate keeps what it was given, which is inside of what it returned.
    """
    parts = {id(part) for part in model.modules()}
    place = next((place for place, one in enumerate(prepared_models(accelerator)) if id(one) in parts), 0)
    return FOLDER if place == 0 else f"{FOLDER}_{place}"


class LocalSGD:
    """In the place of `accelerate.local_sgd.LocalSGD`: the same constructor, context manager and `step`.

    What differs: buffers and the optimizers' moments are averaged too, and optimizer steps are counted, not calls of `step`,
    which does nothing here. `run` is the run, inside of the block.

    Bytes: those of `local_sgd(local_sgd_steps, moments="average")`, or of `strategy`.

    Memory: that of the strategy.

    Arguments:
      `accelerator`: the Accelerator.
      `model`: what `accelerator.prepare` returned for the model.
      `local_sgd_steps`: steps from one averaging to the next. Not used with `strategy`.
      `enabled`: whether to do anything. Default True.
      `strategy`: another one instead, such as `"diloco(8)"`. Default None: parameters are averaged.
      `optimizer`: the prepared optimizer, or several. Default None: those that the accelerator has prepared over the model.

    It raises what `attach` raises, and a ValueError where no optimizer over the model has been prepared.

    >>> from laconic.integrations.accelerate import LocalSGD
    >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:  # doctest: +SKIP
    ...     for batch in loader:
    ...         with accelerator.accumulate(model):
    ...             accelerator.backward(loss(model, batch))
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    ...             local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        strategy: Strategy | str | None = None,
        optimizer: Any | Sequence[Any] | None = None,
    ) -> None:
        self.enabled: bool = enabled and accelerator.distributed_type != DistributedType.NO
        with told_to_all() if self.enabled else nullcontext():
            self._strategy = check(local_sgd(local_sgd_steps, moments="average") if strategy is None else strategy, "mean")
        self.accelerator, self.model, self.local_sgd_steps = accelerator, model, local_sgd_steps
        self._optimizer = optimizer
        self.num_steps: int = 0
        self.run: Run | IdleRun = IdleRun(self._strategy)

    def step(self) -> None:
        """Counted for those who read `num_steps`; what is due is done after the optimizer's step."""
        self.num_steps += 1

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            with told_to_all():
                optimizers = self._prepared() if self._optimizer is None else self._optimizer
            self.run = attach(self.accelerator, self.model, optimizers, self._strategy)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.run.__exit__(kind, error, trace)

    def _prepared(self) -> list[Any]:
        """The optimizers over the model that the accelerator has prepared."""
        ours = {id(parameter) for parameter in self.model.parameters()}
        found = [
            one
            for one in prepared_optimizers(self.accelerator)
            if any(id(parameter) in ours for group in one.param_groups for parameter in group["params"])
        ]
        if not found:
            raise ValueError(
                "LocalSGD found no prepared optimizer over this model: call accelerator.prepare(model, optimizer) first, or "
                "give optimizer="
            )
        return found
