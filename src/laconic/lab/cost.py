"""How long a step takes over a link, from its compute and its bytes."""

from collections.abc import Mapping

from laconic.lab.link import Link

# Seconds of a collective on a limited link over those of its bytes at the link's rate: `benchmarks link` measures them.
FACTORS = {"AllReduce": 1.06, "AllGather": 1.1, "AllToAll": 1.5}


def wire_seconds(wire_bytes: Mapping[str, float], link: Link, factors: Mapping[str, float] = FACTORS) -> float:
    """What one worker's bytes, by kind of collective, take on its cable.

    >>> wire_seconds({"AllReduce": 1e6}, Link(8_000_000), {"AllReduce": 1.1})
    1.1
    """
    if link.bits_per_second is None:
        return 0.0
    return sum(factors[kind] * count for kind, count in wire_bytes.items()) * 8 / link.bits_per_second


def step_seconds(compute: float, wire: float, *, in_the_air: bool) -> float:
    """Of a step that waits for its exchange, both; of one that leaves it in the air, the longer of the two.

    What DDP hides of an exchange behind the rest of its backward is not taken off: models that fill one or two buckets, and
    links that are slower than the backward, leave little of it.
    """
    return max(compute, wire) if in_the_air else compute + wire
