"""What all parts of a probe share: the group, the clock that all ranks go by, and the hosts they are on."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic._torch.process_groups import control_device
from laconic.comm.collectives import AllGather, Collective
from laconic.comm.exchange import Rounds, complete
from laconic.comm.group import CommunicationError, Handle, TorchGroup, is_lost
from laconic.comm.ledger import Ledger
from laconic.ranks.agreement import gather_texts


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    host: str  # its name
    machine: str  # whose processors it has
    network: str  # whose interfaces it has: a network namespace of that machine
    cores: int


class Session:
    """One probe on one rank. Everything in it happens on all ranks together, and in the same order."""

    def __init__(
        self, group: TorchGroup, device: torch.device, seconds: float, progress: Callable[[float], None] | None = None
    ) -> None:
        self.group, self.device, self.seconds = group, device, seconds
        self.sent_bytes = 0
        self._control, self._progress, self._told = control_device(group.process_group), progress, 0.0
        self._began = time.perf_counter()
        self.now = 0.0  # the first rank's clock when the ranks last met: decisions by it are the same on all ranks
        texts = complete(gather_texts("\n".join(_place()), self._control), group, Ledger())
        self.places = [
            Place(host, machine, network, int(cores)) for host, machine, network, cores in map(str.splitlines, texts)
        ]

    @property
    def nodes(self) -> list[int]:
        """By rank: which host it is on; ranks of a machine in different network namespaces are on different hosts."""
        known = list(dict.fromkeys((place.machine, place.network) for place in self.places))
        return [known.index((place.machine, place.network)) for place in self.places]

    def meet(self, *values: float) -> list[list[float]]:
        """Every rank's values, by rank; sets the clock that all ranks go by."""
        mine = [time.perf_counter() - self._began, *values]
        rows = complete(_gather(mine, self._control), self.group, Ledger())
        self.now = rows[0][0]
        if self._progress is not None:
            self._told = max(self._told, min(1.0, self.now / self.seconds))
            self._progress(self._told)
        return [row[1:] for row in rows]

    def finish(self) -> None:
        """Whatever time is left, nothing more is done."""
        if self._progress is not None:
            self._progress(1.0)

    def launch(self, collective: Collective, group: TorchGroup) -> Handle:
        """One of a group of ranks; what it sends is counted."""
        self.sent_bytes += collective.traffic(group.world).wire_bytes
        return group.launch(collective)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """A peer that is gone is said to be gone, and not in the words of a backend alone."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise CommunicationError(f"{what} among {self.group.who} failed while probing: {error}") from error

    def busy(self, shares: Sequence[float]) -> float:
        """Out of each rank's share of a core: the largest of a rank, or of all ranks of a machine of its cores."""
        machines: dict[str, float] = {}
        for place, share in zip(self.places, shares, strict=True):
            machines[place.machine] = machines.get(place.machine, 0.0) + share / place.cores
        return max(*shares, *machines.values())


def _gather(values: Sequence[float], device: torch.device) -> Rounds[list[list[float]]]:
    rows = yield AllGather(torch.tensor(values, dtype=torch.float64, device=device))
    found: list[list[float]] = rows.tolist()
    return found


def _place() -> tuple[str, str, str, str]:
    """As texts without line breaks, none of them empty."""
    name = platform.node() or "unknown"
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    machine = boot.read_text().strip() if boot.exists() else name
    network = str(namespace.readlink()) if namespace.is_symlink() else "unknown"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return name, machine, network, str(cores or 1)
