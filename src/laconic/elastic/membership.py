"""Who is there: torchft's quorum, and the process group that it rebuilds.

torchft (0.2) has a lighthouse, which keeps a list of workers that send heartbeats; a manager server in each worker, which
sends them; and process groups that can be configured anew. This is the only file that knows it. Its Python `Manager` is not
used: it binds its server to all interfaces, averages by all-reduce alone, and sends a healthy worker's state as a pickle. What
is used is the interface below it, `torchft.coordination`, and `torchft.process_group`.
"""

import contextlib
import json
import math
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from laconic._torch.process_groups import gloo_group
from laconic.comm.group import CommunicationError
from laconic.elastic.group import ElasticGroup
from laconic.elastic.island import Island

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variable: http://host:port
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 10
BACKENDS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}  # torchft's


class MembershipError(RuntimeError):
    """This worker can't take part: it trains something else than the others, or its own ranks have lost each other.

    Its text says what differs from the others, such as the strategy or a parameter's shape. The others train on without it.
    """


def torchft() -> tuple[ModuleType, ModuleType]:
    """Its two modules that are used here."""
    os.environ.setdefault("RUST_LOG", "warn")  # it prints some lines for every quorum
    try:
        import torchft.coordination
        import torchft.process_group
    except ImportError as error:
        raise ImportError(f"laconic.elastic needs torchft ({error}); in laconic's folder: pip install '.[elastic]'") from error
    return torchft.coordination, torchft.process_group


@contextmanager
def lighthouse(
    *, bind: str = f"{LOOPBACK}:0", min_replicas: int = 1, deadline_seconds: float = 60.0, heartbeat_seconds: float = 5.0
) -> Iterator[str]:
    """torchft's lighthouse in this process, for as long as the block lasts; the block gets its address.

    It keeps the list of workers and says who takes part in a sync. A run needs one, in a process that outlives all workers:
    `torchft_lighthouse` and `laconic run --elastic` start one, too.

    Bytes: a heartbeat every 0.1 seconds from each worker, and a request for each sync.

    Not: a dead lighthouse is not replaced. Workers train on and drop their syncs, until one is back at the same address. What
    it says and hears is not encrypted.

    Arguments:
      `bind`: the address of this machine at which it listens, with a port; 0: any that is free. Default "127.0.0.1:0".
      `min_replicas`: with fewer workers, none of their syncs begins. Default 1.
      `deadline_seconds`: how long a sync waits for a worker that still sends heartbeats; it goes on without it then.
        Default 60.0.
      `heartbeat_seconds`: a worker that has sent no heartbeat for so long counts as dead. Default 5.0.

    >>> import laconic.elastic
    >>> with laconic.elastic.lighthouse() as address:
    ...     manager = laconic.elastic.Membership(lighthouse=address)
    >>> address[:17]
    'http://127.0.0.1:'
    """
    if min_replicas < 1 or not 0 < deadline_seconds < math.inf or not 0 < heartbeat_seconds < math.inf:
        raise ValueError(
            "min_replicas must be at least 1, deadline_seconds and heartbeat_seconds above 0; got "
            f"{min_replicas}, {deadline_seconds} and {heartbeat_seconds}"
        )
    if not bind.rpartition(":")[2].isdecimal():
        raise ValueError(f"bind must be an address and a port, such as '127.0.0.1:0' (any free port), got {bind!r}")
    coordination, _ = torchft()
    server = coordination.LighthouseServer(
        bind=bind,
        min_replicas=min_replicas,
        join_timeout_ms=_milliseconds(deadline_seconds),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=_milliseconds(heartbeat_seconds),
    )
    host = bind.rpartition(":")[0]
    try:
        # torchft answers with the host's name, which resolves to no loopback on every host.
        yield f"http://{host}:{urlsplit(server.address()).port}"
    finally:
        server.shutdown()


@dataclass(frozen=True)
class Quorum:
    """Who takes part in a sync, as torchft says."""

    changed: bool  # the process group is another one than before
    rank: int
    world: int
    names: tuple[str, ...]  # of the workers, by rank


