"""What all frameworks need of a run: the model to evaluate, numbers to log, a part in their checkpoints, an end."""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.process_groups import control_device, default_group
from laconic.checkpoint import rank_files
from laconic.comm.group import TorchGroup
from laconic.ranks.agreement import agree
from laconic.run.resume import begin_at
from laconic.run.run import Run, engine_of
from laconic.run.stats import Stats
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Strategy

Consensus = Literal["mean", "anchor", "local"]
"""The model that is evaluated and saved: the mean of the replicas, the outer optimizer's, or each rank's own."""

NO_PARTS = ""  # the mark of a checkpoint that was saved without the ranks' own parts: those beside it are of another save


class Training:
    """A run that a framework's loop drives; it ends with the run."""

    def __init__(self, run: Run, consensus: Consensus) -> None:
        self.run, self._consensus = run, consensus
        self.live = True
        self._drift: float | None = None  # at the last sync
        self._logged = run.stats()
        self._undo: list[Callable[[], None]] = []
        self._inspector = engine_of(run).observe(self)
        self._inspector.watching = True

    # What the run tells

    def stepped(self) -> None:
        """The run has made a step."""
        if self._inspector.syncs:
            self._drift = self._inspector.syncs[-1].drift

    def ended(self, failure: str | None) -> None:
        """The run is about to be taken off."""
        self.live = self._inspector.watching = False
        while self._undo:
            self._undo.pop()()

    # What the framework asks for

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Put what `make` makes of it in the place of a method of this one object, until the run ends.

        Two runs may do so to the same object and end in any order: one that has ended is passed by.
        """
        before, own = getattr(owner, name), vars(owner).get(name)
        made = make(before)

        def ours(*args: Any, **kwargs: Any) -> Any:
            return (made if self.live else before)(*args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is not ours:
                return  # what another run has put around it goes when that one ends
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, ours)
        self.until_the_end(undo)

    def until_the_end(self, undo: Callable[[], None]) -> None:
        """Have this done when the run ends."""
        self._undo.append(undo)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is the one to evaluate and to save; all ranks together."""
        of: Literal["mean", "anchor"] = "mean"
        if self._consensus == "anchor" and _has_anchor(self.run):
            of = "anchor"
        inside = self.live and self._consensus != "local" and not engine_of(self.run).in_consensus
        with self.run.consensus(of) if inside else nullcontext():
            yield

    @property
    def apart(self) -> bool:
        """Whether not all ranks average their gradients in the next step."""
        return self.live and self.run.strategy.route.at(self.run.step) not in ("world", engine_of(self.run).group.world)

    def metrics(self) -> dict[str, float]:
        """Of the steps since the last call: bytes on the cable and seconds of waiting, a step; drift at the last sync."""
        now, before = self.run.stats(), self._logged
        self._logged = now
        steps = now.steps - before.steps
        found: dict[str, float] = {"laconic/total_wire_bytes": float(now.wire_bytes)}
        if steps > 0:
            found["laconic/wire_bytes"] = (now.wire_bytes - before.wire_bytes) / steps
            if now.wait_seconds is not None and before.wait_seconds is not None:
                found["laconic/wait_seconds"] = (now.wait_seconds - before.wait_seconds) / steps
        if self._drift is not None:
            found["laconic/drift"] = self._drift
        return found

    def save(self, folder: Path) -> str:
        """Write this rank's part of a checkpoint below `folder`; all ranks together. Returns the mark of the save."""
        return rank_files.save(folder, run=self.run)

    def keep_only(self, folder: Path, mark: str) -> None:
        """The framework's part of this save is there: the parts of former saves to the same place go."""
        rank_files.remove_others(folder, mark)

    def resume(self, folder: Path | None, *, mark: str | None = None, step: int | None = None) -> rank_files.Loaded:
        """Go on from this rank's part, the framework having loaded its own; all ranks together.

        `folder` is None where the framework's own part is on no disk of ours. Where parts are missing, all ranks go on from
        the model that the framework has loaded on each of them, from `step` if it knows one, and the first rank warns of what
        is lost.
        """
        loaded = rank_files.Loaded("the checkpoint is not on a local disk")
        if folder is not None:
            loaded = rank_files.load(folder, run=self.run, mark=mark)
        if loaded.problem is not None:
            begin_at(engine_of(self.run), self.run.step if step is None else step)
            warn_once(
                f"the checkpoint is resumed without its ranks' own parts: {loaded.problem}. The model is the saved one on all "
                f"ranks, and {self.run.strategy} goes on from step {self.run.step}; lost are residuals of error feedback, "
                "steps since the last sync, the outer optimizer's memory, and the optimizer state of all ranks but the first"
            )
        self._logged = self.run.stats()
        return loaded

    def begin(self) -> None:
        """Go on from a model that the framework has loaded on all ranks, of which nothing else is known; all ranks together."""
        begin_at(engine_of(self.run), self.run.step)
        self._logged = self.run.stats()

    def end(self, error: BaseException | None = None) -> None:
        """The framework's training is over: replicas are made equal, or, after an error, the other ranks are told."""
        if not self.live:
            return
        if error is None:
            self.run.__exit__(None, None, None)
        else:
            engine_of(self.run).fail(error)


