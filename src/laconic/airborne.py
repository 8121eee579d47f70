"""Exchanges that are in the air while training goes on."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laconic.agreement import Roll
from laconic.bucket import Bucket, unflatten
from laconic.wire import Flight, Reduced


@dataclass
class Cargo:
    """One bucket of it."""

    bucket: Bucket
    flight: Flight[Reduced]
    delta: Tensor | None = None  # as it left, where training goes on meanwhile
    rounds: int = 1  # collectives that are expected of it

    def more(self) -> bool:
        """Whether another collective is known to follow the one in the air."""
        return not self.flight.over and self.flight.launched < self.rounds


@dataclass
class Airborne:
    """One fragment's exchange, launched and not yet landed."""

    fragment: int
    launched: int  # at which step
    present: Flight[Roll]
    cargo: list[Cargo]

    @property
    def flights(self) -> list[Flight[Any]]:
        """All of it, in the order in which it was launched."""
        return [self.present, *(cargo.flight for cargo in self.cargo)]

    def send_on(self, step: int, delay: int) -> None:
        """Launch the rounds that are due by now."""
        for cargo in self.cargo:
            while cargo.more() and step >= self.launched + cargo.flight.launched * delay // cargo.rounds:
                cargo.flight.step()

    def state(self) -> dict[str, Any]:
        """What it takes to send it again: plain data."""
        deltas = {
            name: view
            for cargo in self.cargo
            if cargo.delta is not None
            for name, view in zip(cargo.bucket.names, unflatten(cargo.delta, cargo.bucket.views), strict=True)
        }
        return {"fragment": self.fragment, "launched": self.launched, "deltas": deltas}
