"""What `laconic advise` answers, as plain data: `--json` prints it, and the table and the page are made of it."""

import json
from dataclasses import asdict, dataclass, field

VERSION = 1
PAGE = "advice.html"
FILE = "advice.json"
OWN_TASK = "mine.py"  # a name for the user's own, in commands


@dataclass(frozen=True)
class AdviceRow:
    """One strategy; seconds and bytes are those of a step, on average."""

    strategy: str
    risk: str  # same, rounding, delay or local
    risk_words: str
    loss: str  # what the benchmarks saw of it
    share: float  # of the rate without communication
    step_seconds: float
    compute_seconds: float
    work_seconds: float  # encoding and decoding
    waiting_seconds: float
    wire_bytes_per_step: float  # on a cable
    wire_bytes_per_day: float
    cost_per_day: float | None  # of all cables, with --price-per-gb
    extra_memory_bytes: float  # on each worker, beyond DDP's
    refused: str  # why it can't be chosen; empty: it can


@dataclass(frozen=True)
class AdviceRecord:
    """The answer."""

    model: str
    workers: int
    per_node: int
    link: str
    link_bits_per_second: float | None
    share: float  # that was wanted
    risk: str  # that was allowed
    verdict: str  # is the network the problem?
    choice: str
    reached: bool
    reason: str
    rows: list[AdviceRow]
    assumptions: list[str]
    by_bandwidth: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # with --out
    by_workers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    next_command: str = ""  # which tries the choice; empty: it is ddp()
    version: int = VERSION

    @property
    def title(self) -> str:
        """What was asked."""
        link = "" if self.one_host else f", link {self.link}"
        return f"{self.model}, {workers_text(self.workers, self.per_node)}{link}"

    @property
    def one_host(self) -> bool:
        """Whether all workers are on one host, as in a probe of one: nothing crosses a cable."""
        return self.per_node == self.workers

    def text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def workers_text(count: int, per_node: int) -> str:
    """So many workers, and on which nodes.

    >>> workers_text(4, 1), workers_text(16, 4), workers_text(2, 2)
    ('4 workers', '16 workers in 4 nodes of 4', '2 workers on one host')
    """
    if per_node == 1:
        return f"{count} workers"
    return (
        f"{count} workers on one host" if per_node == count else f"{count} workers in {count // per_node} nodes of {per_node}"
    )


def share_text(share: float) -> str:
    """A share as people write it, never rounded up to what was wanted.

    >>> share_text(0.9496), share_text(0.0998), share_text(0.0004)
    ('94 %', '9.9 %', '0.04 %')
    """
    number = share * 100 + 1e-9
    if number >= 10:
        return f"{int(number)} %"
    return f"{int(number * 10) / 10} %" if number >= 1 else f"{number:.1g} %"


def seconds_text(seconds: float) -> str:
    """A time as people write it.

    >>> seconds_text(0.0123), seconds_text(93.4), seconds_text(0)
    ('12.3 ms', '93.4 s', '0 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
