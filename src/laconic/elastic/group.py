"""The workers that average with this one, as a group: who they are may change between two syncs."""

import torch
import torch.distributed as dist

from laconic.comm.group import CommunicationError, TorchGroup


class ElasticGroup(TorchGroup):
    """A group over a process group that torchft builds anew whenever workers have come or gone.

    Rank, size and names are read at every exchange.
    """

    def __init__(self) -> None:
        self._now: dist.ProcessGroup | None = None
        self._names: list[str] = []
        self.device = torch.device("cpu")  # where messages live
        super().__init__(None)  # type: ignore[arg-type]  # it is not there yet

    @property
    def process_group(self) -> dist.ProcessGroup:
        """That of the last quorum."""
        if self._now is None:
            raise CommunicationError("the workers have lost each other; the next sync asks who is there")
        return self._now

    @process_group.setter
    def process_group(self, process_group: dist.ProcessGroup | None) -> None:
        self._now = process_group

    def meet(self, process_group: dist.ProcessGroup | None, names: list[str]) -> None:
        """From now on these."""
        self._now, self._names = process_group, names

    @property
    def members(self) -> list[int]:
        return list(range(len(self._names)))

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def who(self) -> str:
        return f"{len(self._names)} workers"

    @property
    def there(self) -> bool:
        """Whether anybody has met."""
        return self._now is not None


class ElasticGroups:
    """What averaging between steps asks for its groups by: here every scope is the same one."""

    island: TorchGroup | None = None

    def __init__(self, workers: ElasticGroup) -> None:
        self.world: TorchGroup = workers
        self.everyone: TorchGroup = workers

    def __getitem__(self, scope: object) -> TorchGroup:
        return self.world

    def at(self, scope: object) -> TorchGroup | None:
        """With whom to communicate: with all, or not now."""
        return None if scope is None else self.world
