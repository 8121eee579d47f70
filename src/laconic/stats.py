"""What a run tells of itself."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Stats:
    """What one rank has done so far."""

    steps: int  # attempted optimizer steps
    rounds: int  # exchanges of all gradients
    syncs: int  # averagings of the parameters that were due
    collectives: int
    payload_bytes: int  # handed to collectives
    wire_bytes: int  # put on the cable for them, at the least
    wait_seconds: float | None  # time the training thread stood still for them; None: not known on this device
    skipped: int  # rounds of deltas that moved nothing, because they were not finite or out of line
    aside_bytes: int  # wire bytes of `consensus`, which is no part of training
    work_seconds: float  # time in which exchanges encoded and decoded, as far as the host knows
    wire_bytes_by_kind: dict[str, int]  # of collective: AllReduce, AllGather, AllToAll
    collectives_by_kind: dict[str, int]


class Observer(Protocol):
    """Somebody who is told how a run goes."""

    def stepped(self) -> None:
        """A step is complete, and what was due after it."""
        ...

    def ended(self, failure: str | None) -> None:
        """The run is about to be taken off; `failure`: why, unless all went well."""
        ...
