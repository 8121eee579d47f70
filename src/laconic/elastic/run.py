"""A strategy of local updates at work among workers that come and go.

One sync, step by step; if anything fails before the end, nothing has been written:

1. torchft's lighthouse says who is there (`Membership.meet`). If that has changed, the process group is a new one, and deltas
   that were outstanding on the old one are dropped by all: they are still in the parameters, and leave with the next ones.
2. All tell each other what they train, how far they are, and how many steps they bring along.
3. A worker whose state is not the newest takes that of one that has it (`healing.py`).
4. Deltas or parameters are exchanged, weighted by the steps that they are of.
5. Everybody says that all of it has arrived. Only then is anything written, and the state gets the next version.

If a worker is lost during 5, some may have heard from all and written, while others have not and drop the sync. These find
at the next one that there is a newer version, and take it. Two workers may then have the same version of different states, if
one was away meanwhile: a lineage, a number made from all quorums before, tells them apart, and most win.
"""

import hashlib
import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Rounds, complete
from laconic.comm.group import CommunicationError
from laconic.comm.ledger import Ledger
from laconic.elastic import healing
from laconic.elastic.island import Island
from laconic.elastic.membership import Membership, MembershipError, Quorum
from laconic.elastic.metering import Metering
from laconic.elastic.progress import Progress
from laconic.elastic.state import Elastic
from laconic.ranks.agreement import differences, gather_texts
from laconic.run.arguments import attached
from laconic.run.clock import Clock
from laconic.strategies.strategy import Strategy

Late = Literal["carry", "drop"]
Weights = Literal["steps", "equal"]

log = logging.getLogger("laconic.elastic")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0  # between two tries to join


@dataclass(frozen=True)
class ElasticStats:
    """What this worker has done and seen since it was attached."""

    steps: int  # of the run: a worker that joins takes over its peers' clock
    version: int  # how often the state of the run has changed
    syncs: int  # that this worker took part in to the end
    dropped: int  # that came to nothing
    healed: int  # times that this worker took its state from a peer
    joined: int  # workers that it has seen come
    lost: int  # workers that it has seen go without a word
    left: int  # workers that said that they would leave
    workers: tuple[str, ...]  # who goes on after the last sync
    weights: dict[str, float]  # how much each worker counted in it, 1 on average
    lost_residual_norm: (
        float  # of what error feedback held and nobody will send: of lost workers as of their last sync, and own
    )
    payload_bytes: int
    wire_bytes: int
    collectives: int
    wait_seconds: float | None
    quorum_seconds: float  # in which this worker waited for the others to come together


class Options(NamedTuple):
    """What `attach` was told."""

    min_replicas: int
    weights: Weights
    late: Late
    leave_seconds: float


class Row(NamedTuple):
    """What one worker tells the others at a sync."""

    version: int
    lineage: int
    step: int
    leaving: bool
    residual_norm: float
    steps: list[float]  # that it brings along, by fragment

    @classmethod
    def read(cls, numbers: Sequence[float]) -> Self:
        version, lineage, step, leaving, norm, *steps = numbers
        return cls(int(version), int(lineage), int(step), bool(leaving), norm, steps)


