"""Writing a checkpoint: to a temporary name, renamed only when every rank is done."""

import json
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.agreement import agree, gather_texts
from laconic.checkpoint import manifest
from laconic.checkpoint.contents import check_own, gather, namer
from laconic.checkpoint.tree import pack
from laconic.run import Run
from laconic.wire import Ledger, TorchGroup, land

CPU = torch.device("cpu")


class Saving:
    """A checkpoint on its way; `wait` until it is there."""

    def __init__(self, work: Callable[[], Path], asynchronous: bool) -> None:
        self._work = work
        self._path: Path | None = None
        self._problem: BaseException | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            # Not a daemon: a training that ends waits for its last checkpoint.
            self._thread = threading.Thread(target=self._run, name="laconic checkpoint")
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except BaseException as problem:  # raised again by `wait`
            self._problem = problem

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """The checkpoint's directory, once it is there; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        if self._problem is not None:
            raise self._problem
        assert self._path is not None
        return self._path


_going: "weakref.WeakKeyDictionary[Run, Saving]" = weakref.WeakKeyDictionary()  # one save of a run at a time


def save(
    path: str | Path,
    *,
    run: Run,
    model: nn.Module | None = None,
    optimizer: Optimizer | list[Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = 3,
    asynchronous: bool = False,
) -> Saving:
    """Save model, optimizers, communication state, scaler and random generators; all ranks together, between steps.

    A directory `step-00000042` appears in `path`, which all ranks must see, when the last rank is done; until then its name
    ends with `.partial`, and a save that is killed leaves the checkpoints before untouched. `extra` is anything plain of this
    rank's own (an epoch, a scheduler's or loader's state). `model` and `optimizer` are the run's own, and may be left out.
    The `keep` newest are kept, None: all. With `asynchronous` the call returns when everything has been copied aside; the
    writing goes on in a thread, with a gloo group of its own.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, or None to keep all, got {keep}")
    check_own(run, model, optimizer)
    before = _going.pop(run, None)
    if before is not None:
        before.wait()
    group, device = run.group, run.device
    target = Path(path) / manifest.folder_name(run.step)
    aside = run.aside() if asynchronous or device.type != "cpu" else group
    tensors, rest = pack(gather(run, extra), namer(run, group.rank))
    flat = {**tensors, f"rank{group.rank}/skeleton": rest}
    if asynchronous:
        flat = {key: tensor.to("cpu", copy=True) for key, tensor in flat.items()}
    identity = agree([f"step {run.step}", f"strategy {run.strategy}", f"keep {keep}"], None, group, device)
    strategy, step = str(run.strategy), run.step
    partial = target.with_name(f"{target.name}.{identity[:8]}{manifest.PARTIAL}")
    saving = Saving(lambda: _write(target, partial, flat, aside, step, strategy, keep), asynchronous)
    if asynchronous:
        _going[run] = saving
        run.before_detach(saving.wait)
    else:
        saving.wait()
    return saving


def _write(
    target: Path, partial: Path, flat: dict[str, Tensor], group: TorchGroup, step: int, strategy: str, keep: int | None
) -> Path:
    first = group.rank == 0
    try:
        _together(group, _prepare if first else None, partial)
        dcp.save(flat, storage_writer=dcp.FileSystemWriter(partial), process_group=group.process_group)
        mine = manifest.describe(partial, [file.name for file in partial.glob(f"__{group.rank}_*")])
        facts = land(gather_texts(json.dumps(mine), CPU), group, Ledger())
        _together(group, _publish if first else None, target, partial, facts, group.world, step, strategy, keep)
    except BaseException as problem:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        cause = _cause(problem)
        raise RuntimeError(f"the checkpoint {target} was not written; those before are untouched: {cause}") from problem
    return target


def _together(group: TorchGroup, task: Callable[..., None] | None, *arguments: object) -> None:
    """One rank does something, the others wait; where it fails, all fail."""
    problem: Exception | None = None
    if task is not None:
        try:
            task(*arguments)
        except Exception as error:
            problem = error
    agree([], problem, group, CPU)


def _prepare(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    manifest.sweep(partial.parent)
    partial.mkdir()


def _publish(target: Path, partial: Path, facts: list[str], world: int, step: int, strategy: str, keep: int | None) -> None:
    files = manifest.describe(partial, [".metadata"])
    for each in facts:
        files |= json.loads(each)
    manifest.new(step, world, strategy, files).write(partial)
    manifest.sync_folder(partial)
    old = None
    if target.exists():  # the same step once more
        old = target.rename(target.with_name(f"{target.name}{manifest.OLD}"))
    partial.rename(target)
    manifest.sync_folder(target.parent)
    if old is not None:
        shutil.rmtree(old)
    if keep is not None:
        for folder in manifest.checkpoints(target.parent)[:-keep]:
            shutil.rmtree(folder)


def _cause(problem: BaseException) -> str:
    """What went wrong on whichever rank: DCP wraps it."""
    failures = getattr(problem, "failures", None)
    if failures:
        return "; ".join(f"rank {rank}: {type(error[0]).__name__}: {error[0]}" for rank, error in failures.items())
    return f"{type(problem).__name__}: {problem}"