class Membership:
    """This worker's place among the others: a heartbeat in the background, and a quorum whenever one is asked for.

    Make one and give it to `laconic.elastic.attach`, which calls its methods. Where a worker is an island of several ranks,
    each of them makes one, and the first one's name and address count.

    Not: what travels is not encrypted, and nobody proves who they are. Use a private network.

    Arguments:
      `lighthouse`: its address, "http://host:port". Default None: $TORCHFT_LIGHTHOUSE.
      `name`: what the others call this worker, without ":" and "/". Default None: host and process.
      `bind`: the address of this machine by which the others reach it. The worker's server, the store by which process groups
        are built, and gloo listen there; NCCL has settings of its own. Default "127.0.0.1": this machine alone.
      `timeout_seconds`: how long one collective may take, and one message of a peer's state. Default 60.0.
      `quorum_seconds`: how long this worker waits for the others to come to a sync. Default 600.0.

    It raises a ValueError without a lighthouse's address, and for what can't be; and an ImportError without torchft.

    >>> import laconic.elastic
    >>> laconic.elastic.Membership(
    ...     lighthouse="http://127.0.0.1:29510", name="first"
    ... ).quorum_seconds
    600.0
    """

    def __init__(
        self,
        *,
        lighthouse: str | None = None,
        name: str | None = None,
        bind: str = LOOPBACK,
        timeout_seconds: float = 60.0,
        quorum_seconds: float = 600.0,
    ) -> None:
        address = lighthouse or os.environ.get(LIGHTHOUSE)
        if not address:
            raise ValueError(
                f"no lighthouse is given: pass lighthouse='http://host:port', set {LIGHTHOUSE}, or start one with "
                "`laconic run --elastic` or `torchft_lighthouse`"
            )
        if not 0 < timeout_seconds <= quorum_seconds < math.inf:
            raise ValueError(
                "timeout_seconds, for one collective, must be above 0 and at most quorum_seconds, for all to come together; "
                f"got {timeout_seconds} and {quorum_seconds}"
            )
        self._coordination, self._groups = torchft()
        self.name: str = name or f"{socket.gethostname()}-{os.getpid()}"
        if ":" in self.name or "/" in self.name:
            raise ValueError(f"a worker's name may have no ':' and no '/', got {self.name!r}")
        self.address, self.bind, self.group = address, bind, ElasticGroup()
        self._timeout, self._quorum_timeout = timedelta(seconds=timeout_seconds), timedelta(seconds=quorum_seconds)
        self.names: tuple[str, ...] = ()  # of the last quorum
        self.ids: tuple[str, ...] = ()  # the same; one that is started again has another
        self._failures = 0  # syncs in a row that came to nothing
        self._met: tuple[object, ...] = ()  # what the process group was built by
        self._rank = 0  # in the island
        self._process_group: Any = None
        self._server: Any = None  # the first rank of an island has it
        self._client: Any = None

    def open(self, island: Island, device: torch.device) -> None:
        """Begin to send heartbeats, and let the other ranks of the island know where the server is.

        Arguments:
          `island`: the ranks of this worker.
          `device`: where the model is.
        """
        if self._client is not None:
            raise ValueError(f"the Membership of worker {self.name} has been used by a run already; make one for each attach")
        self._rank = island.rank
        backend = self._backend(device)
        kind = getattr(self._groups, BACKENDS[backend])
        self._process_group = (_at(self.bind, kind) if backend == "gloo" else kind)(timeout=self._timeout)
        self.group.device = torch.device("cpu") if backend == "gloo" else device
        where = self._serve(island.size) if island.rank == 0 else ""
        self.name, where = json.loads(island.first(json.dumps([self.name, where])))
        self._client = self._coordination.ManagerClient(where, connect_timeout=self._timeout)

    def _backend(self, device: torch.device) -> str:
        """By what tensors of this device travel."""
        backend = dist.get_default_backend_for_device(device)
        if backend not in BACKENDS:
            raise ValueError(
                f"torchft has process groups for {', '.join(BACKENDS)}, and tensors on {device.type} travel by {backend}; "
                "move the model to a device that one of them serves"
            )
        return backend

    def _serve(self, ranks: int) -> str:
        """Start this worker's server; its address."""
        listener = listening(self.bind)
        port = listener.getsockname()[1]
        # torch would listen on all interfaces, unless it is given a socket that listens already.
        self._listening = dist.TCPStore(
            self.bind, port, is_master=True, wait_for_workers=False, timeout=self._timeout, master_listen_fd=listener.detach()
        )
        host = f"[{self.bind}]" if ":" in self.bind else self.bind
        try:
            self._server = self._coordination.ManagerServer(
                replica_id=f"{self.name}:{uuid.uuid4()}",
                lighthouse_addr=self.address,
                hostname=host,
                bind=f"{host}:0",
                store_addr=f"{host}:{port}",
                world_size=ranks,
                heartbeat_interval=timedelta(milliseconds=100),
                connect_timeout=timedelta(seconds=CONNECT_SECONDS),
                quorum_retries=0,
            )
        except (RuntimeError, TimeoutError) as error:
            raise ConnectionError(
                f"no lighthouse answers at {self.address} within {CONNECT_SECONDS} s ({error}); start one first, with "
                "`laconic run --elastic`, laconic.elastic.lighthouse() or torchft_lighthouse"
            ) from error
        address: str = self._server.address()
        return address

    def together(self, fine: bool) -> bool:
        """Whether all ranks of this island are fine; each of them asks, and waits for the others.

        Arguments:
          `fine`: whether this one is.
        """
        seconds = 3 * self._timeout.total_seconds() + self._quorum_timeout.total_seconds()
        try:
            answer = self._client.should_commit(self._rank, 0, fine, timeout=timedelta(seconds=seconds))
        except (RuntimeError, TimeoutError) as error:
            # The vote stays with the server, where it would count for the next one.
            raise MembershipError(
                f"another rank of worker {self.name} has not come to the vote within {seconds:.0f} s: {error}; end this "
                "worker, and start all of its ranks again"
            ) from error
        return bool(answer)

    def meet(self, version: int) -> Quorum:
        """Come together with the others, who have come as far as `version`; the process group is ready then.

        It waits until all who are alive have asked for it, too, or the lighthouse's deadline has passed.
        """
        try:
            found = self._client._quorum(
                group_rank=self._rank,
                step=version,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=self._quorum_timeout,
                commit_failures=self._failures,
                init_sync=True,
            )
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(f"no quorum with the others by the lighthouse {self.address}: {error}") from error
        names = tuple(each.partition(":")[0] for each in found.replica_ids)
        built_by = (found.quorum_id, found.store_address, tuple(found.replica_ids))
        changed = built_by != self._met or not self.group.there
        if changed:
            self._met = ()
            self._build(found, names)
            self._met = built_by
        self.names, self.ids = names, tuple(found.replica_ids)
        return Quorum(changed, found.replica_rank, found.replica_world_size, names)

    def _build(self, found: Any, names: tuple[str, ...]) -> None:
        self.group.meet(None, [])
        # A lighthouse that was started anew counts quorums from the start: with the version, no name comes twice.
        prefix = f"{found.store_address}/laconic/{found.quorum_id}/{found.max_step}/{self._rank}"
        try:
            self._process_group.configure(prefix, self.name, found.replica_rank, found.replica_world_size, found.quorum_id)
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(f"{len(names)} workers could not connect to each other: {error}") from error
        self.group.meet(self._process_group.parent, [f"worker {name}" for name in names])

    @property
    def quorum_seconds(self) -> float:
        """How long it waits for a quorum."""
        return self._quorum_timeout.total_seconds()

    def hurry(self, seconds: float) -> None:
        """Wait for a quorum no longer than `seconds`, from now on."""
        self._quorum_timeout = min(self._quorum_timeout, timedelta(seconds=seconds))

    def succeeded(self) -> None:
        """A sync has been committed."""
        self._failures = 0

    def failed(self) -> None:
        """One came to nothing: the next quorum builds another process group, for all."""
        self._failures += 1
        self.lose()

    def lose(self) -> None:
        """Close the connections, so that others who wait for this worker learn of it."""
        self._met = ()
        self.group.meet(None, [])
        if self._process_group is not None:
            self._process_group.abort(errored=False)

    def leave(self) -> None:
        """Send no more heartbeats."""
        with contextlib.suppress(CommunicationError):
            self.lose()
        if self._server is not None:
            self._server.shutdown()
            self._server = None


def listening(address: str) -> socket.socket:
    """A socket that listens at this address of this machine, at any port."""
    try:
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"bind must be an address of this machine, by which the other workers reach it, got {address!r}: {error}"
        ) from error


def _at(address: str, kind: type[Any]) -> type[Any]:
    """torchft's group for gloo, listening at this address alone; its own listens at what the host's name stands for."""

    class Bound(kind):  # type: ignore[misc]  # torchft's types are not read
        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
            return gloo_group(store, rank, world_size, self._timeout, address)

    return Bound


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
