"""Collectives timed over sizes from small to large, as far as the time for them goes."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Collective
from laconic.comm.group import TorchGroup
from laconic.cost.measured import LeftOut, Sample
from laconic.cost.step_timer import now
from laconic.probing.session import Session

KINDS: tuple[type[Collective], ...] = (AllReduce, AllGather, AllToAll)
SIZES = [1 << power for power in range(10, 27, 2)]  # 1 KB to 64 MB: of an all-gather its answer, of the others what goes in
SIZES_IN_FLIGHT = SIZES[2::2]
FEWEST, MOST = 3, 30  # repeats of a size
ALWAYS = 2  # so many of the smallest sizes are sent, however long they take: without them nothing is known
PART = 0.15  # of the time that is left for a kind, for one size; larger ones are still to come
MOST_BYTES = 128 << 20  # of all repeats of a size, where that leaves more than the fewest
# Before a size is timed: a token bucket on the way lets its first bytes pass at once, and must be empty. Those of most links
# hold less than that many bytes, or as many as pass in that many seconds. Messages that are too small to empty it are primed
# for connections and caches alone.
PRIMING_BYTES, PRIMING_SECONDS, PRIMED_BYTES, LEAST_PRIMING = 512 << 10, 0.1, 32 << 10, 2


def make(kind: type[Collective], size: int, world: int, device: torch.device) -> Collective:
    """One of a size."""
    numbers = max(1, size // 4)
    if kind is AllToAll:
        return kind(torch.zeros(world, max(1, numbers // world), device=device))
    return kind(torch.zeros(max(1, numbers // world) if kind is AllGather else numbers, device=device))


def fits(expected: float, left: float) -> bool:
    """Whether a size that is expected to take so long may be begun, where so much time is left for its kind."""
    return expected * (1 + FEWEST) <= left


def most_priming(size: int) -> int:
    """How often a size is sent before it is timed, at most."""
    return math.ceil(PRIMING_BYTES / size) if size >= PRIMED_BYTES else LEAST_PRIMING


def most_repeats(size: int) -> int:
    """How often it is timed, at most."""
    return min(MOST, max(FEWEST, MOST_BYTES // size))


def most_bytes(ranks: int, sizes: Sequence[int], in_flight: int) -> int:
    """That one rank puts on the cable at most."""
    total = 0
    for kind in KINDS:
        for size in sizes:
            wire = make(kind, size, ranks, torch.device("meta")).traffic(ranks).wire_bytes
            batch = size * in_flight
            total += wire * in_flight * (most_priming(batch) + most_repeats(batch))
    return total


def times(
    session: Session, group: TorchGroup, sizes: Sequence[int], in_flight: int, until: float, known: Sequence[Sample] = ()
) -> tuple[list[Sample], list[LeftOut]]:
    """Each kind at each size, until so many seconds of the probe have passed; one at a time, the two smallest in any case.

    Several at once are expected to take as long as one after the other, as `known`; a size that is not known is left out.
    `group` may be one of several that are disjoint and do the same at the same time, such as those of the nodes.
    """
    samples: list[Sample] = []
    left_out: list[LeftOut] = []
    session.meet()
    for place, kind in enumerate(KINDS):
        kind_until = session.now + max(0.0, until - session.now) / (len(KINDS) - place)
        expected, before = 0.0, sizes[0]
        for number, size in enumerate(sizes):
            expected, before = expected * size / before, size
            left = max(0.0, kind_until - session.now)
            batch = [make(kind, size, group.world, session.device) for _ in range(in_flight)]
            wire = batch[0].traffic(group.world).wire_bytes
            if in_flight > 1:
                same = (kind.__name__, group.world, 1, wire)
                alone = [each.seconds for each in known if (each.kind, each.ranks, each.in_flight, each.wire_bytes) == same]
                expected = in_flight * min(alone, default=math.inf)
            if (in_flight > 1 or number >= ALWAYS) and not fits(expected, left):
                words = f"{FEWEST + 1} times up to {expected:.2g} s is more than the {left:.2g} s left for it"
                words = words if expected < math.inf else "one at a time was left out, so it is not known how long several take"
                left_out.append(LeftOut(kind.__name__, group.world, in_flight, wire, words))
                continue
            found = _timed(session, group, batch, size * in_flight, left)
            timed = (found.middle, found.low, found.high, found.repeats, found.busy)
            samples.append(Sample(kind.__name__, group.world, in_flight, wire, *timed))
            expected = found.usual * in_flight
    return samples, left_out


@dataclass(frozen=True)
class _Times:
    """Seconds of one of a batch, of the rank whose median is the longest; and how busy processors were."""

    best: float
    low: float
    middle: float
    high: float
    repeats: int
    busy: float

    @property
    def usual(self) -> float:
        """To be expected of the next one: a machine that stood still for a moment does not stand still again."""
        return min(self.middle, 3 * self.best)


def _timed(session: Session, group: TorchGroup, batch: Sequence[Collective], size: int, left: float) -> _Times:
    """As often as a part of the time that is left allows.

    What a message takes is not known before: the ones before it may have passed a token bucket at once. So each run of messages
    is twice as long as the last one, and the ranks look at the clock between them.
    """
    with session.explained(f"{batch[0].kind} of {batch[0].payload_bytes} bytes"):
        primed, step, began = 0, 1, session.now
        while primed < most_priming(size) and (primed == 0 or session.now - began < min(PRIMING_SECONDS, PART * left)):
            step = min(step, most_priming(size) - primed)
            for _ in range(step):
                _run(session, group, batch)
            primed, step = primed + step, 2 * step
            session.meet()
        rows: list[float] = []
        step, began, busy = FEWEST, session.now, 0.0
        while not rows or (len(rows) < most_repeats(size) and session.now - began < PART * left):
            step = min(step, most_repeats(size) - len(rows))
            worked, start = time.process_time(), now()
            for _ in range(step):
                rows.append(_run(session, group, batch))
            busy = (time.process_time() - worked) / (now() - start)
            step = len(rows)
            found = session.meet(*statistics.quantiles(rows, n=4, method="inclusive"), min(rows), busy)
    low, middle, high, _, _ = max(found, key=lambda row: row[1])
    return _Times(max(row[3] for row in found), low, middle, high, len(rows), session.busy([row[4] for row in found]))


def _run(session: Session, group: TorchGroup, batch: Sequence[Collective]) -> float:
    """Seconds of one of them."""
    start = now()
    handles = [session.launch(collective, group) for collective in batch]
    for handle in handles:
        handle.wait()
    return (now() - start) / len(batch)
