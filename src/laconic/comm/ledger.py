"""The ledger: what is counted while exchanges run."""

from dataclasses import dataclass, field

from laconic.comm.collectives import Collective, Traffic


@dataclass
class Ledger:
    """Counts every collective: totals alone, so that it takes the same room after a step and after a million."""

    kinds: dict[str, Traffic] = field(default_factory=dict)  # by kind of collective
    wait_seconds: float | None = 0.0  # time the thread stood still; None: unknown, because waiting doesn't block the host there
    work_seconds: float = 0.0  # in which exchanges encoded and decoded, on the host

    @property
    def total(self) -> Traffic:
        return sum(self.kinds.values(), Traffic())

    def launch(self, collective: Collective, world: int) -> None:
        """A collective leaves."""
        self.kinds[collective.kind] = self.kinds.get(collective.kind, Traffic()) + collective.traffic(world)

    def wait(self, seconds: float | None) -> None:
        """The thread stood still so long for one; None: nobody knows."""
        if seconds is None or self.wait_seconds is None:
            self.wait_seconds = None
        else:
            self.wait_seconds += seconds
