"""Islands: which ranks hold one replica of a model together, and which hold the same shard of it in every island."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from laconic._torch.process_groups import control_device, default_group, exists, named_group
from laconic.comm.group import TorchGroup
from laconic.ranks.agreement import agree


@dataclass(frozen=True)
class Ranks:
    """All ranks that train a model together, and those that this one averages with.

    Where each rank holds a whole replica, these are the same, and every rank is an island of its own. Where replicas are
    sharded, the ranks of an island hold one replica together, and a rank averages with those that hold the same shard.
    """

    everyone: dist.ProcessGroup  # in the order of islands, then of shards
    replicas: dist.ProcessGroup  # this rank's shard, in the order of islands
    members: Sequence[int] = ()  # everyone's global ranks, where replicas are sharded
    shards: int = 1  # in an island
    places: dict[int, str] = field(default_factory=dict)  # "island 1, shard 0", by global rank; none where there is one shard

    @property
    def sharded(self) -> bool:
        """Whether a replica is held by several ranks, or by one that holds it as a shard."""
        return bool(self.members)

    @property
    def islands(self) -> int:
        """How many replicas there are."""
        return self.replicas.size()

    @property
    def island(self) -> int:
        """This rank's, by number."""
        return self.members.index(dist.get_rank()) // self.shards if self.sharded else self.replicas.rank()

    @property
    def shard(self) -> int:
        """Which part of its island's replica this rank holds, by number."""
        return self.members.index(dist.get_rank()) % self.shards if self.sharded else 0

    @property
    def mates(self) -> list[int]:
        """The global ranks of this rank's island."""
        start = self.island * self.shards
        return list(self.members[start : start + self.shards]) if self.sharded else [dist.get_rank()]


def whole(process_group: dist.ProcessGroup) -> Ranks:
    """Each rank of the group holds a whole replica."""
    return Ranks(process_group, process_group)


def of_mesh(mesh: DeviceMesh, replicate: str) -> Ranks:
    """The islands of a mesh: one for each place along its dimension `replicate`. All ranks of the mesh together.

    If these are all ranks of the job, they first compare what they were given: a group that not all build would never be there.
    """
    names = mesh.mesh_dim_names
    assert names is not None, "it was checked to have names"
    rows = mesh.mesh.movedim(names.index(replicate), 0).flatten(1)
    members: list[int] = rows.flatten().tolist()
    shards = rows.shape[1]
    if mesh.size() == default_group().size():
        group = default_group()
        agree([f"islands of the ranks {rows.tolist()}"], None, TorchGroup(group), control_device(group))
    places = {rank: f"island {place // shards}, shard {place % shards}" for place, rank in enumerate(members)}
    return Ranks(_everyone(members), mesh.get_group(replicate), members, shards, places)


_built: dict[tuple[int, ...], dist.ProcessGroup] = {}
_times: Counter[tuple[int, ...]] = Counter()


def _everyone(members: Sequence[int]) -> dist.ProcessGroup:
    """A group of all these, in this order: the default one, or one that is built once and kept."""
    default, key = default_group(), tuple(members)
    if dist.get_process_group_ranks(default) == list(members):
        return default
    if key not in _built or not exists(_built[key]):
        # Its members alone build it. They have all built as many of it before, so its name is new, and the same on all.
        _times[key] += 1
        name = f"laconic/everyone/{_times[key]}/{'_'.join(map(str, members))}"
        _built[key] = named_group(name, members, default, control_device(default))
    return _built[key]
