"""Lightning's Fabric: `laconic.integrations.lightning.attach`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from laconic.advisor.attach import attach as attach_run
from laconic.checkpoint.contents import set_random
from laconic.integrations.private_parts import saves_directories
from laconic.integrations.training import (
    NO_PARTS,
    Consensus,
    IdleRun,
    Training,
    alone,
    check,
    ddp_in,
    folder_for,
    folder_with,
    told_to_all,
    warn_once,
)
from laconic.run.run import Run
from laconic.strategies.strategy import Strategy

KEY = "laconic"


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

    `fabric.save("last.ckpt", state)`, which all ranks call together, saves the model of all ranks, and each rank's own part in
    `last.ckpt.laconic`. `fabric.load` inside of the block resumes to the same bits with it. What is saved and loaded without
    the model is left to Fabric. Evaluate under `with run.consensus():`.

    Bytes: those of the strategy. `save` sends parameters once where replicas differ.

    Memory: that of the strategy, and a copy of the parameters during `save` where replicas differ.

    Not: in a single process without a process group nothing is attached, a warning says so, and what is returned does nothing.

    Arguments:
      `fabric`: the Fabric, with strategy "ddp" or a ModelParallelStrategy, whose mesh dimension `data_parallel` counts islands.
      `model`: what `fabric.setup` returned for the model.
      `optimizer`: what it returned for the optimizer, or a list of several.
      `strategy`: an object such as `laconic.diloco(32)`, or its text.
      `consensus`: which model `save` saves where replicas differ: their "mean"; the outer optimizer's, "anchor"; or the first
        rank's own, "local". Default "mean".
      `check_every`: as in `laconic.attach`. Default 0.

    It raises what `laconic.attach` raises, on all ranks, and a ValueError for a model that Fabric has not set up.

    >>> from laconic.integrations.lightning import attach
    >>> model, optimizer = fabric.setup(model, optimizer)  # doctest: +SKIP
    >>> with attach(fabric, model, optimizer, "diloco(32)") as run:  # doctest: +SKIP
    ...     for batch in loader:
    ...         fabric.backward(loss(model, batch))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     fabric.save("last.ckpt", {"model": model, "optimizer": optimizer})
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
    islands = {} if mesh is None else {"mesh": mesh, "replicate": "data_parallel"}
    run = attach_run(
        _inner(model) if ddp is None else ddp,
        optimizer,
        chosen,
        scaler=getattr(fabric.strategy.precision, "scaler", None),
        check_every=check_every,
        **islands,
    )
    training = Training(run, consensus)
    training.replace(fabric, "save", lambda save: _Saver(fabric, training, _inner(model), save))
    training.replace(fabric, "load", lambda load: _Loader(fabric, training, _inner(model), load))
    return run


def _inner(model: Any) -> Any:
    """The module that was given to Fabric."""
    return getattr(model, "module", model)


def _has(state: Any, module: Any) -> bool:
    """Whether the module is among what is saved or loaded."""
    values: Iterable[Any] = state.values() if isinstance(state, dict) else [state]
    return any(_inner(value) is module for value in values)


class _Saver:
    """Stands for `Fabric.save`: ranks save their parts, then Fabric saves the model of all."""

    def __init__(self, fabric: Any, training: Training, module: Any, save: Any) -> None:
        self._fabric, self._training, self._module, self._save = fabric, training, module, save

    def __call__(self, path: str | Path, state: dict[str, Any], filter: Any = None) -> None:  # noqa: A002  # Fabric's name
        if not _has(state, self._module):
            self._save(path, state, filter)
            return
        path, mark = self._fabric.broadcast(path), None
        folder = folder_for(path, directory=saves_directories(self._fabric.strategy))
        if folder is not None:
            mark = self._training.save(folder)
        else:
            warn_once(f"{path} is not on a local disk: ranks' own parts are not saved, and a resume will not be exact")
        with self._training.evaluating():
            self._save(path, {**state, KEY: {"step": self._training.run.step, "mark": mark}}, filter)
        if folder is not None and mark is not None:
            self._training.keep_only(folder, mark)


class _Loader:
    """Stands for `Fabric.load`: Fabric loads the model of all, then each rank goes on from its own part."""

    def __init__(self, fabric: Any, training: Training, module: Any, load: Any) -> None:
        self._fabric, self._training, self._module, self._load = fabric, training, module, load

    def __call__(self, path: str | Path, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        rest: dict[str, Any] = self._load(path, state, strict, **options)
        if not _has(state, self._module):
            return rest
        found = rest.pop(KEY, None)
        if found is None:  # saved without a strategy
            self._training.begin()
            return rest
        mark = found.get("mark") or NO_PARTS
        folder = folder_with(self._fabric.broadcast(path), mark)
        loaded = self._training.resume(folder, mark=mark, step=found.get("step"))
        if loaded.random is not None:
            set_random(loaded.random)
        return rest
