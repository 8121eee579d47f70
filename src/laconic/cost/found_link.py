"""Whether measured times are those of a cable between hosts, how fast that is, and who is slower than the others."""

import statistics
from collections.abc import Sequence
from itertools import groupby

from laconic.cost.measured import Sample, Worker
from laconic.cost.network import Network

# A full packet of 1500 bytes has 1448 of data, and 14 more of Ethernet around it.
HEADERS = 1514 / 1448
STEADY = 0.25  # a cable carries as much in one transfer as in the next; hosts that are busy with other things do not
# Collectives on a cable are no faster than transfers between pairs, but for what a token bucket lets pass at once: those with
# many bytes in all have emptied it.
MANY_BYTES, FASTER = 1 << 22, 1.3
IDLE = 0.35  # processors that work for a larger share of the time may themselves be the limit
SHORTEST_DELAY_SECONDS = 250e-6  # one way; less is no more than what hosts need to wake up
SLOW, SLOW_ROUND_TRIP, SLOW_ROUND_TRIP_SECONDS = 0.5, 3.0, 1e-3  # against the median of the others
ONE_HOST = "all ranks are on one host: no link was measured, only this machine's own speed"


def link_of(samples: Sequence[Sample], workers: Sequence[Worker], busy: float) -> tuple[float | None, str]:
    """Bits a second of the cables between hosts, and how they were found; None and the reason, where there is no evidence.

    The rate is that of transfers between pairs of hosts, in which processors were `busy` for that share of the time. It is
    claimed as a limit of the cable where ranks are on several hosts, transfers take the same time again and again, the
    processors had little to do meanwhile, and no kind of collective is faster than that.
    """
    nodes = {worker.node for worker in workers}
    known = [worker for worker in workers if worker.sends_bits_per_second is not None and worker.spread is not None]
    if len(nodes) < 2:
        return None, ONE_HOST
    if len(known) < len(workers):
        return None, "no link was found: there was no time for transfers between hosts; give more --seconds"
    cables = [HEADERS * _together([worker for worker in known if worker.node == node]) for node in nodes]
    slow = slow_ranks(workers)
    rate = min(cables) if slow else statistics.median(cables)
    said = f"transfers between hosts reach {megabits(rate)}"
    spread = statistics.median(worker.spread or 0.0 for worker in known)
    if len(nodes) < len(workers):  # ranks that share a cable get now more and now less of it
        spread = 0.0 if slow else (max(cables) - min(cables)) / rate
    if busy > IDLE:
        return None, f"no link was found: {said}, but the processors are busy for {busy:.0%} of that time, and may be the limit"
    if spread > STEADY:
        return (
            None,
            f"no link was found: {said}, but they differ by {spread:.0%}, and those over a cable do not",
        )
    cable = Network(framing={}, per_node=most_on_a_node(workers))
    for each in samples:
        if each.ranks == len(workers) and each.repeats * each.in_flight * each.wire_bytes >= MANY_BYTES:
            seen = 8 * HEADERS * cable.cable_bytes(each.kind, each.wire_bytes, each.ranks) / each.high_seconds
            if seen > FASTER * rate:
                return None, f"no link was found: {said}, but an {each.kind} reached {megabits(seen)}"
    return rate, f"{said}, to {spread:.0%}, and processors had little to do meanwhile ({busy:.0%} of the time)"


def _together(workers: Sequence[Worker]) -> float:
    """What the ranks of a node send on their cable: that of which the last has sent its part when all have."""
    return len(workers) * min(worker.sends_bits_per_second or 0.0 for worker in workers)


def most_on_a_node(workers: Sequence[Worker]) -> int:
    """Of the ranks."""
    nodes = sorted(worker.node for worker in workers)
    return max(len(list(found)) for _, found in groupby(nodes))


def delay_of(workers: Sequence[Worker]) -> float:
    """One way between hosts: half of a round trip, or 0 where that is no more than what hosts need."""
    trips = [worker.round_trip_seconds for worker in workers if worker.round_trip_seconds is not None]
    if len({worker.node for worker in workers}) < 2 or not trips:
        return 0.0
    one_way = statistics.median(trips) / 2
    return one_way if one_way >= SHORTEST_DELAY_SECONDS else 0.0


def slow_ranks(workers: Sequence[Worker]) -> list[str]:
    """Ranks whose transfers are slower than the others', in words; of ranks on one host none, as cores are what they share."""
    if len({worker.node for worker in workers}) < 2:
        return []
    found = []
    for verb, rates in (
        ("sends", {worker: worker.sends_bits_per_second for worker in workers}),
        ("receives", {worker: worker.receives_bits_per_second for worker in workers}),
    ):
        known = {worker: rate for worker, rate in rates.items() if rate is not None}
        for worker, rate in known.items():
            others = [rate for other, rate in known.items() if other.node != worker.node]
            if others and rate < SLOW * statistics.median(others):
                words = f"{verb} at {megabits(rate)}, the others at {megabits(statistics.median(others))}"
                found.append(f"rank {worker.rank} ({worker.host}) {words}")
    if len({worker.node for worker in workers}) == 2:  # what one host sends the other one receives: either may be the slow one
        found = [text for text in found if " sends at " in text]
    if found:  # round trips to a rank that sends slowly are long as well, and would name its partners
        return found
    trips = {worker: worker.round_trip_seconds for worker in workers if worker.round_trip_seconds is not None}
    for worker, trip in trips.items():
        others = [each for other, each in trips.items() if other.node != worker.node]
        usual = statistics.median(others) if others else trip
        if trip > max(SLOW_ROUND_TRIP * usual, usual + SLOW_ROUND_TRIP_SECONDS):
            words = f"a round trip of {trip * 1e3:.3g} ms, the others of {usual * 1e3:.3g} ms"
            found.append(f"rank {worker.rank} ({worker.host}) has {words}")
    return found


def megabits(bits_per_second: float) -> str:
    """As people write it.

    >>> megabits(95_400_000), megabits(2_500_000_000)
    ('95.4 Mbit/s', '2.5 Gbit/s')
    """
    unit, size = ("Gbit/s", 1e9) if bits_per_second >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits_per_second / size:.3g} {unit}"
