"""Which strategy: the step time of each, and one choice by a rule that a person can follow. Imports no torch.

The rule: the first strategy of the list, from mild to strong, that reaches the wanted share of the rate without communication.
Where plain DDP, or rounding, is nearly as fast, that: a stronger class has to earn its place. Where none reaches the share, the
mildest that comes near to the fastest.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from laconic.advisor.risk import Risk
from laconic.cost.link import Link
from laconic.cost.network import Network
from laconic.cost.step_time import Compute, Step, StepTime, step_time
from laconic.report.advice_records import share_text

DAY = 24 * 60 * 60
EARNED = 0.05  # a stronger class must be faster than DDP's arithmetic, or rounding, by more than this share
NEAR = 0.03  # a rate that is less by no more than this share is not worth a stronger strategy


@dataclass(frozen=True)
class Candidate:
    """A strategy that may be chosen: what it sends in each step of its cycle, what it keeps, and what is known of its loss."""

    strategy: str
    risk: Risk
    steps: Sequence[Step] = field(repr=False)
    extra_memory_bytes: float = 0.0
    words: str = ""

    def wire_bytes_per_step(self, network: Network = Network()) -> float:  # noqa: B008  (a frozen value)
        """What a worker's cable carries on average, or that of a node whose workers share one; without headers."""
        plain = replace(network, link=Link(), framing={}, groups=1)
        sent = [
            plain.cable_bytes(round_.kind, round_.wire_bytes, round_.world)
            for step in self.steps
            for exchange in (*step.in_backward, *step.after, *step.outstanding)
            for round_ in exchange.rounds
        ]
        return sum(sent) / len(self.steps) if self.steps else 0.0


@dataclass(frozen=True)
class Limits:
    """What a choice must keep to; None: no limit."""

    risk: Risk = Risk.LOCAL
    bytes_per_day: float | None = None  # on a cable
    extra_memory_bytes: float | None = None


@dataclass(frozen=True)
class Row:
    """One strategy over the network in question.

    Fields:
      `strategy`: its text.
      `risk`: the class of what it does to the training.
      `words`: what is known of its loss.
      `time`: a step's seconds: `.seconds`, and of these `.compute`, `.work` and `.waiting`.
      `wire_bytes_per_step`: what a worker's cable carries on average, or that of a node whose workers share one.
      `extra_memory_bytes`: what it keeps on each rank, beside model and optimizer.
      `refused`: why it can't be chosen. Default "": it can.
      `steps`: what it sends in each step of its cycle. Default ().
    """

    strategy: str
    risk: Risk
    words: str
    time: StepTime
    wire_bytes_per_step: float
    extra_memory_bytes: float
    refused: str = ""
    steps: Sequence[Step] = field(default=(), repr=False, compare=False)

    @property
    def share(self) -> float:
        """Its share of the rate without communication, from 0 to 1."""
        return self.time.share

    @property
    def bytes_per_day(self) -> float:
        """What a cable carries in a day, if training goes on all day."""
        return self.wire_bytes_per_step * DAY / self.time.seconds if self.time.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "strategy": self.strategy,
            "risk": self.risk.option,
            "risk_words": self.risk.words,
            "loss": self.words,
            "share": self.share,
            "step_seconds": self.time.seconds,
            "compute_seconds": self.time.compute,
            "work_seconds": self.time.work,
            "waiting_seconds": self.time.waiting,
            "wire_bytes_per_step": self.wire_bytes_per_step,
            "wire_bytes_per_day": self.bytes_per_day,
            "extra_memory_bytes": self.extra_memory_bytes,
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Advice:
    """The advisor's answer: a row for each family of strategies, from mild to strong, and the choice.

    `run.advice()` of a run by `auto()` returns it.

    Fields:
      `rows`: a `Row` for each family.
      `choice`: the one of the strategy that is chosen.
      `reason`: why, in a sentence or two.
      `share`: the share of the rate without communication that was wanted.
      `risk`: the strongest class of risk that was allowed.
    """

    rows: list[Row]
    choice: Row
    reason: str
    share: float
    risk: Risk

    @property
    def reached(self) -> bool:
        """Whether the choice has the share that was wanted."""
        return self.choice.share >= self.share

    def as_dict(self) -> dict[str, Any]:
        """Plain data, of which `laconic advise --json` is made."""
        return {
            "share": self.share,
            "risk": self.risk.option,
            "choice": self.choice.strategy,
            "reached": self.reached,
            "reason": self.reason,
            "rows": [row.as_dict() for row in self.rows],
        }