class IdleRun:
    """Stands for a run where there is nobody to communicate with: it has a Run's methods, and they do nothing.

    Arguments:
      `strategy`: the one that is not attached.

    >>> import laconic
    >>> run = IdleRun(laconic.diloco(32))
    >>> with run:
    ...     run.sync()
    >>> run.stats().wire_bytes
    0
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.step = strategy, 0

    def stats(self) -> Stats:
        """Nothing was sent."""
        return Stats(0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0.0, {}, {})

    @contextmanager
    def consensus(self, of: Literal["mean", "anchor"] = "mean") -> Iterator[None]:
        """There is one replica."""
        yield

    def advice(self) -> None:
        """There is nothing to choose."""

    def layout(self) -> list[list[str]]:
        """No bucket is sent."""
        return []

    def sync(self) -> None:
        """There is one replica."""

    def swap(self, strategy: Strategy | str) -> None:
        """To another one, which does nothing either."""
        self.strategy = read(strategy)

    def state_dict(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """There is nothing to go on with."""

    def detach(self) -> None:
        """Nothing is attached."""

    def __enter__(self) -> "IdleRun":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def check(strategy: Strategy | str, consensus: object) -> Strategy:
    """The strategy that a user wrote, or an error; before any process group is there."""
    chosen = read(strategy)
    if consensus not in get_args(Consensus):
        raise ValueError(f"consensus must be 'mean', 'anchor' or 'local', got {consensus!r}")
    if consensus == "anchor" and (chosen.averaging is None or chosen.averaging.deltas is None):
        raise ValueError(f"consensus='anchor' is the outer optimizer's model, and {chosen} has none; use 'mean'")
    return chosen


@contextmanager
def told_to_all() -> Iterator[None]:
    """What is refused in here on one rank is an error on all: the others are in `attach`, where ranks compare."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        if dist.is_available() and dist.is_initialized():
            agree([], problem, TorchGroup(default_group()), control_device(default_group()))
        raise


def alone(strategy: Strategy) -> bool:
    """Whether this process trains without a process group; it is said that the strategy does nothing then."""
    if dist.is_available() and dist.is_initialized():
        return False
    warn_once(f"{strategy} is not attached: this is a single process without a process group, and there is nobody to send to")
    return True


def ddp_in(model: object) -> DistributedDataParallel | None:
    """The DistributedDataParallel in what a framework has wrapped."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return next((part for part in parts if isinstance(part, DistributedDataParallel)), None)


def warn_once(sentence: str) -> None:
    """A warning from the first rank, or from the only process."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(sentence, UserWarning, stacklevel=3)


def folder_for(path: str | Path, *, directory: bool) -> Path | None:
    """Where the ranks' own parts of a checkpoint are saved: beside a file, inside of a directory; None: on no disk of ours."""
    here = _on_disk(path)
    if here is None:
        return None
    return here / "laconic" if directory else here.with_name(f"{here.name}.laconic")


def folder_with(path: str | Path, mark: str) -> Path | None:
    """Where the parts of this save are found: a framework may have linked a name to the checkpoint that they belong to."""
    here = _on_disk(path)
    if here is None:
        return None
    places = [place for real in (here, here.resolve()) for place in (real.with_name(f"{real.name}.laconic"), real / "laconic")]
    return next((place for place in places if mark and (place / mark).is_dir()), places[0])


def _on_disk(path: str | Path) -> Path | None:
    local = str(path).removeprefix("file://")
    return None if "://" in local else Path(local).expanduser()


def remove(folder: Path | None) -> None:
    """The checkpoint is removed, and the ranks' own parts with it; each rank removes what it sees."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _has_anchor(run: Run) -> bool:
    return engine_of(run).local.deltas is not None  # a warm-up has none
