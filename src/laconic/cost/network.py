"""A network as the cost model sees it: a link, and what the hosts themselves need for a collective."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.cost.link import Link

# Seconds on a limited link over those of the bytes at its rate. First what headers and acknowledgements take.
HEADERS = 1.05
# Then what two hosts lose that send long messages to each other at once, over one TCP connection: up to so much more, and half
# of that at the size below, which is that of a link of 100 Mbit/s. Collectives of gloo, behind the lab's links of 30 and
# 300 Mbit/s with 2 and 4 hosts: docs/advisor.md. In an all-gather among more than two, nobody sends to whom he hears.
BOTH_WAYS = {"AllReduce": 0.1, "AllGather": 0.65, "AllToAll": 0.9}
# Messages of so many bytes are received first, and lose no more than an all-reduce does: `_Crossing` in comm/collectives.py.
CROSSING_BYTES = 1 << 20
HALF_BYTES, HALF_RATE, HALF_POWER = 600e3, 100e6, 0.375


def framing(kind: str, wire_bytes: float, world: int, bits_per_second: float) -> float:
    """Seconds of one of gloo's collectives on a limited link, over those of its bytes at the link's rate.

    >>> [round(framing("AllToAll", size, 4, 100e6), 2) for size in (1e5, 1e6, 1e7)]
    [1.05, 1.26, 1.15]
    """
    most = 0.0 if kind == "AllGather" and world > 2 else BOTH_WAYS.get(kind, 0.0)
    messages = (world - 1) * (2 if kind == "AllReduce" else 1)
    half = HALF_BYTES * math.pow(bits_per_second / HALF_RATE, HALF_POWER)
    size = wire_bytes / max(1, messages)
    if size >= CROSSING_BYTES and most:
        most = BOTH_WAYS["AllReduce"]
    return HEADERS + most * size**2 / (size**2 + half**2)


@dataclass(frozen=True)
class Speed:
    """What hosts need for one kind of collective, where the link costs nothing: alpha + bytes * beta seconds."""

    alpha_seconds: float
    seconds_per_byte: float

    def seconds(self, wire_bytes: float) -> float:
        """Of one that puts so many bytes on each worker's cable."""
        return self.alpha_seconds + wire_bytes * self.seconds_per_byte


# Of hosts that nobody has probed: a core's memory bandwidth, and a network card's latency.
UNKNOWN = Speed(50e-6, 1 / 4e9)


@dataclass(frozen=True)
class Network:
    """What a collective meets.

    - `link`: each node's cable.
    - `hosts`: by kind of collective and number of workers, what the hosts need; of what is not there, the nearest number.
    - `framing`: by kind, seconds over those of the bytes at the link's rate, where they were measured; else `HEADERS`.
    - `both_ways`: instead by `framing()`, for gloo over links that are like those of the lab.
    - `burst_bytes`: what an emulated link lets pass at once after a pause; 0 of a real one.
    - `slow_down`: seconds by which training is slower for each second that hosts work on a collective meanwhile.
    - `per_node`: so many workers share a cable. What at most so many exchange among themselves stays on their node.
    - `groups`: so many groups of workers exchange at the same time over the same cables, as the shards of islands do.
    """

    link: Link = Link()
    hosts: Mapping[str, Mapping[int, Speed]] = field(default_factory=dict)
    burst_bytes: float = 0.0
    slow_down: float = 0.0
    framing: Mapping[str, float] = field(default_factory=dict)
    per_node: int = 1
    groups: int = 1
    both_ways: bool = False

    @property
    def bytes_per_second(self) -> float | None:
        """None: no limit."""
        return None if self.link.bits_per_second is None else self.link.bits_per_second / 8

    def host_speed(self, kind: str, world: int) -> Speed:
        """What the hosts need for a collective of so many workers."""
        known = self.hosts.get(kind)
        if not known:
            return UNKNOWN
        return known[min(known, key=lambda size: abs(size - world))]

    def host_seconds(self, kind: str, wire_bytes: float, world: int) -> float:
        """What the hosts need for so many bytes a worker."""
        return self.host_speed(kind, world).seconds(wire_bytes)

    def crosses(self, world: int) -> bool:
        """Whether a group of so many workers uses the cable at all."""
        return self.per_node == 1 or world > self.per_node

    def cable_bytes(self, kind: str, wire_bytes: float, world: int) -> float:
        """What a node's cable carries when each of `world` workers must send `wire_bytes`.

        All-reduce and all-gather go round a ring, which enters and leaves a node once: its cable carries what one worker
        sends. In an all-to-all each of its k workers sends to each of the N - k elsewhere: k (N - k) / (N - 1) times as much.

        >>> network = Network(per_node=4)
        >>> (
        ...     [network.cable_bytes(kind, 30, 16) for kind in ("AllReduce", "AllToAll")],
        ...     network.cable_bytes("AllReduce", 30, 4),
        ... )
        ([30.0, 96.0], 0.0)
        """
        if not self.crosses(world):
            return 0.0
        k = min(self.per_node, world)
        times = k * (world - k) / (world - 1) if kind == "AllToAll" and k > 1 else 1.0
        return self._framing(kind, wire_bytes, world) * self.groups * times * wire_bytes

    def _framing(self, kind: str, wire_bytes: float, world: int) -> float:
        if self.both_ways and self.link.bits_per_second is not None:
            return framing(kind, wire_bytes, world, self.link.bits_per_second)
        return self.framing.get(kind, HEADERS if self.link.bits_per_second is not None else 1.0)

    def delay_seconds(self, kind: str, world: int) -> float:
        """What the link's delay adds: once for each message of a collective that crosses it and waits for the one before.

        An all-reduce among N workers goes round a ring twice, in 2(N-1) messages, an all-gather once, in N-1; in an
        all-to-all all leave at once. Workers of one node hand on to each other without a delay.

        >>> round(Network(Link(8_000_000, 0.01)).delay_seconds("AllReduce", 4), 9)
        0.06
        """
        if not self.crosses(world):
            return 0.0
        nodes = -(-world // self.per_node)
        messages = {"AllReduce": 2 * (nodes - 1), "AllGather": nodes - 1, "AllToAll": 1}
        return messages.get(kind, nodes - 1) * self.link.delay_seconds


class Cable:
    """One node's cable, on which collectives go one after the other, in the order in which they are launched.

    A collective that puts b bytes on it takes

        messages * delay + alpha + max(beta * b, (framing * b - tokens) / rate)

    seconds. `alpha` and `beta` are what the hosts need. `tokens` are bytes that pass at once because the cable was idle.
    """

    def __init__(self, network: Network) -> None:
        self._network, self._tokens = network, network.burst_bytes
        self.free_at = 0.0

    def launch(self, now: float, kind: str, wire_bytes: float, world: int) -> float:
        """When one that is launched now is over."""
        network, rate = self._network, self._network.bytes_per_second
        start = max(now, self.free_at)
        speed = network.host_speed(kind, world)
        took = speed.seconds(wire_bytes)
        framed = network.cable_bytes(kind, wire_bytes, world)
        if rate is not None:
            tokens = min(network.burst_bytes, self._tokens + rate * (start - self.free_at))
            took = max(took, speed.alpha_seconds + (framed - tokens) / rate)
            self._tokens = min(network.burst_bytes, max(0.0, tokens + rate * took - framed))
        self.free_at = start + took
        return self.free_at + network.delay_seconds(kind, world)
