"""Presence: who is still training, at which step, and who has left.

A peer that is gone is an error that says who and when, and not a job that hangs.
"""

import json
import math
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Rounds
from laconic.comm.group import TorchGroup


class UnevenError(RuntimeError):
    """Ranks made different numbers of steps, or one has left while others need it.

    Every rank that finds out raises it: at the end of the block, at a sync, and five seconds after it began to wait for a rank
    that has gone. Its text has the step of each rank that is known, and the error of one that has failed. Give every rank as
    many batches, or attach with `uneven="stop"`.

    Not: on an accelerator, whose waits don't block the host, a rank that waits in backward finds out by the timeout of the
    process group.

    >>> import laconic
    >>> try:  # doctest: +SKIP
    ...     with laconic.attach(model, optimizer, "local_sgd(100)"):
    ...         for batch in batches:  # 3 of them on rank 0, 5 on rank 1
    ...             loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
    ... except laconic.UnevenError as error:
    ...     print(error)
    the ranks are not in step: rank 0 left after 3 steps, rank 1 left after 5 steps; give every rank as many batches, ...
    """


def gather_flags(mine: bool, device: torch.device) -> Rounds[list[bool]]:
    """Every rank's yes or no."""
    rows: Tensor = yield AllGather(torch.tensor([mine], dtype=torch.uint8, device=device))
    return [bool(row) for row in rows.flatten().tolist()]


def still_training(going: bool, device: torch.device) -> Rounds[list[bool]]:
    """Which ranks still go on."""
    return gather_flags(going, device)


class Heartbeat(NamedTuple):
    """What ranks tell each other at a sync."""

    step: int
    squares: list[float]  # how far each replica has come, squared
    rates: list[float]  # learning rates, as the first rank has them
    broken: list[str]  # ranks whose numbers are not finite
    own_squares: list[float]  # how far this rank's shard of each replica has come


def heartbeat(
    step: int, square: float, rates: Sequence[float], group: TorchGroup, device: torch.device, shards: int = 1
) -> Rounds[Heartbeat]:
    """Make sure that all ranks are at the same step; tell how far each has come, and agree on learning rates.

    So many neighbouring ranks hold the `shards` of one replica.
    """
    rows = (yield AllGather(torch.tensor([step, square, *rates], dtype=torch.float64, device=device))).tolist()
    steps = [int(row[0]) for row in rows]
    if len(set(steps)) > 1:
        made = ", ".join(f"{rank} made {n} steps" for rank, n in zip(group.names, steps, strict=True))
        raise UnevenError(f"the ranks are not in step: {made}")
    squares = [row[1] for row in rows]
    broken = [name for name, each in zip(group.names, squares, strict=True) if not math.isfinite(each)]
    replicas = [sum(squares[place : place + shards]) for place in range(0, len(squares), shards)]
    return Heartbeat(step, replicas, rows[0][2:], broken, squares[group.rank % shards :: shards])


class Report(NamedTuple):
    """What a rank lets the others know when it leaves, one way or the other."""

    step: int
    drifted: bool  # it has taken steps that the others have not seen
    state: str


