"""A network as the cost model sees it: a link, and what the hosts themselves need for a collective."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.cost.link import Link

# Seconds of a collective on a limited link over those of its bytes at the link's rate: `benchmarks link` measures them.
FRAMING = {"AllReduce": 1.06, "AllGather": 1.1, "AllToAll": 1.3}


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

    - `link`: each worker's cable.
    - `hosts`: by kind of collective and number of workers, what the hosts need; of what is not there, the nearest number.
    - `burst_bytes`: what an emulated link lets pass at once after a pause; 0 of a real one.
    - `slow_down`: seconds by which training is slower for each second that hosts work on a collective meanwhile.
    """

    link: Link = Link()
    hosts: Mapping[str, Mapping[int, Speed]] = field(default_factory=dict)
    burst_bytes: float = 0.0
    slow_down: float = 0.0
    framing: Mapping[str, float] = field(default_factory=lambda: FRAMING)

    @property
    def bytes_per_second(self) -> float | None:
        """None: no limit."""
        return None if self.link.bits_per_second is None else self.link.bits_per_second / 8

    def host_seconds(self, kind: str, wire_bytes: float, world: int) -> float:
        """What the hosts need."""
        known = self.hosts.get(kind)
        if not known:
            return UNKNOWN.seconds(wire_bytes)
        near = min(known, key=lambda size: abs(size - world))
        return known[near].seconds(wire_bytes)

    def delay_seconds(self, kind: str, world: int) -> float:
        """What the link's delay adds: once for each message of a collective that waits for the one before.

        An all-reduce among N workers goes round a ring twice, in 2(N-1) messages, an all-gather once, in N-1; in an
        all-to-all all leave at once.

        >>> round(Network(Link(8_000_000, 0.01)).delay_seconds("AllReduce", 4), 9)
        0.06
        """
        messages = {"AllReduce": 2 * (world - 1), "AllGather": world - 1, "AllToAll": 1}
        return messages.get(kind, world - 1) * self.link.delay_seconds


class Cable:
    """One worker's cable, on which collectives go one after the other, in the order in which they are launched.

    A collective that puts b bytes on it takes

        messages * delay + max(alpha + beta * b, (framing * b - tokens) / rate)

    seconds. `alpha` and `beta` are what the hosts need. `tokens` are bytes that pass at once because the cable was idle.
    """

    def __init__(self, network: Network) -> None:
        self._network, self._tokens = network, network.burst_bytes
        self.free_at = 0.0

    def launch(self, now: float, kind: str, wire_bytes: float, world: int) -> float:
        """When one that is launched now is over."""
        network, rate = self._network, self._network.bytes_per_second
        start = max(now, self.free_at)
        took = network.host_seconds(kind, wire_bytes, world)
        if rate is not None:
            tokens = min(network.burst_bytes, self._tokens + rate * (start - self.free_at))
            framed = network.framing.get(kind, 1.0) * wire_bytes
            took = max(took, (framed - tokens) / rate)
            self._tokens = min(network.burst_bytes, max(0.0, tokens + rate * took - framed))
        self.free_at = start + took
        return self.free_at + network.delay_seconds(kind, world)
