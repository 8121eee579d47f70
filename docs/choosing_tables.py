"""Writes the tables in docs/choosing.md anew: `python docs/choosing_tables.py`. A test compares them with the advisor's."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

from laconic.advisor.advice import Advice, Row, advise
from laconic.advisor.answer import network_of
from laconic.advisor.catalogue import OptimizerKind
from laconic.advisor.quantities import Workers, workers
from laconic.advisor.risk import Risk
from laconic.advisor.subjects import Subject, of_numbers
from laconic.cost.link import parse
from laconic.report.advice_records import seconds_text, share_text
from laconic.report.advice_table import data_text

PAGE = Path(__file__).with_name("choosing.md")
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
CASE_LINES = [
    "the choice",
    "rate",
    "on the wire, a step",
    "waits, a step",
    "bytes a day",
    "GB a worker",
    "of which for the strategy",
    "its loss, where measured",
]
LINK_HEAD = ["link", "wire, of compute", "rate of `ddp()`", "`--risk rounding`", "`--risk delay`", "`--risk local`"]


@dataclass(frozen=True)
class Case:
    """What `laconic advise` is asked."""

    size: str
    step_ms: int
    link: str
    count: int | None = None
    nodes: str | None = None
    optimizer: OptimizerKind = "adam"

    @property
    def command(self) -> str:
        """For a shell."""
        many = ["--nodes", self.nodes] if self.nodes else ["--workers", str(self.count)]
        options = ["--params", self.size, "--step-ms", str(self.step_ms), *many, "--link", self.link]
        return shlex.join(["laconic", "advise", *options, *(["--optimizer", "sgd"] if self.optimizer == "sgd" else [])])

    @property
    def workers(self) -> Workers:
        """As the command reads them."""
        return workers(self.count, self.nodes)

    def subject(self) -> Subject:
        """What is advised on."""
        number = float(self.size[:-1]) * {"m": 1e6, "b": 1e9}[self.size[-1]]
        return of_numbers(round(number), self.step_ms / 1e3, self.workers, self.optimizer)


CASES = {
    "rack": Case("125m", 300, "10gbit", count=8),
    "nodes": Case("1.3b", 900, "25gbit", nodes="8x8"),
    "sgd": Case("350m", 500, "10gbit", count=8, optimizer="sgd"),
    "islands": Case("875m", 4000, "125mbit", count=2),
    "home": Case("125m", 800, "100mbit", count=2),
    "spot": Case("350m", 600, "1gbit", count=16),
}
GRID = Case("350m", 500, "200gbit", count=16)
LINKS = ["200gbit", "100gbit", "50gbit", "25gbit", "10gbit", "5gbit", "1gbit", "100mbit"]


def choices(case: Case, subject: Subject, link: str) -> dict[Risk, Advice]:
    """What the command finds, by what is allowed."""
    network, _ = network_of(subject, case.workers, parse(link), None)
    allowed = {risk: [family for family in subject.families if family[0].risk <= risk] for risk in Risk}
    return {risk: advise(families, subject.compute, network) for risk, families in allowed.items()}


def wire_seconds(row: Row, link: str) -> float:
    """How long a step's bytes occupy the cable; headers are not counted."""
    rate = parse(link).bits_per_second
    assert rate, "a link of the page has a rate"
    return row.wire_bytes_per_step * 8 / rate


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """In Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def case_table(case: Case) -> list[str]:
    """The choice for each class of risk, and why the last one is it."""
    subject = case.subject()
    found = choices(case, subject, case.link)
    columns = [case_column(advice.choice, subject, case.link) for advice in found.values()]
    for place in range(len(columns) - 1, 0, -1):
        if columns[place] == columns[place - 1]:
            columns[place] = ["the same", *[""] * (len(CASE_LINES) - 1)]
    head = ["you allow", *(f"`--risk {risk.option}`" for risk in found)]
    rows = [list(row) for row in zip(CASE_LINES, *columns, strict=True)]
    reason = textwrap.fill(found[Risk.LOCAL].reason, 156, initial_indent="> ", subsequent_indent="> ", break_on_hyphens=False)
    return [*table(head, rows), "", reason]


def case_column(row: Row, subject: Subject, link: str) -> list[str]:
    """What a choice costs."""
    own = row.extra_memory_bytes / 1e9
    return [
        f"`{row.strategy}`",
        share_text(row.share),
        seconds_text(wire_seconds(row, link)),
        seconds_text(row.time.waiting),
        data_text(row.bytes_per_day),
        f"{subject.training_bytes / 1e9 + own:.1f}",
        f"{own:.1f}",
        row.words,
    ]


def link_table() -> list[str]:
    """One model over many links."""
    subject = GRID.subject()
    rows = []
    for link in LINKS:
        plain, *others = (advice.choice for advice in choices(GRID, subject, link).values())
        ratio = wire_seconds(plain, link) / plain.time.compute
        cells = [f"`{short(row.strategy)}` {share_text(row.share)}" for row in others]
        rows.append([link, f"{ratio:.1f}", share_text(plain.share), *cells])
    return table(LINK_HEAD, rows)


def short(strategy: str) -> str:
    """Its name and what varies with the link; the whole text is in the command's answer."""
    name, _, options = strategy.partition("(")
    kept = [option for option in options.rstrip(")").split(", ") if option.startswith(("period", "rank", "delay"))]
    return f"{name}({', '.join(kept)})"


def answered(page: str) -> str:
    """The page, with what the advisor says now."""

    def block(found: re.Match[str]) -> str:
        case = CASES.get(found[2], GRID)
        lines = case_table(case) if found[2] in CASES else link_table()
        return "\n".join([f"{found[1]}\n```\n{case.command}\n```\n", *lines, f"\n{found[3]}"])

    return PLACE.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(answered(PAGE.read_text()))
