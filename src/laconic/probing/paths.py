"""Transfers between pairs of hosts: who is slower than the others, and how long a message takes."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from laconic.cost.step_timer import now
from laconic.probing.session import Session

FIRST_PINGS, PINGS = 3, 20
SMALLEST_BLOCK, LARGEST_BLOCK, GROWTH = 1 << 12, 1 << 20, 4
BLOCKS = 4  # a transfer is so many; before those that count there is one more
TRANSFERS = 5


@dataclass(frozen=True)
class Path:
    """What one rank saw of its pairs: the best of each; None: there was no time for transfers that say something."""

    sends: float | None  # bytes a second
    receives: float | None
    spread: float | None  # of the transfers that it received
    round_trip: float
    busy: float


def rounds_of(nodes: Sequence[int]) -> list[dict[int, int]]:
    """Who is whose partner, by rank, round by round: two different ones for each rank, on other nodes, where there are such.

    The nodes are paired as at a tournament: in round k nodes a and b meet where a + b = k, modulo their number. Ranks of a node
    meet those of the other in their order.

    >>> rounds_of([0, 1, 2, 3])
    [{0: 1, 1: 0, 2: 3, 3: 2}, {0: 3, 1: 2, 2: 1, 3: 0}]
    >>> rounds_of([0, 0, 1, 1])
    [{0: 2, 1: 3, 2: 0, 3: 1}]
    """
    members = [[rank for rank, node in enumerate(nodes) if node == each] for each in sorted(set(nodes))]
    if len(members) == 1:
        members = [[rank] for rank in members[0]]
    number = len(members)
    turns = [0, 1, 2] if number % 2 else [1, 3] if number > 2 else [1]
    found = []
    for turn in turns:
        pairs: dict[int, int] = {}
        for node in range(number):
            other = (turn - node) % number
            if other != node:
                pairs.update(zip(members[node], members[other], strict=False))
        found.append(pairs)
    return found


def paths(session: Session, until: float) -> list[Path]:
    """By rank; within what is left until then, of the probe's seconds."""
    rounds = rounds_of(session.nodes)
    sends: list[list[float]] = [[] for _ in session.places]
    received: list[list[_Received]] = [[] for _ in session.places]
    trips: list[list[float]] = [[] for _ in session.places]
    session.meet()
    for place, pairs in enumerate(rounds):
        end = session.now + max(0.0, until - session.now) / (len(rounds) - place)
        partner = pairs.get(session.group.rank)
        trip = _round_trip(session, partner, FIRST_PINGS)
        slowest = max(row[0] for row in session.meet(trip) if row[0] < math.inf)
        left = max(0.0, end - session.now)
        trip = min(trip, _round_trip(session, partner, max(1, min(PINGS, int(left / 4 / slowest)))))
        rows = session.meet(trip)
        for rank in pairs:
            trips[rank].append(rows[rank][0])
        for rank, found in _growing(session, pairs, end).items():
            received[rank].append(found)
            sends[pairs[rank]].append(found.rate)
    return [
        Path(
            max(sends[rank], default=None),
            max((found.rate for found in received[rank]), default=None),
            min((found.spread for found in received[rank]), default=None),
            min(trips[rank]),
            max((found.busy for found in received[rank]), default=0.0),
        )
        for rank in range(session.group.world)
    ]


@dataclass(frozen=True)
class _Received:
    """What a rank received from its partner in the largest blocks that there was time for."""

    rate: float
    spread: float
    busy: float


