"""From a subject and a network to the whole answer of `laconic advise`. Imports no torch."""

import shlex
from dataclasses import dataclass

from laconic.advisor.advice import Advice, Limits, Row, advise
from laconic.advisor.catalogue import LOSSES
from laconic.advisor.curves import Curves, curves
from laconic.advisor.quantities import GIGABYTE, Workers
from laconic.advisor.risk import Risk
from laconic.advisor.subjects import FAST_HOSTS, ON_FAST_HOSTS, ON_HOSTS_LIKE_THIS, Subject
from laconic.cost.link import FASTEST_EMULATED, Link
from laconic.cost.measured import Probe
from laconic.cost.network import Network
from laconic.report.advice_records import OWN_TASK, AdviceRecord, AdviceRow, seconds_text, share_text

HARDLY = 0.9  # with this share of the rate, what a network takes is less than most other things do
HERE = 4  # workers of `laconic compare`, if it isn't told another number
DIGITS = 3  # of the rate of a probe's link, in a command


@dataclass(frozen=True)
class Wanted:
    """What the answer is to keep to."""

    share: float = 0.95
    risk: Risk = Risk.LOCAL
    price_per_gb: float | None = None
    bytes_per_day: float | None = None  # the most, on each cable
    memory_bytes: float | None = None  # of a worker
    with_curves: bool = False
    task: str = OWN_TASK  # by which the choice can be tried


def answer(
    subject: Subject, workers: Workers, network: Network, words: str, wanted: Wanted, probe: Probe | None
) -> AdviceRecord:
    """The table, the choice, and what they rest on. `words` says where the network is from; `probe` is what it was made of."""
    limits = Limits(wanted.risk, wanted.bytes_per_day, _free(subject, wanted.memory_bytes))
    advice = advise(subject.families, subject.compute, network, share=wanted.share, limits=limits)
    drawn = curves(advice.rows, subject.compute, network, workers.count) if wanted.with_curves else Curves({}, {})
    price = None if wanted.price_per_gb is None else wanted.price_per_gb * workers.cables / GIGABYTE
    return AdviceRecord(
        model=subject.words,
        workers=workers.count,
        per_node=workers.per_node,
        link=str(network.link),
        link_bits_per_second=network.link.bits_per_second,
        share=advice.share,
        risk=advice.risk.option,
        verdict=verdict(advice, network.link, probe),
        choice=advice.choice.strategy,
        reached=advice.reached,
        reason=advice.reason,
        rows=[_row(row, price) for row in advice.rows],
        assumptions=[*subject.assumptions, words, LOSSES],
        by_bandwidth=dict(drawn.by_bandwidth),
        by_workers=dict(drawn.by_workers),
        next_command=next_command(advice.choice.strategy, network.link, wanted.task, workers.count),
    )


def network_of(subject: Subject, workers: Workers, link: Link | None, probe: Probe | None) -> tuple[Network, str]:
    """The network that was given or probed, and a sentence on what is not known of it."""
    if probe is not None:
        network = probe.network(world=workers.count)
        return network, f"The network is the probe's: {probe.link_note}"
    assert link is not None, "one of the two was given"
    if subject.measured_here:
        return Network(link, per_node=workers.per_node), ON_HOSTS_LIKE_THIS
    return Network(link, FAST_HOSTS, per_node=workers.per_node), ON_FAST_HOSTS


def verdict(advice: Advice, link: Link, probe: Probe | None = None) -> str:
    """Is the network a problem at all? What plain DDP gets of it."""
    plain = advice.rows[0]
    over = f"over {link}"
    if link.bits_per_second is None:
        over = "without a limit of the link" if probe is None else "over the network of the probe, which found no link's rate"
    reaches = f"{plain.strategy} reaches {share_text(plain.share)} of the rate without communication"
    got = f"{over}, {reaches}"
    times = f"a step takes {seconds_text(plain.time.seconds)}, of which {seconds_text(plain.time.compute)} are compute"
    if probe is not None and probe.one_host:
        return (
            f"This probe measured no link between hosts, so this answer is about this host alone: on it, {reaches} ({times}). "
            f"To probe between hosts, run on each of them: laconic probe --nnodes 2 --nproc-per-node {probe.world} "
            "--rdzv-backend c10d --rdzv-endpoint first-node:29400"
        )
    if plain.share >= advice.share:
        return f"Is the network the problem? No: {got}."
    if plain.share >= HARDLY:
        return f"Is the network the problem? Hardly: {got} ({times})."
    if plain.time.waiting <= (1 - advice.share) * plain.time.seconds:
        return f"Is the network the problem? No, but work on what is sent: {got} ({times})."
    return f"Is the network the problem? Yes: {got} ({times})."


def next_command(choice: str, link: Link, task: str, workers: int = HERE) -> str:
    """What shows the choice's loss on one machine; empty for ddp(), which needs no trial.

    >>> next_command("int8()", Link(100_000_000, 0.02), "digits"), next_command("int8()", Link(), "mine.py")
    ('laconic compare digits -s "int8()" --link 100mbit:20ms', 'laconic compare mine.py -s "int8()" --link none')
    >>> next_command("int8()", Link(2_496_123_456), "mine.py")  # of a probe
    'laconic compare mine.py -s "int8()" --link 2500mbit'
    >>> next_command("int8()", Link(100_000_000_000), "mine.py", workers=2)  # faster than what can be emulated
    'laconic compare mine.py -s "int8()" --link none --workers 2'
    """
    if choice == "ddp()":
        return ""
    bits = link.bits_per_second
    if bits is not None and bits > FASTEST_EMULATED:
        link = Link()
    elif bits is not None and f"{bits / 1e3:g}" != f"{bits / 1e3:.17g}":  # a text has six digits at most
        link = Link(round(bits, DIGITS - len(str(bits))), link.delay_seconds)
    fewer = f" --workers {workers}" if workers < HERE else ""
    return f'laconic compare {shlex.quote(task)} -s "{choice}" --link {link}{fewer}'


def _free(subject: Subject, memory_bytes: float | None) -> float | None:
    """What a worker has left for a strategy's own memory."""
    if memory_bytes is None:
        return None
    if subject.training_bytes > memory_bytes:
        needed, there = (f"{each / GIGABYTE:.3g} GB" for each in (subject.training_bytes, memory_bytes))
        raise ValueError(
            f"the model does not fit: weights, gradients and the memory of {subject.optimizer} take {needed}, and --memory has "
            f"{there}; shard the model (docs/sharded.md), or give more memory"
        )
    return memory_bytes - subject.training_bytes


def _row(row: Row, price: float | None) -> AdviceRow:
    parts = row.as_dict()
    return AdviceRow(**parts, cost_per_day=None if price is None else price * row.bytes_per_day)
