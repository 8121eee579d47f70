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
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from laconic.elastic.membership import Membership, MembershipError, Quorum
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
        *,
        min_replicas: int,
        weights: Weights,
        late: Late,
        leave_seconds: float,
    ) -> None:
        self._parts, self._membership = parts, membership
        self._min_replicas, self._weights, self._late, self._leave_seconds = min_replicas, weights, late, leave_seconds
        self._group = membership.group
        self._control, self._ledger = Ledger(), parts.ledger
        self._version = self._lineage = 0
        self._progress = Progress(parts.fragments)
        self._names: tuple[str, ...] = ()
        self._counted: dict[str, float] = {}
        self._norms: dict[str, float] = {}  # of each worker's residual, when the last sync began
        self._counts = dict.fromkeys(("syncs", "dropped", "healed", "joined", "lost", "left"), 0)
        self._lost_norm = self._quorum_seconds = 0.0
        self._doubt: dict[str, Tensor] | None = None  # parameters when a sync was dropped that others may have made
        self._leaving = self._ended = False
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
            quorum_seconds=self._quorum_seconds,
        )

    def leave(self) -> None:
        """Take part in the next sync, hand over what error feedback still holds, and go. Raises SystemExit(0) after it.

        SIGTERM does the same after the step that is being made.
        """
        self._leaving = True

    def detach(self) -> None:
        """Go at once: the others go on without this worker after their lighthouse has missed its heartbeats."""
        if self._ended:
            return
        self._ended = True
        self._clock.stop()
        attached.difference_update(self._parts.optimizers)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        self._membership.leave()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

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
        if self._leaving:
            self._go()
        if self._parts.departures(self._clock.step):
            self._try(self._sync)
        elif self._parts.outstanding:
            self._try(lambda: self._exchange([]))

    def _try(self, act: Callable[[], None]) -> None:
        """A sync that fails is dropped: training goes on, and the next one has what this one would have had."""
        try:
            act()
        except CommunicationError as error:
            self._failed(error)
            log.warning("%s, step %d: the sync is dropped: %s", self._membership.name, self._clock.step, error)

    def _failed(self, error: CommunicationError) -> None:
        self._counts["dropped"] += 1
        self._progress.undo(self._parts.undo())
        self._membership.failed()

    def _go(self) -> NoReturn:
        """Take part in one more sync, and leave."""
        self._membership.hurry(self._leave_seconds)
        self._try(self._sync)
        log.info("%s leaves after step %d", self._membership.name, self._clock.step)
        self.detach()
        raise SystemExit(0)

    # One sync

    def _sync(self) -> None:
        began = time.perf_counter()
        try:
            quorum = self._membership.meet(self._version)
        finally:
            self._quorum_seconds += time.perf_counter() - began
        if quorum.changed:
            self._progress.undo(self._parts.undo())
            self._compare(quorum)
        self._parts.mark()
        rows = self._tell()
        newest, lineage = _newest(rows)
        self._heal(rows, newest, lineage)
        if newest > 0:
            step = max(row.step for row in rows if (row.version, row.lineage) == (newest, lineage))
            self._clock.set(step, [0] * len(self._clock.ahead))  # who leaves may have come before it was due
        if quorum.world < self._min_replicas:
            raise CommunicationError(f"{quorum.world} workers are there, and min_replicas is {self._min_replicas}")
        due = self._parts.departures(self._clock.step) if newest > 0 else []
        self._weigh(rows, due)
        self._exchange(due)
        self._everywhere()
        if newest == 0:
            self._advance()
        self._count(quorum, rows)
        self._hand_over(rows)

    def _tell(self) -> list[Row]:
        """What all workers say of themselves."""
        norm, steps = self._parts.residual_norm(), self._progress.steps
        mine = [self._version, self._lineage, self._clock.step, self._leaving, norm, *steps]
        rows = complete(_gather([float(number) for number in mine]), self._group, self._control)
        return [Row.read(row) for row in rows.tolist()]

    def _compare(self, quorum: Quorum) -> None:
        """Refuse who trains something else; the reference is a worker with the newest state."""
        text = "\n".join(self._parts.facts())
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        rows = complete(_gather([float(self._version), float(digest)]), self._group, self._control).tolist()
        first = max(range(len(rows)), key=lambda rank: (rows[rank][0], -rank))
        odd = [rank for rank, row in enumerate(rows) if row[1] != rows[first][1]]
        if not odd:
            return
        reports = complete(gather_texts(text, torch.device("cpu")), self._group, self._control)
        names = self._group.names
        if quorum.rank in odd:
            unlike = differences([reports[first], reports[quorum.rank]], [names[first], names[quorum.rank]])
            raise MembershipError("this worker trains something else than the others, and may not join: " + "; ".join(unlike))
        raise CommunicationError(f"{', '.join(names[rank] for rank in odd)} trains something else, and was refused")

    def _heal(self, rows: Sequence[Row], newest: int, lineage: int) -> None:
        """Whoever has not the newest state takes that of the first who has; at the very start, that of the first worker."""
        has = [(row.version, row.lineage) == (newest, lineage) and (newest > 0 or rank == 0) for rank, row in enumerate(rows)]
        rank, source = self._group.rank, has.index(True)
        if rank == source:
            behind = [peer for peer, healthy in enumerate(has) if not healthy]
            healing.send(self._parts.state(self._clock.step), self._group, behind)
        if not has[rank]:
            state = healing.receive(self._group, source, self._parts.looks_of)
            self._adopt(state)
            self._version, self._lineage = newest, lineage
            if newest > 0:
                self._counts["healed"] += 1
                who = self._group.names[source]
                log.info("%s takes the state of %s, step %d", self._membership.name, who, self._clock.step)
        self._doubt = None

    def _adopt(self, state: healing.State) -> None:
        """A peer's state; with late="carry", what this worker has learnt since its own last sync comes on top."""
        committed = self._doubt is not None
        carry = self._late == "carry" and self._version > 0
        step = self._parts.adopt(state, carry=carry, sent=self._doubt)
        if committed and self._parts.has_residuals:  # they are of before a sync that the others have made
            self._lost_norm += self._parts.residual_norm()
            self._parts.forget_residuals()
        self._progress.start_again(keep=carry, committed=committed)
        self._clock.set(step, [0] * len(self._clock.ahead))

    def _weigh(self, rows: Sequence[Row], due: Sequence[int]) -> None:
        """How much each worker counts: what it brings along, as a share of what all do on average."""
        weights: dict[int, float] = {}
        for fragment in range(self._parts.fragments):
            steps = [row.steps[fragment] for row in rows]
            if self._weights == "equal":
                steps = [float(each > 0) for each in steps]
            scaled = [each * len(rows) / (sum(steps) or 1.0) for each in steps]
            weights[fragment] = scaled[self._group.rank]
            if fragment in due:
                self._counted = dict(zip(self._membership.names, scaled, strict=True))
        self._parts.weigh(weights)

    def _exchange(self, due: Sequence[int]) -> None:
        """Send what is due, and complete what is outstanding."""
        self._parts.exchange(self._clock.step, due, self._confirm)
        self._progress.departed(due)

    def _confirm(self) -> None:
        """All of it has arrived, everywhere: what is written from here on is the next version."""
        try:
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
        rows = complete(_gather([float(self._version), float(self._lineage)]), self._group, self._control).tolist()
        if any(row != rows[0] for row in rows):
            raise CommunicationError("the workers are not at the same version")

    def _count(self, quorum: Quorum, rows: Sequence[Row]) -> None:
        """The sync is over: who has come and gone."""
        self._counts["syncs"] += 1
        self._parts.mark()
        self._membership.succeeded()
        before, now = set(self._names), set(quorum.names)
        leaving = {name for name, row in zip(quorum.names, rows, strict=True) if row.leaving}
        if self._names:
            self._counts["joined"] += len(now - before)
            for name in sorted(now - before):
                log.info("worker %s is there from step %d on", name, self._clock.step)
            for name in sorted(before - now):
                self._counts["lost"] += 1
                self._lost_norm += self._norms.get(name, 0.0)
                log.warning("worker %s was lost before step %d", name, self._clock.step)
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


def _gather(numbers: list[float]) -> Rounds[Tensor]:
    rows: Tensor = yield AllGather(torch.tensor(numbers, dtype=torch.float64))
    return rows
