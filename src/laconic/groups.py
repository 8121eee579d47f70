"""The process groups of a run, built once, when it is attached."""

import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from laconic.agreement import gather_texts
from laconic.routes import AUTO, Scope
from laconic.wire import Ledger, TorchGroup, land

AIR = "all, in the air"
"""The scope of exchanges that stay in the air: all ranks, on a group that nobody else uses."""

ASIDE = "all, aside"
"""The scope of what has no part in training, such as writing checkpoints: all ranks, on a gloo group that nobody else uses."""


def _nothing() -> None:
    """Nothing to do about a collective that takes long."""


class Groups:
    """A group for each scope that a strategy talks with. All ranks of `process_group` build theirs together."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        identity: str,
        scopes: Iterable[Scope],
        mesh: DeviceMesh | None,
        device: torch.device,
        worry: Callable[[], None] = _nothing,
        worry_aside: Callable[[], None] = _nothing,
    ) -> None:
        self.world = TorchGroup(process_group, worry)
        self._identity, self._mesh, self._device = identity, mesh, device
        self._worry, self._worry_aside = worry, worry_aside
        self._own: list[dist.ProcessGroup] = []
        self._idle: set[Scope] = set()  # scopes in which no rank has a partner
        self._by_scope: dict[Scope, TorchGroup] = {"world": self.world}
        self.add(scopes)

    def __getitem__(self, scope: Scope) -> TorchGroup:
        return self._by_scope[scope]

    def at(self, scope: Scope | None) -> TorchGroup | None:
        """With whom to talk, or None where that would be nobody."""
        # Alike on all ranks: a rank that is alone on its node talks with itself where others have partners.
        return None if scope is None or scope in self._idle else self._by_scope[scope]

    def add(self, scopes: Iterable[Scope]) -> None:
        """Build the groups that are not there yet; in one order on all ranks."""
        for scope in sorted(set(scopes) - set(self._by_scope), key=str):
            self._by_scope[scope] = self._build(scope)

    def close(self) -> None:
        """Give back what was built here."""
        for process_group in self._own:
            if process_group in c10d._world.pg_map:  # else the user has destroyed all groups at once
                dist.destroy_process_group(process_group)
        self._own = []
        self._by_scope = {"world": self.world}

    def _build(self, scope: Scope) -> TorchGroup:
        members = self.world.members
        if scope == AIR:
            return self._new(members)
        if scope == ASIDE:
            return TorchGroup(self._new(members, "gloo").process_group, self._worry_aside)
        if isinstance(scope, int):
            if scope == 1:
                self._idle.add(scope)
            start = self.world.rank // scope * scope
            return self._sub(members[start : start + scope])
        if self._mesh is not None and scope in (self._mesh.mesh_dim_names or ()):
            return TorchGroup(self._mesh.get_group(scope), self._worry)
        assert scope in ("node", AUTO), f"{scope!r} has been checked"
        hosts = land(gather_texts(_host(), self._device), self.world, Ledger())
        mine = hosts[self.world.rank]
        if len(set(hosts)) == len(hosts) or (scope == AUTO and len(set(hosts)) == 1):
            self._idle.add(scope)
        return self._sub([member for member, host in zip(members, hosts, strict=True) if host == mine])

    def _sub(self, ranks: list[int]) -> TorchGroup:
        return self.world if ranks == self.world.members else self._new(ranks)

    def _new(self, ranks: list[int], backend: str | None = None) -> TorchGroup:
        """A process group that only its members build: other ranks of the job may be busy with another model.

        `dist.new_group` can't be used for that: with `use_local_synchronization` it names a group by its ranks and by how
        many groups this process has. That name comes again after a group has gone, with the old one's addresses behind it,
        and differs between ranks that are in different numbers of groups. So groups are named here.
        """
        world = self.world.process_group
        name = c10d.GroupName(f"laconic/{self._identity}/{len(self._own)}/{'_'.join(map(str, ranks))}")
        process_group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            backend or c10d._world.pg_map[world][0],
            world.get_group_store(),
            name,
            timeout=world._get_backend(self._device).options._timeout,
        )
        assert isinstance(process_group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[process_group] = {rank: place for place, rank in enumerate(ranks)}
        self._own.append(process_group)
        return TorchGroup(process_group, self._worry)


def check_scopes(scopes: Iterable[Scope], world: int, mesh: DeviceMesh | None) -> None:
    """Refuse a scope that doesn't fit the ranks there are."""
    names = tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()
    for scope in scopes:
        if isinstance(scope, int):
            if world % scope:
                raise ValueError(f"{world} ranks can't be divided into groups of {scope}")
        elif scope not in ("world", "node", AUTO, AIR, *names):
            known = ", ".join(names) or "none, as attach was given no mesh="
            raise ValueError(
                f"subgroup {scope!r} is neither 'node' nor 'none' nor a dimension of the mesh; its dimensions: {known}"
            )


def control_device(process_group: dist.ProcessGroup) -> torch.device:
    """Where small messages of our own live: on the CPU, if the group talks there."""
    devices = process_group._device_types
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]


def _host() -> str:
    """What ranks on one host have in common. torchrun's word counts: one agent, one node."""
    if "GROUP_RANK" in os.environ:
        return f"agent {os.environ['GROUP_RANK']}"
    if "LOCAL_WORLD_SIZE" in os.environ:
        return f"node {dist.get_rank() // int(os.environ['LOCAL_WORLD_SIZE'])}"
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
