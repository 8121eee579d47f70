"""One sync among workers that come and go.

Step by step; if anything fails before the last one, nothing has been written:

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
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Self

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
from laconic.elastic.parts import Parts
from laconic.elastic.progress import Progress
from laconic.elastic.state import adopt, check, looks_of, state_of
from laconic.ranks.agreement import differences, gather_texts
from laconic.run.clock import Clock

Late = Literal["carry", "drop"]
Weights = Literal["steps", "equal"]
JoinerMoments = Literal["peer", "own"]

log = logging.getLogger("laconic.elastic")


class Options(NamedTuple):
    """What `attach` was told."""

    min_replicas: int
    weights: Weights
    late: Late
    moments: JoinerMoments
    leave_seconds: float
    start_with: int


class Row(NamedTuple):
    """What one worker tells the others at a sync."""

    version: int
    lineage: int
    step: int
    leaving: bool
    residual_norm: float
    rate: float  # the largest of its learning rates
    steps: list[float]  # that it brings along, by fragment
    kept: list[float]  # of these, those that it still would after taking a peer's state

    @classmethod
    def read(cls, numbers: Sequence[float]) -> Self:
        version, lineage, step, leaving, norm, rate, *steps = numbers
        half = len(steps) // 2
        return cls(int(version), int(lineage), int(step), bool(leaving), norm, rate, steps[:half], steps[half:])


class Syncs:
    """This worker's part in the syncs of all."""

    def __init__(self, parts: Parts, membership: Membership, island: Island, options: Options, clock: Clock) -> None:
        self.version = 0  # how often the state has changed
        self.leaving = False  # this rank wants to go after its next sync
        self.told_to_leave = False  # some rank of this island wanted to, in the last sync
        self.control = Ledger()
        self.names: tuple[str, ...] = ()  # who goes on after the last sync
        self.counted: dict[str, float] = {}  # how much each worker counted in it
        self.counts = dict.fromkeys(("syncs", "dropped", "healed", "joined", "lost", "left"), 0)
        self.lost_norm = 0.0
        self.metering = Metering(parts.inspector, parts.ledger, self._about, parts.module, parts.strategy)
        self._parts, self._membership, self._island, self._options, self._clock = parts, membership, island, options, clock
        self._group = membership.group
        self._lineage = 0
        self._progress = Progress(parts.fragments)
        self._norms: dict[str, float] = {}  # of each worker's residual, when the last sync began
        self._lost_norms: dict[str, float] = {}  # of those that were lost, until they come back with it
        self.start_with = options.start_with  # workers that the very first sync of a run waits for
        self._doubt: dict[str, Tensor] | None = None  # parameters when a sync was dropped that others may have made

    def _about(self) -> dict[str, object]:
        place = f".{self._island.rank}" if self._island.rank else ""
        return {
            "worker": f"{self._membership.name}{place}",
            "rank": self._island.rank,
            "world": max(1, len(self.names)),
            "shards": self._island.size,
            "parameters": sum(parameter.numel() for parameter in self._parts.module.parameters()),
        }

    def stepped(self) -> None:
        """A step has been made since."""
        self._parts.drift()
        self._progress.stepped()

    def drop(self, error: CommunicationError) -> None:
        """A sync has failed: nothing of it was written, and the next one has what this one would have had."""
        self.counts["dropped"] += 1
        self.metering.dropped(self._clock.step, self.version, str(error))
        self._progress.undo(self._parts.undo())
        _let_go(error)
        self._membership.failed()

    def sync(self) -> None:
        """All of it; a `CommunicationError` says that it came to nothing."""
        leaving, square = self._island.sums([float(self.leaving), self._parts.residual_square()])
        self.told_to_leave = leaving > 0
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
        if newest == 0 and quorum.world < self.start_with:
            raise CommunicationError(f"{quorum.world} workers are there, and the run starts with {self.start_with}")
        if quorum.world < self._options.min_replicas:
            raise CommunicationError(f"{quorum.world} workers are there, and min_replicas is {self._options.min_replicas}")
        due = self._parts.departures(self._clock.step) if newest > 0 else []
        self._weigh(rows, newest, lineage, due)
        self._parts.rate = max(row.rate for row in rows)
        self._parts.share_residuals(quorum.world)
        self.exchange(due)
        with self._together():
            if newest == 0:  # else what has arrived was confirmed before it was written
                self._everywhere()
                self._advance()
            self._count(quorum, rows)
            self._hand_over(rows)

    def _meet(self) -> Quorum:
        began = time.perf_counter()
        try:
            quorum = self._membership.meet(self.version)
        finally:
            self.metering.quorum_seconds += time.perf_counter() - began
        if quorum.changed:
            self._progress.undo(self._parts.undo())
            self._compare(quorum)
        self._parts.mark()
        return quorum

    def _tell(self, residual_norm: float) -> list[Row]:
        """What all workers say of themselves."""
        steps = self._progress.steps
        kept = self._progress.kept(keep=self._carries, committed=self._doubt is not None)
        rate = self._parts.largest_rate()
        mine = [self.version, self._lineage, self._clock.step, self.told_to_leave, residual_norm, rate, *steps, *kept]
        return [Row.read(row) for row in self._gather(mine)]

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """These numbers of all workers."""
        mine = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=self._group.device)
        rows: list[list[float]] = complete(_rows(mine), self._group, self.control).tolist()
        return rows

    @property
    def _carries(self) -> bool:
        """Whether what this worker has learnt comes on top of a peer's state, should it have to take one."""
        return self._options.late == "carry" and self.version > 0 and self._parts.deltas is not None

    def _compare(self, quorum: Quorum) -> None:
        """Refuse who trains something else; the reference is a worker with the newest state."""
        options = [f"{name} {getattr(self._options, name)}" for name in ("weights", "min_replicas", "moments")]
        text = "\n".join([*self._parts.facts(), *options])
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        rows = self._gather([self.version, digest])
        first = max(range(len(rows)), key=lambda rank: (rows[rank][0], -rank))
        odd = [rank for rank, row in enumerate(rows) if row[1] != rows[first][1]]
        if not odd:
            return
        reports = complete(gather_texts(text, self._group.device), self._group, self.control)
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
                    healing.send(state_of(self._parts, self._clock.step, first=first), self._group, peers)
        if has[rank]:
            return None
        state = healing.receive(self._group, source, looks_of(self._parts))
        check(self._parts, state, first=self.version == 0)
        return state

    def _adopt(self, state: healing.State, version: int, lineage: int) -> None:
        """Go on from a peer's state; with late="carry", what this worker has learnt since its own last sync comes on top."""
        committed = self._doubt is not None
        carry = self._carries
        step = adopt(self._parts, state, carry=carry, sent=self._doubt)
        self._parts.took_over(moments="moments" in state.facts)
        if committed and self._parts.has_residuals:  # they are of before a sync that the others have made
            self.lost_norm += math.sqrt(self._island.sums([self._parts.residual_square()])[0])
            self._parts.forget_residuals()
        self._progress.start_again(keep=carry, committed=committed)
        self._clock.set(step, [0] * len(self._clock.ahead))
        self.version, self._lineage = version, lineage
        if version > 0:
            self.counts["healed"] += 1
            log.info("%s takes the state of a peer, step %d", self._membership.name, self._clock.step)

    def _weigh(self, rows: Sequence[Row], newest: int, lineage: int, due: Sequence[int]) -> None:
        """How much each worker counts: what it brings along, as a share of what all do on average."""
        brought = [row.steps if (row.version, row.lineage) == (newest, lineage) else row.kept for row in rows]
        weights: dict[int, float] = {}
        for fragment in range(self._parts.fragments):
            steps = [each[fragment] for each in brought]
            if self._options.weights == "equal" or not any(steps):  # nobody has made any: all have the same to say
                steps = [float(each > 0 or not any(steps)) for each in steps]
            scaled = [each * len(rows) / sum(steps) for each in steps]
            weights[fragment] = scaled[self._group.rank]
            if fragment in due:
                self.counted = dict(zip(self._membership.names, scaled, strict=True))
        self._parts.weigh(weights)

    def exchange(self, due: Sequence[int]) -> None:
        """Send what is due, and complete what is outstanding."""
        decided: bool | None = None  # what this island's ranks have agreed on before anything was written, if it came to that

        def confirm(fragments: Sequence[int]) -> None:
            nonlocal decided
            decided = False
            self._confirm(fragments)
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

    def _confirm(self, fragments: Sequence[int]) -> None:
        """All of it has arrived, everywhere: what is written of these from here on is the next version."""
        try:
            with self._together():
                self._everywhere()
        except CommunicationError:
            # The others may have heard from all, and have written.
            self._doubt = {**(self._doubt or {}), **self._parts.snapshot(fragments)}
            self._progress.doubt(fragments)
            raise
        self._advance()

    def _advance(self) -> None:
        """The state is a new one, the same on all who have come this far."""
        digest = hashlib.sha256(f"{self._lineage} {self.version} {','.join(self._membership.ids)}".encode()).digest()
        self.version, self._lineage = self.version + 1, int.from_bytes(digest[:6], "big")  # a float holds six bytes
        self._parts.mark()

    def _everywhere(self) -> None:
        """Whether all have come as far as this."""
        rows = self._gather([self.version, self._lineage])
        if any(row != rows[0] for row in rows):
            raise CommunicationError("the workers are not at the same version")

    def _count(self, quorum: Quorum, rows: Sequence[Row]) -> None:
        """The sync is over: who has come and gone."""
        self.counts["syncs"] += 1
        self._parts.mark()
        self._membership.succeeded()
        before, now = set(self.names), set(quorum.names)
        leaving = {name for name, row in zip(quorum.names, rows, strict=True) if row.leaving}
        joined, lost = sorted(now - before) if self.names else [], sorted(before - now)
        self.counts["joined"] += len(joined)
        self.counts["lost"] += len(lost)
        self._lost_norms |= {name: self._norms.get(name, 0.0) for name in lost}
        self.lost_norm += sum(self._lost_norms[name] for name in lost)
        back = [name for name, row in zip(quorum.names, rows, strict=True) if name in joined and row.version > 0]
        self.lost_norm -= sum(self._lost_norms.pop(name, 0.0) for name in back)  # it was slow, and not dead
        if joined:
            log.info("workers %s are there from step %d on", ", ".join(joined), self._clock.step)
        if lost:
            log.warning("workers %s were lost before step %d", ", ".join(lost), self._clock.step)
        changes = {"joined": joined, "lost": lost, "left": sorted(leaving)}
        self.metering.synced(self._clock.step, self.version, self.counted, changes)
        self.counts["left"] += len(leaving - {self._membership.name})
        self.names = tuple(name for name in quorum.names if name not in leaving)
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


def _let_go(error: BaseException | None) -> None:
    """Free what the calls that failed still hold: exchanges, and with these the connections.

    gloo closes a connection when the last reference to it is gone, and not before (torch 2.13's `abort` does nothing there).
    A worker that isn't connected to the one that died waits for this one, and would wait until its timeout.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _newest(rows: Sequence[Row]) -> tuple[int, int]:
    """The version to go on from, and its lineage: where there are several, that of most workers, and the first of them."""
    version = max(row.version for row in rows)
    lineages = Counter(row.lineage for row in rows if row.version == version)
    return version, lineages.most_common(1)[0][0]


def _rows(mine: Tensor) -> Rounds[Tensor]:
    rows: Tensor = yield AllGather(mine)
    return rows