def _growing(session: Session, pairs: Mapping[int, int], end: float) -> dict[int, _Received]:
    """By rank. Blocks grow, for each pair as long as there is time for larger ones: a slow pair makes no other pair's small."""
    going, found = set(pairs), dict[int, _Received]()
    block = SMALLEST_BLOCK
    while going:
        session.meet()  # all begin together
        active = session.group.rank in going
        mine = _received(session, pairs[session.group.rank], block) if active else (0.0, 0.0, 0.0, 0.0)
        rows = session.meet(*mine)
        busy = session.busy([row[2] for row in rows])
        if block > SMALLEST_BLOCK:  # the smallest are latency, and tell only how large the next may be
            found.update({rank: _Received(rows[rank][0], rows[rank][1], busy) for rank in going})
        block *= GROWTH
        left = end - session.now
        larger = block <= LARGEST_BLOCK
        going = {rank for rank in going if larger and GROWTH * max(rows[rank][3], rows[pairs[rank]][3]) <= left}
    return found


def most_bytes(nodes: Sequence[int]) -> int:
    """That one rank sends at most."""
    total, block = 0, SMALLEST_BLOCK
    while block <= LARGEST_BLOCK:
        total, block = total + block, block * GROWTH
    return len(rounds_of(nodes)) * (1 + TRANSFERS) * BLOCKS * total


def _round_trip(session: Session, partner: int | None, times: int) -> float:
    """The shortest of some: whatever made others longer was no part of the way. Infinite where there is no partner."""
    best = math.inf
    if partner is None:
        return best
    message = torch.zeros(1, device=session.device)
    group = session.group.process_group
    with session.explained(f"a message to and from {session.group.names[partner]}"):
        for _ in range(times):
            start = now()
            if session.group.rank < partner:
                dist.send(message, group=group, group_dst=partner)
                dist.recv(message, group=group, group_src=partner)
            else:
                dist.recv(message, group=group, group_src=partner)
                dist.send(message, group=group, group_dst=partner)
            best = min(best, now() - start)
    return best


def _received(session: Session, partner: int, block: int) -> tuple[float, float, float, float]:
    """Bytes a second that came from the partner, while as much went there; the spread of several transfers; the share of a core
    that they took; and about how many seconds.

    Of a rank that has a cable for itself, the rate is that of all but the first transfer, which empties a token bucket. Of
    those that share a cable each gets now more and now less of it, and only all that passed since they began together says
    what it carries.
    """
    worked = time.process_time()
    with session.explained(f"a transfer to and from {session.group.names[partner]}"):
        took = _transfers(session, partner, block // 4)
    busy = (time.process_time() - worked) / sum(took)
    nodes = session.nodes
    shared = len(set(nodes)) > 1 and max(nodes.count(nodes[rank]) for rank in (partner, session.group.rank)) > 1
    usual = statistics.fmean(took if shared else took[1:])
    low, middle, high = statistics.quantiles(
        took[1:], n=4, method="inclusive"
    )  # the range would be that of one that was held up
    return BLOCKS * block / usual, (high - low) / usual, busy, (1 + TRANSFERS) * middle


def _transfers(session: Session, partner: int, numbers: int) -> list[float]:
    """Seconds of each.

    All are launched at once, and all that is to come is asked for before anything is sent. One transfer after the other was
    seen to reach 63 to 88 of 100 Mbit/s: probably what is asked for later waits behind what is being sent.
    """
    group, count = session.group.process_group, BLOCKS * (1 + TRANSFERS)
    incoming = [torch.zeros(numbers, device=session.device) for _ in range(count)]
    outgoing = torch.zeros(numbers, device=session.device)
    ops = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=partner) for tensor in incoming]
    ops += [dist.P2POp(dist.isend, outgoing, group=group, group_peer=partner) for _ in range(count)]
    session.sent_bytes += 4 * numbers * count
    began = now()
    works = dist.batch_isend_irecv(ops)
    if len(works) < len(ops):  # a backend that has one for all of them: no transfer is known from the next
        for work in works:
            work.wait()
        return [(now() - began) / (1 + TRANSFERS)] * (1 + TRANSFERS)
    ends = [began]
    for place, work in enumerate(works):
        work.wait()
        if place < count and place % BLOCKS == BLOCKS - 1:
            ends.append(now())
    return [end - start for start, end in pairwise(ends)]