class Presence:
    """Who has left the block, after how many steps and why, kept in the process group's store.

    It costs nothing while all goes well: a rank writes when it leaves, and reads when it leaves or when a collective has
    been outstanding for suspiciously long.
    """

    def __init__(self, store: dist.Store, identity: str, rank: int, names: Sequence[str]) -> None:
        self.step = 0  # the run's clock, set from outside
        self._store = dist.PrefixStore(f"laconic/{identity}", store)
        self._rank, self._names = rank, names
        self._limit_seconds: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stubs lack it
        self._left = False
        self._loads = 0  # that all ranks have made together

    def report(self, state: str, *, drifted: bool = False) -> None:
        """Let the others know where this rank is."""
        self._store.set(str(self._rank), json.dumps([self.step, drifted, state]))

    def seen(self) -> dict[int, Report]:
        """What the ranks that have reported have said."""
        try:
            known = [rank for rank in range(len(self._names)) if self._store.check([str(rank)])]
            return {rank: Report(*json.loads(self._store.get(str(rank)))) for rank in known}
        except RuntimeError as error:
            raise UnevenError(f"another rank has ended: the process group's store is gone ({error})") from error

    def check_peers(self) -> None:
        """A collective takes long: raise if a peer that it needs has gone, or waits for this rank to load a state."""
        if not self._left and self._loaders():
            self._refuse_load()
        seen = self.seen()
        gone = any(rank != self._rank for rank in seen)
        if _failed(seen) if self._left else gone:
            self.report(f"is in step {self.step + 1}")
            raise UnevenError(self._sentence(advise=True))

    def check_peers_in_background(self) -> None:
        """The same where training doesn't wait for it: a peer that has left is still there, one that has failed is not."""
        seen = self.seen()
        if any(rank != self._rank and report.state.startswith("failed") for rank, report in seen.items()):
            raise UnevenError(self._sentence(advise=False))

    def await_loads(self) -> None:
        """This rank has loaded a state in mid-run: wait until all have, raise where another goes on without.

        In the store, because a rank that knows nothing of a load is on its way into other collectives. It finds out there.
        """
        self._store.set(f"load {self._loads} {self._rank}", str(self.step))
        start, pause = time.monotonic(), 0.001
        while len(self._loaders()) < len(self._names):
            if self.seen() or time.monotonic() - start > self._limit_seconds:
                self._refuse_load()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        self._loads += 1

    def _loaders(self) -> dict[int, int]:
        """Ranks that have loaded a state since all did so together, and after which step."""
        keys = {rank: f"load {self._loads} {rank}" for rank in range(len(self._names))}
        try:
            return {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        except RuntimeError as error:
            raise UnevenError(f"another rank has ended: the process group's store is gone ({error})") from error

    def _refuse_load(self) -> NoReturn:
        self.report(f"is in step {self.step + 1}")
        loaders = self._loaders()
        having = ", ".join(name for rank, name in enumerate(self._names) if rank in loaders)
        others = ", ".join(name for rank, name in enumerate(self._names) if rank not in loaders)
        raise UnevenError(
            f"after step {min(loaders.values())} {having} loaded an optimizer's state, {others} did not: "
            "load it on all ranks, or on none"
        )

    def mark_restored(self) -> None:
        """Before it leaves: this rank's parameters are not the run's any more, the user has loaded others."""
        self._store.set(f"restored {self._rank}", "")

    def restored(self) -> list[bool]:
        """Which ranks have said so; the same on all ranks once all have left."""
        return [self._store.check([f"restored {rank}"]) for rank in range(len(self._names))]

    def leave(self, *, drifted: bool, may_differ: bool) -> bool:
        """Report, wait until all have left, raise if they don't fit together; whether any rank has drifted."""
        self.report(f"left after {self.step} steps", drifted=drifted)
        self._left = True
        start, pause = time.monotonic(), 0.001
        while len(seen := self.seen()) < len(self._names) and not _failed(seen):
            if time.monotonic() - start > self._limit_seconds:
                raise UnevenError(f"{self._sentence(advise=False)}; waited {self._limit_seconds:.0f} s for the others")
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        if _failed(seen) or (len({report.step for report in seen.values()}) > 1 and not may_differ):
            raise UnevenError(self._sentence(advise=not may_differ))
        return any(report.drifted for report in seen.values())

    def _sentence(self, *, advise: bool) -> str:
        seen = self.seen()
        where = ", ".join(f"{self._names[rank]} {report.state}" for rank, report in sorted(seen.items()))
        broken = any(report.state.startswith("failed") for report in seen.values())
        advice = "; give every rank as many batches, or attach with uneven='stop'" if advise and not broken else ""
        return f"the ranks are not in step: {where}{advice}"


def _failed(seen: dict[int, Report]) -> bool:
    return any(not report.state.startswith("left") for report in seen.values())