def advise(
    families: Sequence[Sequence[Candidate]],
    compute: Compute,
    network: Network,
    *,
    share: float = 0.95,
    risk: Risk = Risk.LOCAL,
    limits: Limits | None = None,
) -> Advice:
    """Time every family over the network, and choose.

    A family is one recipe with its parameters from mild to strong. Its row has the mildest parameters that reach `share` and
    keep to the limits, else the mildest that come near to its fastest. `limits` may be given instead of `risk`.

    >>> quiet = Candidate("ddp()", Risk.SAME, [Step()])
    >>> advise([[quiet]], Compute.of(0.3), Network()).reason
    'ddp() reaches 100 % of the rate without communication: the network is not the problem.'
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of the rate must be above 0 and at most 1, such as 0.95; got {share}")
    kept = limits if limits is not None else Limits(risk)
    found = [_Family.of(members, compute, network, kept, share) for members in families if members]
    found.sort(key=lambda family: family.row.risk)  # a stable sort: in a class, the order is that of the list
    allowed = [family for family in found if not family.row.refused]
    if not allowed:
        raise _nothing_left([family.row for family in found])
    reaching = [family for family in allowed if family.row.share >= share]
    fastest = max(allowed, key=lambda family: family.row.share)
    enough = reaching[0] if reaching else next(family for family in allowed if _near(family.row, fastest.row))
    as_good = [family for family in allowed if reaching and _as_good(family.row, enough.row)]
    chosen = min(as_good, key=lambda family: (family.row.risk, -family.row.share), default=enough)
    reason = _reason(found, chosen, fastest, kept, share)
    if chosen is not enough:
        reason = (
            f"{chosen.row.strategy} reaches {share_text(chosen.row.share)} of the rate without communication. "
            f"{enough.row.strategy} would reach {share_text(enough.row.share)}: for {EARNED:.0%} or less of the rate, nothing "
            "that does more to the training is taken."
        )
    return Advice([family.row for family in found], chosen.row, reason, share, kept.risk)


@dataclass(frozen=True)
class _Family:
    """Its row, and the next milder one of the same recipe."""

    row: Row
    milder: Row | None

    @classmethod
    def of(cls, members: Sequence[Candidate], compute: Compute, network: Network, limits: Limits, share: float) -> "_Family":
        rows: list[Row] = []
        for member in members:
            rows.append(timed(member, compute, network, limits))
            if rows[-1].share >= share and not _unfit(rows[-1], limits):
                break
        else:
            fitting = [(place, row) for place, row in enumerate(rows, 1) if not _unfit(row, limits)]
            if fitting:
                _, fastest = max(fitting, key=lambda one: one[1].share)
                rows = rows[: next(place for place, row in fitting if _near(row, fastest))]
        return cls(rows[-1], rows[-2] if len(rows) > 1 else None)


def _as_good(milder: Row, row: Row) -> bool:
    """Whether a milder class that leaves the loss alone is nearly as fast."""
    return milder.risk < row.risk and milder.risk <= Risk.ROUNDING and milder.share >= (1 - EARNED) * row.share


def _near(row: Row, fastest: Row) -> bool:
    return row.share >= (1 - NEAR) * fastest.share


def timed(candidate: Candidate, compute: Compute, network: Network, limits: Limits | None = None) -> Row:
    """A candidate's row."""
    row = Row(
        candidate.strategy,
        candidate.risk,
        candidate.words,
        step_time(candidate.steps, compute, network),
        candidate.wire_bytes_per_step(network),
        candidate.extra_memory_bytes,
        steps=candidate.steps,
    )
    return replace(row, refused=_refusal(row, limits or Limits()))


def _refusal(row: Row, limits: Limits) -> str:
    if row.risk > limits.risk:
        return f"beyond --risk {limits.risk.option}"
    return _unfit(row, limits)


def _unfit(row: Row, limits: Limits) -> str:
    """Why its parameters are none to take, whatever the risk."""
    if row.risk == Risk.LOCAL and not _collectives(row.steps):
        return "it never averages"
    if row.risk == Risk.LOCAL and not row.wire_bytes_per_step:
        return "it never averages between nodes"
    if limits.extra_memory_bytes is not None and row.extra_memory_bytes > limits.extra_memory_bytes:
        return "its extra memory does not fit"
    if limits.bytes_per_day is not None and row.bytes_per_day > limits.bytes_per_day:
        return "over the budget"
    return ""


def _collectives(steps: Sequence[Step]) -> int:
    """How many are sent in a cycle, over a cable or within a node."""
    return sum(len(each.rounds) for step in steps for each in (*step.in_backward, *step.after, *step.outstanding))


def _nothing_left(rows: Sequence[Row]) -> ValueError:
    counts = Counter(row.refused for row in rows)
    reasons = ", ".join(f"{count} of {len(rows)}: {reason}" for reason, count in counts.items())
    least = min(rows, key=lambda row: row.bytes_per_day)
    return ValueError(
        f"no strategy may be chosen ({reasons}); the fewest bytes are those of {least.strategy}, which puts "
        f"{least.bytes_per_day / 1e9:,.3g} GB a day on a cable: allow more"
    )


def _reason(families: Sequence[_Family], chosen: _Family, fastest: _Family, limits: Limits, share: float) -> str:
    """What, why, and why the next milder one does not do."""
    row = chosen.row
    if row.share >= share:
        what = f"{row.strategy} reaches {share_text(row.share)} of the rate without communication"
        if row is families[0].row:
            return f"{what}: the network is not the problem."
        first = f"{what}, and is the first of the list, from mild to strong, that reaches {share_text(share)}."
    else:
        near = "the fastest" if chosen is fastest else f"the mildest within {NEAR:.0%} of the fastest"
        first = (
            f"No strategy that is allowed reaches {share_text(share)} of the rate without communication. {row.strategy} is "
            f"{near}, with {share_text(row.share)}."
        )
        beyond = [other.row for other in families if other.row.risk > limits.risk and other.row.share >= share]
        if beyond:
            first += f" {beyond[0].strategy} would reach {share_text(beyond[0].share)}: see --risk {beyond[0].risk.option}."
    place = next(number for number, family in enumerate(families) if family is chosen)
    milder = chosen.milder or (families[place - 1].row if place else None)
    if milder is None:
        return first
    if milder.refused:
        return f"{first} The next milder one, {milder.strategy}, is not allowed: {milder.refused}."
    return f"{first} The next milder one, {milder.strategy}, reaches {share_text(milder.share)}."
