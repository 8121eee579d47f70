"""Writing a checkpoint: to a temporary name, renamed only when every rank is done."""

import json
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.checkpoint import manifest
from laconic.checkpoint.contents import check_own, gather, live_engine, namer
from laconic.checkpoint.packing import pack
from laconic.checkpoint.shards import Shards, copied
from laconic.comm.exchange import complete
from laconic.comm.group import CommunicationError, TorchGroup, is_lost
from laconic.comm.ledger import Ledger
from laconic.ranks.agreement import agree, gather_texts
from laconic.run.run import Run

CPU = torch.device("cpu")
GRACE_SECONDS = 30.0  # for a checkpoint on its way when the run has failed


class Saving:
    """A checkpoint on its way; `save` returns it.

    Unless it is asynchronous, it is there already. The next save and the end of the run wait for it, and raise its error if
    `wait` has not; a run that ends by an exception waits for 30 seconds at most, and warns.

    >>> import tempfile, torch, laconic
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "diloco(2)") as run:
    ...     saving = laconic.checkpoint.save(tempfile.mkdtemp(), run=run, asynchronous=True)
    ...     path = saving.wait()
    >>> path.name, saving.done
    ('step-00000000', True)
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, work: Callable[[], Path], asynchronous: bool) -> None:
        self._work = work
        self._path: Path | None = None
        self._problem: BaseException | None = None
        self._told = False
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
        del self._work  # and with it the copy of everything

    @property
    def done(self) -> bool:
        """Whether it is over on this rank, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for it, and return the checkpoint's directory; raises what went wrong.

        That is a CommunicationError where a rank was lost, else a RuntimeError that names the cause. Checkpoints before are
        untouched then.
        """
        if self._thread is not None:
            self._thread.join()
        if self._problem is not None:
            self._told = True
            raise self._problem
        assert self._path is not None
        return self._path

    def settle(self, failed: bool) -> None:
        """Before the run ends: wait, and raise what nobody has been told yet; the run calls this itself.

        Arguments:
          `failed`: whether the run ends by an exception; it waits for 30 seconds at most then.
        """
        if failed:
            assert self._thread is not None
            self._thread.join(GRACE_SECONDS)
            if not self.done or self._problem is not None:
                reason = self._problem or f"it took more than {GRACE_SECONDS} s after the run had failed"
                warnings.warn(f"the last asynchronous checkpoint is lost: {reason}", stacklevel=2)
        elif not self._told:
            self.wait()


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
    """Save model, optimizers, communication state, GradScaler and random generators; all ranks together, between steps.

    A directory `step-00000042` appears in `path` when the last rank is done; until then its name ends with `.partial`, and a
    save that is killed leaves the checkpoints before untouched. What all ranks have alike is written once.

    Bytes: on the network, a few hundred a rank. On disk, parameters and optimizer state once where all ranks have them alike,
    else once a rank; buffers, residuals and deltas a rank; anchors and the outer optimizer's memory once.

    Memory: `asynchronous` keeps a copy of all that is saved until it is written, on the CPU, or, of shards, on their device.

    Not: gradients, NumPy's generator and the position of a loader are not saved. One directory is for one run. It is refused
    inside `run.consensus()`.

    Arguments:
      `path`: the directory of checkpoints, which all ranks must see; it is made.
      `run`: what `laconic.attach` returned, still attached.
      `model`: the run's own, for those who want it checked. Default None: the run's own.
      `optimizer`: the run's own, or a list of them. Default None: the run's own.
      `extra`: a dict of plain data of this rank's own: an epoch, a scheduler's or loader's state. Default None: {}.
      `keep`: how many whole checkpoints are left, this one and the newest others. None: all. Default 3.
      `asynchronous`: whether to return when everything has been copied, and write in a thread, with a gloo group of its own.
        Default False.

    All ranks raise, where one of them can't save: a TypeError or ValueError for arguments and for data that is not plain, a
    RuntimeError where writing failed, a CommunicationError where a rank was lost.

    >>> import tempfile, torch, laconic
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "diloco(2)") as run:
    ...     saving = laconic.checkpoint.save(
    ...         tempfile.mkdtemp(), run=run, extra={"epoch": 7}, keep=2
    ...     )
    >>> saving.wait().name
    'step-00000000'
    >>> torch.distributed.destroy_process_group()
    """
    engine = live_engine(run, "save")
    with engine.during("saving a checkpoint"):
        group, device = engine.group, engine.device
        flat: dict[str, Tensor] = {}
        problem: Exception | None = None
        try:
            before = _going.pop(run, None)
            if before is not None:
                before.settle(failed=False)
            _check_arguments(extra, keep)
            check_own(engine, model, optimizer)
            tensors, rest = pack(gather(engine, extra), namer(engine), Shards(engine).joined)
            flat = {**tensors, f"rank{group.rank}/skeleton": rest}
        except Exception as error:  # whatever it is, no rank may wait for this one
            problem = error
        facts = [f"step {run.step}", f"strategy {run.strategy.compared}", f"keep {keep}", f"asynchronous {asynchronous}"]
        identity = agree(facts, problem, group, device)
        writers = engine.background_group() if asynchronous or device.type != "cpu" else group
        if asynchronous:
            flat = {key: copied(tensor) for key, tensor in flat.items()}
        strategy, step, shards = str(run.strategy), run.step, engine.ranks.shards
        target = Path(path) / manifest.folder_name(step)
        partial = target.with_name(f"{target.name}.{identity[:8]}{manifest.PARTIAL}")
        saving = Saving(lambda: _write(target, partial, flat, writers, step, strategy, shards, keep), asynchronous)
        if asynchronous:
            _going[run] = saving
            engine.before_detach(saving.settle)
        else:
            saving.wait()
    return saving


def _check_arguments(extra: object, keep: object) -> None:
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict of plain data, got {type(extra).__name__}")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool)):
        raise TypeError(f"keep must be a whole number, or None to keep all, got {keep!r}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, or None to keep all, got {keep}")


def _write(
    target: Path,
    partial: Path,
    flat: dict[str, Tensor],
    group: TorchGroup,
    step: int,
    strategy: str,
    shards: int,
    keep: int | None,
) -> Path:
    first = group.rank == 0
    with ExitStack() as locked:
        try:
            _together(group, _prepare if first else None, partial, locked)
            dcp.save(flat, storage_writer=dcp.FileSystemWriter(partial), process_group=group.process_group)
            mine: dict[str, Any] = {}
            _together(group, lambda: mine.update(manifest.describe(partial, _own_files(partial, group.rank))))
            facts = complete(gather_texts(json.dumps(mine), CPU), group, Ledger())
            _together(group, _publish if first else None, target, partial, facts, group.world, step, strategy, shards)
        except BaseException as problem:
            shutil.rmtree(partial, ignore_errors=True)  # by every rank: it may be that each has seen another directory
            if not isinstance(problem, Exception | dcp.CheckpointException):
                raise  # Ctrl-C
            kind = CommunicationError if is_lost(problem) or isinstance(problem, CommunicationError) else RuntimeError
            cause = _cause(problem)
            raise kind(f"the checkpoint {target} was not written; those before are untouched: {cause}") from problem
    _together(group, _tidy if first else None, target, keep)
    return target


def _own_files(partial: Path, rank: int) -> list[str]:
    return [file.name for file in partial.glob(f"__{rank}_*")]


def _together(group: TorchGroup, task: Callable[..., None] | None, *arguments: object) -> None:
    """Some ranks do something, the others wait; where it fails, all fail."""
    problem: Exception | None = None
    if task is not None:
        try:
            task(*arguments)
        except Exception as error:
            problem = error
    agree([], problem, group, CPU)


def _prepare(partial: Path, locked: ExitStack) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    manifest.sweep(partial.parent)
    partial.mkdir()
    locked.enter_context(manifest.lock(partial))


def _publish(target: Path, partial: Path, facts: list[str], world: int, step: int, strategy: str, shards: int) -> None:
    files = manifest.describe(partial, [".metadata"])
    for each in facts:
        files |= json.loads(each)
    written = manifest.new(step, world, strategy, files, shards)
    torn = manifest.missing(partial, written)
    if torn is not None:
        raise FileNotFoundError(f"{torn}, as the first rank sees it: all ranks must write to one directory that all can see")
    written.write(partial)
    manifest.sync_folder(partial)
    if target.exists():  # the same step once more
        target.rename(target.with_name(f"{target.name}{manifest.OLD}"))
    partial.rename(target)


def _tidy(target: Path, keep: int | None) -> None:
    """It is there; what is no longer needed goes, and if it won't, that is no reason to stop a training."""
    try:
        manifest.sync_folder(target.parent)
        (target / manifest.LOCK).unlink()
        manifest.sweep(target.parent)
        if keep is not None:
            manifest.prune(target, keep)
    except OSError as error:
        warnings.warn(f"{target} is written, but not all that is old could be removed: {error}", stacklevel=2)


def _cause(problem: BaseException) -> str:
    """What went wrong on whichever rank: DCP wraps it."""
    failures = getattr(problem, "failures", None)
    if failures:
        return "; ".join(f"rank {rank}: {type(error[0]).__name__}: {error[0]}" for rank, error in failures.items())
    return f"{type(problem).__name__}: {problem}"
