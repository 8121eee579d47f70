"""What a `laconic.Meter` reads of an elastic run: as of any other, and a row of every sync."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laconic.comm.inspection import Inspector
from laconic.comm.ledger import Ledger
from laconic.forecast import layer_bytes
from laconic.run.stats import Counts, Observer
from laconic.strategies.strategy import Strategy


@dataclass
class Metering:
    """Rows are kept for a meter alone: where there is none, nothing is."""

    inspector: Inspector
    ledger: Ledger
    about: Callable[[], Mapping[str, Any]]  # who this worker is, and among whom
    model: Any
    strategy: Strategy
    paused_seconds: float = 0.0
    quorum_seconds: float = 0.0  # in which this worker waited for the others to come together
    observers: list[Observer] = field(default_factory=list)
    _steps: int = 0
    _rows: list[dict[str, Any]] = field(default_factory=list)

    def observe(self, observer: Observer) -> Inspector:
        self.observers.append(observer)
        return self.inspector

    def stepped(self) -> None:
        """A step is complete, with the sync that was due after it."""
        self._steps += 1
        for observer in self.observers:
            observer.stepped()
        self.inspector.syncs.clear()

    def ended(self, failure: str | None) -> None:
        """The run is over."""
        observers, self.observers = self.observers, []
        for observer in observers:
            observer.ended(failure)

    def counts(self) -> Counts:
        waited = None if self.ledger.wait_seconds is None else self.ledger.wait_seconds + self.quorum_seconds
        return Counts(self._steps, dict(self.ledger.kinds), waited, self.ledger.work_seconds)

    def layer_bytes(self) -> dict[str, int]:
        return layer_bytes(self.strategy, self.model, max(2, int(self.about()["world"])))

    def start(self) -> dict[str, Any]:
        return dict(self.about())

    def events(self) -> list[dict[str, Any]]:
        rows, self._rows = self._rows, []
        return rows

    def synced(self, step: int, version: int, weights: Mapping[str, float], changes: Mapping[str, Sequence[str]]) -> None:
        """One that was committed; with the workers that have joined, were lost and left."""
        self._note({"step": step, "version": version, "weights": dict(weights), **changes, "dropped": None})

    def dropped(self, step: int, version: int, why: str) -> None:
        """One that came to nothing."""
        self._note({"step": step, "version": version, "weights": {}, "joined": [], "lost": [], "left": [], "dropped": why})

    def _note(self, row: Mapping[str, Any]) -> None:
        if self.observers:
            self._rows.append({"kind": "workers", "time": time.time(), **row})
