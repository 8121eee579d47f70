"""Transfers between pairs of hosts: who is slower than the others, and how long a message takes."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from laconic.advisor.probe_session import Session
from laconic.cost.step_timer import now

FIRST_PINGS, PINGS = 3, 20
SMALLEST_BLOCK, LARGEST_BLOCK = 1 << 12, 1 << 20
BLOCKS = 4  # a transfer is so many; before those that count there is one more
TRANSFERS = 5


@dataclass(frozen=True)
class Path:
    """What one rank saw of its pairs: the best of each."""

    sends: float  # bytes a second
    receives: float
    spread: float  # of the transfers that it received
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


def paths(session: Session, seconds_per_byte: float, until: float) -> list[Path]:
    """By rank; within what is left until then, of the probe's seconds."""
    rounds = rounds_of(session.nodes)
    session.meet()
    left = max(0.0, until - session.now) / len(rounds)
    block = block_bytes(seconds_per_byte, left)
    sends: list[list[float]] = [[] for _ in session.places]
    received: list[list[Path]] = [[] for _ in session.places]
    for pairs in rounds:
        partner = pairs.get(session.group.rank)
        trip = _round_trip(session, partner, FIRST_PINGS)
        slowest = max(row[0] for row in session.meet(trip) if row[0] < math.inf)
        trip = min(trip, _round_trip(session, partner, max(1, min(PINGS, int(left / 4 / slowest)))))
        session.meet()  # all begin together
        found = session.meet(trip, *_received(session, partner, block))
        busy = session.busy([row[3] for row in found])
        for rank, other in pairs.items():
            trip, rate, spread, _ = found[rank]
            received[rank].append(Path(0.0, rate, spread, trip, busy))
            sends[other].append(rate)
    return [
        Path(
            max(sends[rank]),
            max(path.receives for path in received[rank]),
            min(path.spread for path in received[rank]),
            min(path.round_trip for path in received[rank]),
            max(path.busy for path in received[rank]),
        )
        for rank in range(session.group.world)
    ]


def block_bytes(seconds_per_byte: float, seconds: float) -> int:
    """Of a block, so that all transfers of a round take about half of so many seconds."""
    fitting = seconds / 2 / (seconds_per_byte * BLOCKS * (1 + TRANSFERS)) if seconds_per_byte else LARGEST_BLOCK
    size = SMALLEST_BLOCK
    while size * 2 <= min(fitting, LARGEST_BLOCK):
        size *= 2
    return size


def most_bytes(nodes: Sequence[int]) -> int:
    """That one rank sends at most."""
    return len(rounds_of(nodes)) * (1 + TRANSFERS) * BLOCKS * LARGEST_BLOCK


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


def _received(session: Session, partner: int | None, block: int) -> tuple[float, float, float]:
    """Bytes a second that came from the partner, while as much went there; the spread of several transfers; and the share of a
    core that they took.

    Of a rank that has a cable for itself, it is the median, without the first transfer, which empties a token bucket. Of those
    that share a cable each gets now more and now less of it, and only all that passed since they began together says what it
    carries.
    """
    if partner is None:
        return 0.0, 0.0, 0.0
    worked, began = time.process_time(), now()
    with session.explained(f"a transfer to and from {session.group.names[partner]}"):
        took = _transfers(session, partner, block // 4)
    busy = (time.process_time() - worked) / (now() - began)
    nodes = session.nodes
    shared = nodes.count(nodes[partner]) > 1 or nodes.count(nodes[session.group.rank]) > 1
    usual = statistics.mean(took) if shared and len(set(nodes)) > 1 else statistics.median(took[1:])
    low, _, high = statistics.quantiles(took[1:], n=4, method="inclusive")  # the range would be that of one that was held up
    return BLOCKS * block / usual, (high - low) / usual, busy


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
