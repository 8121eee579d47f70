"""What a run counts of itself, and who is told."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from laconic.comm.collectives import Traffic
from laconic.comm.ledger import Ledger


@dataclass(frozen=True)
class Counts:
    """What so many steps have cost one rank."""

    steps: int = 0
    kinds: Mapping[str, Traffic] = field(default_factory=dict)  # by kind of collective
    wait_seconds: float | None = 0.0
    work_seconds: float = 0.0
    background_bytes: int = 0

    @property
    def total(self) -> Traffic:
        return sum(self.kinds.values(), Traffic())

    def __add__(self, other: "Counts") -> "Counts":
        none = Traffic()
        kinds = {kind: self.kinds.get(kind, none) + other.kinds.get(kind, none) for kind in {**self.kinds, **other.kinds}}
        known = self.wait_seconds is not None and other.wait_seconds is not None
        return Counts(
            self.steps + other.steps,
            kinds,
            (self.wait_seconds or 0.0) + (other.wait_seconds or 0.0) if known else None,
            self.work_seconds + other.work_seconds,
            self.background_bytes + other.background_bytes,
        )

    def __neg__(self) -> "Counts":
        kinds = {kind: Traffic() - cost for kind, cost in self.kinds.items()}
        waited = self.wait_seconds and -self.wait_seconds
        return Counts(-self.steps, kinds, waited, -self.work_seconds, -self.background_bytes)

    def state(self) -> dict[str, Any]:
        """Plain data."""
        kinds = {kind: [cost.payload_bytes, cost.wire_bytes, cost.collectives] for kind, cost in self.kinds.items()}
        return {**vars(self), "kinds": kinds}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Self:
        """From plain data."""
        kinds = {kind: Traffic(*map(int, cost)) for kind, cost in state["kinds"].items()}
        waited = None if state["wait_seconds"] is None else float(state["wait_seconds"])
        return cls(int(state["steps"]), kinds, waited, float(state["work_seconds"]), int(state["background_bytes"]))


class Counter:
    """The ledgers of a run, and what a loaded state had counted before."""

    def __init__(self) -> None:
        self.training, self.background, self.control = Ledger(), Ledger(), Ledger()
        self.saved = Counts()  # as of the last completed step
        self._steps = 0  # since it was attached
        self._brought = Counts()  # what a loaded state had counted, less what was counted here until then

    def step(self) -> None:
        """The run has made a step."""
        self._steps += 1

    def note(self) -> None:
        """The step is complete, and what was due after it."""
        self.saved = self.total()

    def total(self) -> Counts:
        """What the run has cost so far, before a resume and since."""
        return self._brought + self.here()

    def here(self) -> Counts:
        """What it has cost since it was attached, whatever was loaded meanwhile."""
        training, background = self.training, self.background.total.wire_bytes
        return Counts(self._steps, dict(training.kinds), training.wait_seconds, training.work_seconds, background)

    def load(self, counts: Counts) -> None:
        """Go on from these."""
        self._brought, self.saved = counts + -self.here(), counts


@dataclass(frozen=True)
class Stats:
    """What one rank has done so far, in the whole of the run: what came before a resume counts as well.

    `run.stats()` returns it.

    Not: headers of packets, the messages of some bytes by which ranks agree and meet, and what torch sends by itself, such as
    DDP's broadcast of buffers or the collectives inside an island.

    Fields:
      `steps`: attempted optimizer steps.
      `exchanges`: averagings of all gradients, in backward.
      `syncs`: averagings between steps that were due.
      `collectives`: collectives that training launched.
      `payload_bytes`: what this rank handed to them.
      `wire_bytes`: the least that it put on the cable for them: see `Traffic`.
      `wait_seconds`: how long the training thread stood still for them. None: not known on this device, because waiting
        doesn't block the host there.
      `skipped`: syncs of deltas that moved nothing, because they were not finite or out of line.
      `background_bytes`: wire bytes of `consensus()`, which is no part of training and not in `wire_bytes`.
      `work_seconds`: time in which exchanges encoded and decoded, as far as the host knows.
      `wire_bytes_by_kind`: `wire_bytes` by kind of collective: "AllReduce", "AllGather", "AllToAll".
      `collectives_by_kind`: `collectives` by kind.
      `counted_steps`: the steps that collectives, bytes and seconds are of. All of them, unless the run goes on from a state
        that was saved before states had these counts: then those since. Default 0.

    >>> import laconic
    >>> sent, launched = {"AllReduce": 600}, {"AllReduce": 4}
    >>> stats = laconic.Stats(
    ...     2, 2, 0, 4, 800, 600, 0.1, 0, 0, 0.0, sent, launched, counted_steps=2
    ... )
    >>> stats.wire_bytes_per_step
    300.0
    """

    steps: int
    exchanges: int
    syncs: int
    collectives: int
    payload_bytes: int
    wire_bytes: int
    wait_seconds: float | None
    skipped: int
    background_bytes: int
    work_seconds: float
    wire_bytes_by_kind: dict[str, int]
    collectives_by_kind: dict[str, int]
    counted_steps: int = 0

    @property
    def wire_bytes_per_step(self) -> float:
        """`wire_bytes` a step, on average over `counted_steps`; 0 before the first."""
        return self.wire_bytes / self.counted_steps if self.counted_steps else 0.0

    @property
    def rounds(self) -> int:
        """The former name of `exchanges`; it warns."""
        warnings.warn("stats().rounds is now called stats().exchanges", DeprecationWarning, stacklevel=2)
        return self.exchanges

    @property
    def aside_bytes(self) -> int:
        """The former name of `background_bytes`; it warns."""
        warnings.warn("stats().aside_bytes is now called stats().background_bytes", DeprecationWarning, stacklevel=2)
        return self.background_bytes


class Observer(Protocol):
    """Somebody who is told how a run goes."""

    def stepped(self) -> None:
        """A step is complete, and what was due after it."""
        ...

    def ended(self, failure: str | None) -> None:
        """The run is about to be taken off; `failure`: why, unless all went well."""
        ...


class Advice(Protocol):
    """Which strategy was chosen, out of which, and why: `laconic.advisor.advice.Advice`, which this package can't import."""

    @property
    def choice(self) -> Any:
        """The row of the strategy that was chosen: `.strategy`, `.share`, `.time`, `.risk`, ..."""
        ...

    @property
    def rows(self) -> Sequence[Any]:
        """One for each family of strategies, from mild to strong."""
        ...

    @property
    def reason(self) -> str:
        """In a sentence or two."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the choice, the reason, and a row for each strategy."""
        ...
