"""The process groups of a run, built once, when it is attached."""

import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from laconic._torch.process_groups import exists, named_group
from laconic.comm.exchange import complete
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.comm.scopes import AUTO, BACKGROUND, HEARTBEATS, OUTSTANDING, Scope
from laconic.ranks.agreement import gather_texts
from laconic.ranks.islands import Ranks


def _nothing() -> None:
    """Nothing to do about a collective that takes long."""


class Groups:
    """A group for each scope that a strategy communicates with. All ranks that train the model build theirs together.

    `world` are the replicas: the ranks that average with this one. `everyone` are all ranks of all islands, and `island` those
    that hold one replica together with this rank; None, where each rank holds a whole one.
    """

    def __init__(
        self,
        ranks: Ranks,
        identity: str,
        scopes: Iterable[Scope],
        mesh: DeviceMesh | None,
        device: torch.device,
        check_peers: Callable[[], None] = _nothing,
        check_peers_in_background: Callable[[], None] = _nothing,
    ) -> None:
        self.world = TorchGroup(ranks.replicas, check_peers, ranks.places)
        self.everyone = TorchGroup(ranks.everyone, check_peers, ranks.places) if ranks.sharded else self.world
        self._identity, self._mesh, self._device = identity, mesh, device
        self._check_peers, self._check_peers_in_background = check_peers, check_peers_in_background
        self._own: list[dist.ProcessGroup] = []
        self._idle: set[Scope] = set()  # scopes in which no rank has a partner
        self._by_scope: dict[Scope, TorchGroup] = {"world": self.world}
        self.island = self._new(ranks.mates) if ranks.shards > 1 else None
        self.add(scopes)

    def __getitem__(self, scope: Scope) -> TorchGroup:
        return self._by_scope[scope]

    def at(self, scope: Scope | None) -> TorchGroup | None:
        """With whom to communicate, or None where that would be nobody."""
        # Alike on all ranks: a rank that is alone on its node communicates with itself where others have partners.
        return None if scope is None or scope in self._idle else self._by_scope[scope]

    def add(self, scopes: Iterable[Scope]) -> None:
        """Build the groups that are not there yet; in one order on all ranks."""
        for scope in sorted(set(scopes) - set(self._by_scope), key=str):
            self._by_scope[scope] = self._build(scope)

    def close(self) -> None:
        """Give back what was built here."""
        for process_group in self._own:
            if exists(process_group):
                dist.destroy_process_group(process_group)
        self._own = []
        self._by_scope = {"world": self.world}

    def _build(self, scope: Scope) -> TorchGroup:
        members = self.world.members
        if scope == OUTSTANDING:
            return self._new(members)
        if scope == HEARTBEATS:
            return self[OUTSTANDING] if self.everyone is self.world else self._new(self.everyone.members)
        if scope == BACKGROUND:
            group = self._new(self.everyone.members, "gloo").process_group
            return TorchGroup(group, self._check_peers_in_background, self.world.places)
        if isinstance(scope, int):
            if scope == 1:
                self._idle.add(scope)
            start = self.world.rank // scope * scope
            return self._sub(members[start : start + scope])
        if self._mesh is not None and scope in (self._mesh.mesh_dim_names or ()):
            return TorchGroup(self._mesh.get_group(scope), self._check_peers, self.world.places)
        assert scope in ("node", AUTO), f"{scope!r} has been checked"
        hosts = complete(gather_texts(_host(), self._device), self.world, Ledger())
        mine = hosts[self.world.rank]
        if len(set(hosts)) == len(hosts) or (scope == AUTO and len(set(hosts)) == 1):
            self._idle.add(scope)
        return self._sub([member for member, host in zip(members, hosts, strict=True) if host == mine])

    def _sub(self, ranks: list[int]) -> TorchGroup:
        return self.world if ranks == self.world.members else self._new(ranks)

    def _new(self, ranks: list[int], backend: str | None = None) -> TorchGroup:
        """Named after an id that the ranks agreed on, and after how many this run has built: a name never comes twice."""
        name = f"laconic/{self._identity}/{len(self._own)}/{'_'.join(map(str, ranks))}"
        process_group = named_group(name, ranks, self.everyone.process_group, self._device, backend)
        self._own.append(process_group)
        return TorchGroup(process_group, self._check_peers, self.world.places)


def check_scopes(scopes: Iterable[Scope], world: int, mesh: DeviceMesh | None, *, sharded: bool = False) -> None:
    """Refuse a scope that doesn't fit the ranks there are; where replicas are sharded, `world` islands."""
    names = tuple(mesh.mesh_dim_names or ()) if mesh is not None and not sharded else ()
    for scope in scopes:
        if isinstance(scope, int):
            if world % scope:
                raise ValueError(f"{world} {'islands' if sharded else 'ranks'} can't be divided into groups of {scope}")
        elif sharded and scope not in ("world", "node", AUTO, OUTSTANDING, HEARTBEATS):
            raise ValueError(
                f"subgroup {scope!r} can't be used with a sharded model: islands are grouped by 'node', or by a number of them"
            )
        elif scope not in ("world", "node", AUTO, OUTSTANDING, HEARTBEATS, *names):
            known = ", ".join(names) or "none, as attach was given no mesh="
            raise ValueError(
                f"subgroup {scope!r} is neither 'node' nor 'none' nor a dimension of the mesh; its dimensions: {known}"
            )


def _host() -> str:
    """What ranks on one host have in common. torchrun's word counts: one agent, one node."""
    if "GROUP_RANK" in os.environ:
        return f"agent {os.environ['GROUP_RANK']}"
    if "LOCAL_WORLD_SIZE" in os.environ:
        return f"node {dist.get_rank() // int(os.environ['LOCAL_WORLD_SIZE'])}"
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
