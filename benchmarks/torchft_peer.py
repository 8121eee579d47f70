"""torchft's DiLoCo as its users write it: the manager of one replica group, and a model's fragments."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn


def make_manager(
    address: str,
    lighthouse: str,
    name: str,
    load: Callable[[Any], object],
    save: Callable[[], object],
    *,
    min_replicas: int,
    collective: timedelta,
    timeout: timedelta,
    quorum: timedelta,
    max_retries: int | None = None,
) -> tuple[Any, dist.TCPStore]:
    """A manager for a replica group of one rank, and its store, which must live as long.

    The arguments are those of torchft's own `train_diloco.py`. All replicas begin with the same weights, so `init_sync` is off,
    as torchft's docs say. State goes to who joins by torchft's default, its HTTP transport.
    """
    # torchft tells the others this name, and in a network namespace the machine's name means nothing.
    socket.gethostname = lambda: address
    os.environ.setdefault("RUST_LOG", "error")
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=collective),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=min_replicas,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=quorum,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=address,
        init_sync=False,
        max_retries=max_retries,
    )
    return manager, store


def pieces(model: nn.Module, count: int) -> list[nn.Module]:
    """The model's parameters in so many modules of about the same size: what torchft calls fragments."""
    parts, loads = [nn.ParameterList() for _ in range(count)], [0] * count
    for parameter in sorted(model.parameters(), key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        parts[least].append(parameter)
        loads[least] += parameter.numel()
    return list(parts)
