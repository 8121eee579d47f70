"""The strategies that the advisor knows: families of one recipe each, from mild to strong. Imports no torch.

A `Plan` says in plain data what its text means: which method averages gradients and when, and what is averaged between steps.
`estimates.py` works out bytes by it where there is no torch. A test compares every plan with `predict`.

What is left out: fp16, which overflows where bf16 does not; fp8, which sends the bytes of int8 and takes longer; sign, topk and
randomk, which cost more loss than others at the same bytes (docs/benchmarks.md). `-s` takes any of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from laconic.advisor.risk import Risk

OptimizerKind = Literal["sgd", "adam"]
WARMUP = 100  # steps of averaged gradients before local ones
DILOCO_PERIODS, STREAMING_PERIODS = (16, 32), (16, 32, 64, 128, 256, 512)
RANKS = (32, 16, 8, 4)
MEAN = "mean"  # a plain mean of parameters, and no reducer


@dataclass(frozen=True)
class Plan:
    """A strategy in plain data.

    Methods are named as in `traffic_table.METHODS`.

    - `gradients`: how they are averaged, after the warm-up; None: never. `every`: once in so many steps.
    - `in_node`: gradients are averaged within the node, in every step.
    - `between`: how deltas, or parameters (`MEAN`), are averaged, once in `period` steps; None: never.
    - `fragments` and `delay` are those of `streaming_diloco`.
    - `outer_memory`, `warmup_memory`: numbers kept for each parameter, by the outer optimizer and since the warm-up.
    """

    text: str
    risk: Risk
    words: str
    gradients: str | None = None
    every: int = 1
    in_node: bool = False
    between: str | None = None
    period: int = 1
    fragments: int = 1
    delay: int = 0
    outer_memory: int = 0
    warmup_memory: int = 0

    @property
    def cycle(self) -> int:
        """Steps after which it does the same again."""
        return max(self.every, self.period)


def families(optimizer: OptimizerKind = "adam", *, fragments: int = 4, nodes: bool = False) -> list[list[Plan]]:
    """By class of risk, and in a class from mild to strong, by what the benchmarks saw.

    `fragments`: at most so many, for a model of few layers. `nodes`: there are several workers in a node.

    >>> [family[0].text for family in families()][:4]
    ['ddp()', 'bf16()', 'int8()', 'int4()']
    """
    own = _adam(fragments) if optimizer == "adam" else _sgd(fragments)
    return [*_every_step(optimizer), *([_post_local(optimizer)] if nodes else []), *own]


LOSSES = (
    "Losses, where nothing else is said: a transformer of 0.5 million parameters, 320 steps from a warm start, 4 simulated "
    "workers, 3 seeds (docs/benchmarks.md, what each budget of bytes buys). Another model may lose more, or less."
)


def _every_step(optimizer: OptimizerKind) -> Iterator[list[Plan]]:
    adam = optimizer == "adam"
    yield [Plan("ddp()", Risk.SAME, "DDP's own, bit for bit", "Exact()")]
    same = "the accuracy and loss of plain all-reduce in 300 steps of a small network, 5 seeds: docs/compression.md"
    yield [Plan("bf16()", Risk.ROUNDING, same, "Cast('bf16')")]
    yield [Plan("int8()", Risk.ROUNDING, _above("0.00 ± 0.02" if adam else "0.00 ± 0.00"), "Quantized(8)")]
    yield [Plan("int4()", Risk.DELAY, _above("0.07 ± 0.01" if adam else "0.00 ± 0.00"), "ErrorFeedback(Quantized(4))")]
    if adam:
        method = "Momentum(ErrorFeedback(Quantized(2)))"
        text = f"ddp(reducer={method}, warmup={WARMUP}, warmup_reducer=Quantized(8), second_moment='slow')"
        yield [Plan(text, Risk.DELAY, f"{_above('0.05 ± 0.03')}; don't clip gradient norms with it", method)]
    yield [_powersgd(rank, adam=adam) for rank in RANKS]


def _powersgd(rank: int, *, adam: bool) -> Plan:
    seen = _above("1.17 ± 0.08" if adam else "1.33 ± 0.16")
    words = seen if rank == 4 else f"not measured at this rank; at rank 4: {seen}"
    return Plan(f"powersgd(rank={rank})", Risk.DELAY, words, f"ErrorFeedback(PowerSGD({rank}))")


def _post_local(optimizer: OptimizerKind) -> list[Plan]:
    """Gradients within the node in every step; only parameters cross the cable."""
    seen = {"adam": {4: "0.98 ± 0.33", 16: "1.77 ± 0.18"}, "sgd": {4: "0.25 ± 0.08", 16: "1.46 ± 0.11"}}[optimizer]
    plans = []
    for period in (4, 8, 16):
        known = f"with one worker a node: {_above(seen[period])}" if period in seen else "between the rows of 4 and 16 steps"
        text = f"post_local_sgd(warmup={WARMUP}, period={period})"
        plans.append(Plan(text, Risk.LOCAL, known, "Exact()", in_node=True, between=MEAN, period=period))
    return plans


def _adam(fragments: int) -> Iterator[list[Plan]]:
    yield [
        _local_adam(2, 64, 0, _above("0.43 ± 0.13")),
        _local_adam(4, 64, 0, _above("0.50 ± 0.14")),
        _local_adam(4, 64, 1, _above("0.55 ± 0.15")),
        _local_adam(8, 128, 0, _above("0.77 ± 0.16")),
        _local_adam(16, 128, 0, "0.924 of DDP's loss at equal time, 100 Mbit/s (docs/local.md); not measured at equal steps"),
    ]
    yield [_diloco(period, _above("1.30 ± 0.14")) for period in DILOCO_PERIODS]
    words = "0.927 of DDP's loss at equal time, 100 Mbit/s (docs/local.md); not measured at equal steps"
    yield [_streaming(period, fragments, words, 16) for period in STREAMING_PERIODS]


def _sgd(fragments: int) -> Iterator[list[Plan]]:
    coarse = "ErrorFeedback(Ternary())"
    yield [
        Plan(
            f"diloco(period={period}, outer_lr=1.0, outer_momentum=0.0, warmup={WARMUP}, reducer={coarse}, "
            "warmup_reducer=Quantized(8))",
            Risk.LOCAL,
            _above(seen),
            between=coarse,
            period=period,
        )
        for period, seen in ((4, "0.28 ± 0.12"), (8, "0.70 ± 0.11"))
    ]
    yield [_diloco(period, _above("1.29 ± 0.11")) for period in DILOCO_PERIODS]
    words = "0.4 to 0.5 % below DDP's loss in 192 steps, 3 seeds: docs/benchmarks.md, loss for seconds and bytes"
    yield [
        _streaming(period, fragments, words, 24, ", outer_lr=1.0, outer_momentum=0.2")
        for period in (24, *STREAMING_PERIODS[1:])
    ]


def _local_adam(period: int, refresh: int, delay: int, words: str) -> Plan:
    text = f"local_adam(period={period}, refresh={refresh}{f', delay={delay}' if delay else ''}, warmup={WARMUP})"
    coarse = "ErrorFeedback(Ternary())"
    return Plan(text, Risk.LOCAL, words, "Quantized(4)", refresh, False, coarse, period, delay=delay, warmup_memory=1)


def _diloco(period: int, seen: str) -> Plan:
    words = seen if period == 16 else f"not measured at this period; at 16: {seen}"
    text = f"diloco(period={period}, warmup={WARMUP}, reducer=Quantized(8), warmup_reducer=Quantized(8))"
    return Plan(text, Risk.LOCAL, words, between="Quantized(8)", period=period, outer_memory=1)


def _streaming(period: int, fragments: int, seen: str, measured: int, outer: str = "") -> Plan:
    """Each fragment has nearly all of the time until the next one leaves."""
    delay = max(1, period // fragments - 1)
    words = seen if period == measured else f"not measured at this period; at {measured}: {seen}"
    text = f"streaming_diloco(period={period}, fragments={fragments}, delay={delay}, blend=0.0, carry=True{outer}, "
    text += f"warmup={WARMUP}, warmup_reducer=Quantized(8))"
    return Plan(
        text, Risk.LOCAL, words, between="Quantized(8)", period=period, fragments=fragments, delay=delay, outer_memory=1
    )


def _above(percent: str) -> str:
    return f"{percent} % above DDP's loss"
