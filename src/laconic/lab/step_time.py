"""How long a step takes over a link, from its compute and its bytes."""

from collections.abc import Mapping

from laconic.cost.link import Link

# Seconds of a collective on a limited link over those of its bytes at the link's rate: `benchmarks link` measures them.
FACTORS = {"AllReduce": 1.06, "AllGather": 1.1, "AllToAll": 1.5}


def wire_seconds(wire_bytes: Mapping[str, float], link: Link, factors: Mapping[str, float] = FACTORS) -> float:
    """What one worker's bytes, by kind of collective, take on its cable.

    >>> wire_seconds({"AllReduce": 1e6}, Link(8_000_000), {"AllReduce": 1.1})
    1.1
    """
    if link.bits_per_second is None:
        return 0.0
    return sum(factors.get(kind, 1.0) * count for kind, count in wire_bytes.items()) * 8 / link.bits_per_second


def delay_seconds(collectives: Mapping[str, float], workers: int, link: Link) -> float:
    """What the link's delay adds: once for each message of a collective that waits for the one before.

    An all-reduce among N workers goes round a ring twice, in 2(N-1) messages, an all-gather once, in N-1; in an all-to-all
    all leave at once. Collectives of a smaller group have fewer, and those of several buckets overlap: it is on the slow side.

    >>> delay_seconds({"AllReduce": 2}, 4, Link(8_000_000, 0.01))
    0.12
    """
    messages = {"AllReduce": 2 * (workers - 1), "AllGather": workers - 1, "AllToAll": 1}
    return sum(messages.get(kind, workers - 1) * count for kind, count in collectives.items()) * link.delay_seconds


def step_seconds(compute: float, wire: float, *, in_the_air: bool) -> float:
    """Of a step that waits for its exchange, both; of one that leaves it outstanding, the longer of the two.

    What DDP hides of an exchange behind the rest of its backward is not taken off: models that fill one or two buckets, and
    links that are slower than the backward, leave little of it.
    """
    return max(compute, wire) if in_the_air else compute + wire
