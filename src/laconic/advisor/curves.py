"""Shares of the rate over bandwidth and over the number of workers. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from laconic.advisor.advice import Row
from laconic.cost.around import Flow
from laconic.cost.link import Link
from laconic.cost.network import Network
from laconic.cost.step_time import Compute, Exchange, Round, Step, step_time

SLOWEST, FASTEST = 10**7, 4 * 10**11  # bits a second
PER_DECADE = 6
WORKERS = tuple(2**power for power in range(1, 11))
CYCLES = 2  # of the simulation: a curve needs no more digits than a line is thick

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """By strategy, points of (bits a second, share) and of (workers, share)."""

    by_bandwidth: Mapping[str, Curve]
    by_workers: Mapping[str, Curve]


def curves(rows: Sequence[Row], compute: Compute, network: Network, world: int) -> Curves:
    """Of the strategies of a table, each with the parameters that it has there."""
    rates = sorted({*_rates(), *([network.link.bits_per_second] if network.link.bits_per_second else [])})
    sizes = sorted({*(size for size in WORKERS if size >= 2 * network.per_node or network.per_node == 1), world})
    bandwidth: dict[str, Curve] = {}
    workers: dict[str, Curve] = {}
    for row in rows:
        bandwidth[row.strategy] = [
            (bits, _share(row.steps, compute, replace(network, link=Link(bits, network.link.delay_seconds)))) for bits in rates
        ]
        workers[row.strategy] = [(size, _share(with_world(row.steps, world, size), compute, network)) for size in sizes]
    return Curves(bandwidth, workers)


def with_world(steps: Sequence[Step], old: int, new: int) -> list[Step]:
    """The same steps among `new` workers instead of `old`: rounds of all of them change, those of a node don't.

    Bytes go by (N - 1) / N; what is gathered in small messages, such as a heartbeat, by N - 1.

    >>> step = Step(after=[Exchange([Flow("AllReduce", 100.0, 2)], [0.0, 0.0], 50)])
    >>> with_world([step], 2, 4)[0].after[0].rounds[0]
    Flow(kind='AllReduce', wire_bytes=150.0, world=4)
    """
    if old == new:
        return list(steps)
    known: dict[int, Exchange] = {}  # a model repeats its exchanges, and steps share them

    def resized(exchange: Exchange) -> Exchange:
        if id(exchange) not in known:
            rounds = [_resized(each, old, new, exchange.numbers) for each in exchange.rounds]
            known[id(exchange)] = Exchange(rounds, exchange.work, exchange.numbers)
        return known[id(exchange)]

    return [
        replace(
            step,
            in_backward=[resized(each) for each in step.in_backward],
            after=[resized(each) for each in step.after],
            outstanding=[resized(each) for each in step.outstanding],
        )
        for step in steps
    ]


def _resized(round_: Round, old: int, new: int, numbers: int) -> Round:
    if round_.world != old:
        return round_
    before, after = ((old - 1) / old, (new - 1) / new) if numbers else (old - 1, new - 1)
    return Flow(round_.kind, round_.wire_bytes * after / before, new)


def _share(steps: Sequence[Step], compute: Compute, network: Network) -> float:
    return step_time(steps, compute, network, cycles=CYCLES).share


def _rates() -> list[int]:
    first, last = math.log10(SLOWEST), math.log10(FASTEST)
    count = round((last - first) * PER_DECADE)
    return [round(10 ** (first + (last - first) * place / count)) for place in range(count + 1)]
