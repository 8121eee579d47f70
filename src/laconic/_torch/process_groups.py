"""Process groups: the default one, groups under names of ours, and what a group knows of itself."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from laconic._torch.private_names import part


def default_group() -> dist.ProcessGroup:
    """That of all ranks of the job."""
    group = part(c10d, "_get_default_group")()
    assert isinstance(group, dist.ProcessGroup)
    return group


def is_outside(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank is no member of the group."""
    return bool(part(dist, "_rank_not_in_group")(group))


def exists(group: dist.ProcessGroup) -> bool:
    """Whether torch still has it: the user may have destroyed all groups at once."""
    return group in part(part(c10d, "_world"), "pg_map")


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Where its members met."""
    store = part(group, "get_group_store")()
    assert isinstance(store, dist.Store)
    return store


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small messages of our own live: on the CPU, if the group communicates there."""
    devices: list[torch.device] = part(group, "_device_types")
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]


def training_device(group: dist.ProcessGroup) -> torch.device:
    """Where large messages live: on this process's accelerator, if there is one and the group communicates there."""
    devices: list[torch.device] = part(group, "_device_types")
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind in devices:
            return torch.device(kind.type, torch.accelerator.current_device_index())
    return control_device(group)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of what carries messages of that device: a group may have one for each kind."""
    name: str = part(group, "_get_backend")(device).name()
    return name


def named_group(
    name: str, ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group that only its members build: other ranks of the job may be busy with another model.

    With the store, the timeout and, unless another is asked for, the backend of `like`. `dist.new_group` can't be used for
    that: with `use_local_synchronization` it names a group by its ranks and by how many groups this process has. That name
    comes again after a group has gone, with the old one's addresses behind it, and differs between ranks that are in different
    numbers of groups.
    """
    world = part(c10d, "_world")
    group, _ = part(c10d, "_new_process_group_helper")(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        backend or part(world, "pg_map")[like][0],
        store_of(like),
        part(c10d, "GroupName")(name),
        timeout=part(part(like, "_get_backend")(device).options, "_timeout"),
    )
    assert isinstance(group, dist.ProcessGroup)
    part(world, "pg_group_ranks")[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def gloo_group(store: dist.Store, rank: int, world: int, timeout: timedelta, address: str) -> dist.ProcessGroup:
    """A group on gloo that listens at `address` alone, and that no list of torch's knows.

    Left to itself, gloo looks the host's name up and listens at what it finds.
    """
    gloo = dist.ProcessGroupGloo
    options = part(gloo, "_Options")()
    options._devices = [part(gloo, "create_device")(hostname=address)]
    options._timeout = timeout
    backend = gloo(store, rank, world, options)
    part(backend, "_set_sequence_number_for_group")()
    group = dist.ProcessGroup(store, rank, world)
    part(group, "_set_default_backend")(dist.ProcessGroup.BackendType.GLOO)
    part(group, "_register_backend")(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