class ElasticRun:
    """A strategy attached to a model, among workers that may change; made by `laconic.elastic.attach`."""

    def __init__(
        self,
        parts: Elastic,
        membership: Membership,
        island: Island,
        options: Options,
    ) -> None:
        self._parts, self._membership, self._island = parts, membership, island
        self._options = options
        self._group = membership.group
        self._control, self._ledger = Ledger(), parts.ledger
        self._version = self._lineage = 0
        self._progress = Progress(parts.fragments)
        self._names: tuple[str, ...] = ()
        self._counted: dict[str, float] = {}
        self._norms: dict[str, float] = {}  # of each worker's residual, when the last sync began
        self._counts = dict.fromkeys(("syncs", "dropped", "healed", "joined", "lost", "left"), 0)
        self._lost_norm = 0.0
        self._metering = Metering(parts.inspector, parts.ledger, self._about, parts.module, parts.strategy)
        self._doubt: dict[str, Tensor] | None = None  # parameters when a sync was dropped that others may have made
        self._leaving = self._told_to_leave = self._ended = False
        self._handler: Any = None
        self._clock = Clock(parts.optimizers, parts.scaler, self._after_step)
        self._join()

    # What a user sees

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far."""
        return self._clock.step

    @property
    def version(self) -> int:
        """Syncs so far that changed the state."""
        return self._version

    @property
    def strategy(self) -> Strategy:
        """What it goes by."""
        return self._parts.strategy

    def stats(self) -> ElasticStats:
        """Counts of this worker, since it was attached."""
        total = self._ledger.total + self._control.total
        return ElasticStats(
            self._clock.step,
            self._version,
            **self._counts,
            workers=self._names,
            weights=self._counted,
            lost_residual_norm=self._lost_norm,
            payload_bytes=total.payload_bytes,
            wire_bytes=total.wire_bytes,
            collectives=total.collectives,
            wait_seconds=self._ledger.wait_seconds,
            quorum_seconds=self._metering.quorum_seconds,
        )

    def source(self) -> Metering:
        """What `laconic.Meter(run, folder)` reads."""
        return self._metering

    def _about(self) -> dict[str, Any]:
        place = f".{self._island.rank}" if self._island.rank else ""
        return {
            "worker": f"{self._membership.name}{place}",
            "rank": self._island.rank,
            "world": max(1, len(self._names)),
            "shards": self._island.size,
            "parameters": sum(parameter.numel() for parameter in self._parts.module.parameters()),
        }

    def leave(self) -> None:
        """Take part in the next sync, hand over what error feedback still holds, and go. Raises SystemExit(0) after it.

        SIGTERM does the same after the step that is being made.
        """
        self._leaving = True

    def detach(self) -> None:
        """Go at once: the others go on without this worker after their lighthouse has missed its heartbeats."""
        self._end(None)

    def _end(self, failure: str | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._clock.stop()
        attached.difference_update(self._parts.optimizers)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        self._metering.ended(failure)
        self._membership.leave()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(f"{type(error).__name__}: {error}" if isinstance(error, Exception) else None)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.leave()

    # The loop

    def _join(self) -> None:
        """Until there is a state to start from: everybody's at first, or that of a run which is under way."""
        pause, began = FIRST_PAUSE_SECONDS, time.monotonic()
        while self._version == 0:
            try:
                self._sync()
            except CommunicationError as error:
                self._failed(error)
                if time.monotonic() - began > self._membership.quorum_seconds:
                    self.detach()
                    raise
                log.info("%s could not join yet: %s", self._membership.name, error)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except BaseException:
                self.detach()
                raise

    def _after_step(self) -> None:
        self._parts.drift()
        self._progress.stepped()
        if self._leaving and self._island.size == 1:
            self._go()
        if self._parts.departures(self._clock.step):
            if self._try(self._sync) and self._told_to_leave:
                self._gone()
        elif self._parts.outstanding:
            self._try(lambda: self._exchange([]))
        self._metering.stepped()

    def _try(self, act: Callable[[], None]) -> bool:
        """A sync that fails is dropped: training goes on, and the next one has what this one would have had."""
        try:
            act()
        except CommunicationError as error:
            self._failed(error)
            log.warning("%s, step %d: the sync is dropped: %s", self._membership.name, self._clock.step, error)
            return False
        return True

    def _failed(self, error: CommunicationError) -> None:
        self._counts["dropped"] += 1
        self._metering.dropped(self._clock.step, self._version, str(error))
        self._progress.undo(self._parts.undo())
        self._membership.failed()

    def _go(self) -> NoReturn:
        """Take part in one more sync, and leave."""
        deadline = time.monotonic() + self._options.leave_seconds
        self._membership.hurry(self._options.leave_seconds)
        while not self._try(self._sync) and time.monotonic() < deadline:
            time.sleep(FIRST_PAUSE_SECONDS)
        self._gone()

    def _gone(self) -> NoReturn:
        log.info("%s leaves after step %d", self._membership.name, self._clock.step)
        self.detach()
        raise SystemExit(0)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What one rank of this island can't do, none of them does."""
        problem: BaseException | None = None
        try:
            yield
        except BaseException as error:
            problem = error
        self._agree(problem)

    def _agree(self, problem: BaseException | None) -> None:
        fine = problem is None
        if self._island.size > 1:
            fine = self._membership.together(fine)
        if problem is not None:
            raise problem
        if not fine:
            raise CommunicationError("another rank of this island could not do its part")

    # One sync

    def _sync(self) -> None:
        leaving, square = self._island.sums([float(self._leaving), self._parts.residual_square()])
        self._told_to_leave = leaving > 0
        with self._together():
            quorum = self._meet()
            rows = self._tell(math.sqrt(square))
            newest, lineage = _newest(rows)
            state = self._healed(rows, newest, lineage)
        if state is not None:
            self._adopt(state, newest, lineage)
        self._doubt = None
        if newest > 0:
            step = max(row.step for row in rows if (row.version, row.lineage) == (newest, lineage))
            self._clock.set(step, [0] * len(self._clock.ahead))  # who leaves may have come before it was due
        if quorum.world < self._options.min_replicas:
            raise CommunicationError(f"{quorum.world} workers are there, and min_replicas is {self._options.min_replicas}")
        due = self._parts.departures(self._clock.step) if newest > 0 else []
        self._weigh(rows, due)
        self._parts.share_residuals(quorum.world)
        self._exchange(due)
        with self._together():
            self._everywhere()
            if newest == 0:
                self._advance()
            self._count(quorum, rows)
            self._hand_over(rows)

    def _meet(self) -> Quorum:
        began = time.perf_counter()
        try:
            quorum = self._membership.meet(self._version)
        finally:
            self._metering.quorum_seconds += time.perf_counter() - began
        if quorum.changed:
            self._progress.undo(self._parts.undo())
            self._compare(quorum)
        self._parts.mark()
        return quorum

    def _tell(self, residual_norm: float) -> list[Row]:
        """What all workers say of themselves."""
        steps = self._progress.steps
        mine = [self._version, self._lineage, self._clock.step, self._told_to_leave, residual_norm, *steps]
        return [Row.read(row) for row in self._gather(mine)]

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """These numbers of all workers."""
        mine = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=self._group.device)
        rows: list[list[float]] = complete(_rows(mine), self._group, self._control).tolist()
        return rows

    def _compare(self, quorum: Quorum) -> None:
        """Refuse who trains something else; the reference is a worker with the newest state."""
        text = "\n".join(self._parts.facts())
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        rows = self._gather([self._version, digest])
        first = max(range(len(rows)), key=lambda rank: (rows[rank][0], -rank))
        odd = [rank for rank, row in enumerate(rows) if row[1] != rows[first][1]]
        if not odd:
            return
        reports = complete(gather_texts(text, self._group.device), self._group, self._control)
        names = self._group.names
        if quorum.rank in odd:
            unlike = differences([reports[first], reports[quorum.rank]], [names[first], names[quorum.rank]])
            raise MembershipError("this worker trains something else than the others, and may not join: " + "; ".join(unlike))
        raise CommunicationError(f"{', '.join(names[rank] for rank in odd)} trains something else, and was refused")

    def _healed(self, rows: Sequence[Row], newest: int, lineage: int) -> healing.State | None:
        """Whoever has not the newest state gets that of the first who has; at the very start, that of the first worker."""
        has = [(row.version, row.lineage) == (newest, lineage) and (newest > 0 or rank == 0) for rank, row in enumerate(rows)]
        rank, source = self._group.rank, has.index(True)
        if rank == source:
            behind = [peer for peer, healthy in enumerate(has) if not healthy]
            for first in (True, False):  # a worker that has just come gets more
                peers = [peer for peer in behind if (rows[peer].version == 0) == first]
                if peers:
                    healing.send(self._parts.state(self._clock.step, first=first), self._group, peers)
        if has[rank]:
            return None
        state = healing.receive(self._group, source, self._parts.looks_of)
        self._parts.check(state, first=self._version == 0)
        return state

    def _adopt(self, state: healing.State, version: int, lineage: int) -> None:
        """Go on from a peer's state; with late="carry", what this worker has learnt since its own last sync comes on top."""
        committed = self._doubt is not None
        carry = self._options.late == "carry" and self._version > 0
        step = self._parts.adopt(state, carry=carry, sent=self._doubt)
        self._parts.wrote()
        if committed and self._parts.has_residuals:  # they are of before a sync that the others have made
            self._lost_norm += math.sqrt(self._island.sums([self._parts.residual_square()])[0])
            self._parts.forget_residuals()
        self._progress.start_again(keep=carry, committed=committed)
        self._clock.set(step, [0] * len(self._clock.ahead))
        self._version, self._lineage = version, lineage
        if version > 0:
            self._counts["healed"] += 1
            log.info("%s takes the state of a peer, step %d", self._membership.name, self._clock.step)

    def _weigh(self, rows: Sequence[Row], due: Sequence[int]) -> None:
        """How much each worker counts: what it brings along, as a share of what all do on average."""
        weights: dict[int, float] = {}
        for fragment in range(self._parts.fragments):
            steps = [row.steps[fragment] for row in rows]
            if self._options.weights == "equal":
                steps = [float(each > 0) for each in steps]
            scaled = [each * len(rows) / (sum(steps) or 1.0) for each in steps]
            weights[fragment] = scaled[self._group.rank]
            if fragment in due:
                self._counted = dict(zip(self._membership.names, scaled, strict=True))
        self._parts.weigh(weights)

    def _exchange(self, due: Sequence[int]) -> None:
        """Send what is due, and complete what is outstanding."""
        decided: bool | None = None  # what this island's ranks have agreed on before anything was written, if it came to that

        def confirm() -> None:
            nonlocal decided
            decided = False
            self._confirm()
            decided = True

        problem: CommunicationError | None = None
        try:
            self._parts.exchange(self._clock.step, due, confirm)
        except CommunicationError as error:
            problem = error
        if decided is False:
            assert problem is not None, "confirm has raised it"
            raise problem
        if decided:
            self._parts.wrote()
        self._agree(problem)
        self._progress.departed(due)

    def _confirm(self) -> None:
        """All of it has arrived, everywhere: what is written from here on is the next version."""
        try:
            with self._together():
                self._everywhere()
        except CommunicationError:
            # The others may have heard from all, and have written.
            self._doubt = self._parts.snapshot()
            self._progress.doubt()
            raise
        self._advance()

    def _advance(self) -> None:
        """The state is a new one, the same on all who have come this far."""
        names = ",".join(self._group.names)
        digest = hashlib.sha256(f"{self._lineage} {self._version} {names}".encode()).digest()
        self._version, self._lineage = self._version + 1, int.from_bytes(digest[:6], "big")  # a float holds six bytes
        self._parts.mark()

    def _everywhere(self) -> None:
        """Whether all have come as far as this."""
        rows = self._gather([self._version, self._lineage])
        if any(row != rows[0] for row in rows):
            raise CommunicationError("the workers are not at the same version")

    def _count(self, quorum: Quorum, rows: Sequence[Row]) -> None:
        """The sync is over: who has come and gone."""
        self._counts["syncs"] += 1
        self._parts.mark()
        self._membership.succeeded()
        before, now = set(self._names), set(quorum.names)
        leaving = {name for name, row in zip(quorum.names, rows, strict=True) if row.leaving}
        joined, lost = sorted(now - before) if self._names else [], sorted(before - now)
        self._counts["joined"] += len(joined)
        self._counts["lost"] += len(lost)
        self._lost_norm += sum(self._norms.get(name, 0.0) for name in lost)
        if joined:
            log.info("workers %s are there from step %d on", ", ".join(joined), self._clock.step)
        if lost:
            log.warning("workers %s were lost before step %d", ", ".join(lost), self._clock.step)
        changes = {"joined": joined, "lost": lost, "left": sorted(leaving)}
        self._metering.synced(self._clock.step, self._version, self._counted, changes)
        self._counts["left"] += len(leaving - {self._membership.name})
        self._names = tuple(name for name in quorum.names if name not in leaving)
        self._norms = {name: row.residual_norm for name, row in zip(quorum.names, rows, strict=True)}

    def _hand_over(self, rows: Sequence[Row]) -> None:
        """What the residuals of those who leave still hold goes to the first who stays: it counts the same there."""
        staying = [rank for rank, row in enumerate(rows) if not row.leaving]
        leaving = [rank for rank, row in enumerate(rows) if row.leaving]
        if not leaving or not staying or not self._parts.has_residuals:
            return
        group, heir = self._group, staying[0]
        for rank in leaving:
            if group.rank == rank:
                healing.send(healing.State({}, self._parts.residuals()), group, [heir])
            elif group.rank == heir:
                self._parts.inherit(healing.receive(group, rank, self._parts.residual_looks).tensors)


def _newest(rows: Sequence[Row]) -> tuple[int, int]:
    """The version to go on from, and its lineage: where there are several, that of most workers, and the first of them."""
    version = max(row.version for row in rows)
    lineages = Counter(row.lineage for row in rows if row.version == version)
    return version, lineages.most_common(1)[0][0]


def _rows(mine: Tensor) -> Rounds[Tensor]:
    rows: Tensor = yield AllGather(mine)
    return rows
