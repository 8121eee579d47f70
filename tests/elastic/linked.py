"""Workers on hosts of their own, whose cables can be cut: what a test starts in a network namespace, to be the switch."""

import ctypes
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pyroute2 import IPRoute

from laconic import elastic
from laconic.cost.link import Link
from laconic.lab.hosts import NETWORK, _bridge, _limit, _plug_in
from tests.elastic.crew import Crew, Record, assert_alike, syncs
from tests.elastic.training import HEARTBEAT_SECONDS, Job, train

CLONE_NEWNET = 0x40000000
CABLE = Link(1_000_000_000)
# Of the switch itself, where the lighthouse is. Else its number changes with its ports, and for a second nobody finds it.
OWN_ADDRESS, OWN_NUMBER = f"{NETWORK}.250", "02:00:00:00:00:01"
TIMEOUT_SECONDS, CUT_SECONDS = 2.0, 5.0  # the cut is longer than both limits of a worker
NAMES = ["a", "b", "c"]
_processes = multiprocessing.get_context("forkserver")


def on_own_host(name: str, job: Job, seed: int, host: int, apart: Any) -> None:
    """A worker with a network of its own, as soon as its cable is plugged in."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise PermissionError(os.strerror(ctypes.get_errno()))
    apart.set()
    _plug_in(CABLE, host, first=True)
    train(name, job, seed)


class Switch(Crew):
    """A crew whose workers have a cable each."""

    def __init__(self, job: Job, netlink: IPRoute, bridge: int) -> None:
        super().__init__(job)
        self._netlink, self._bridge = netlink, bridge

    def start(self, *names: str, **changed: Any) -> None:
        for name in names:
            host, apart = NAMES.index(name), _processes.Event()
            job = replace(self.job, bind=f"{NETWORK}.{host + 1}", **changed)
            process = _processes.Process(target=on_own_host, args=(name, job, host, host, apart), daemon=True)
            process.start()
            self._running[name] = [process]
            assert apart.wait(60), f"worker {name} has no network of its own"
            self._netlink.link("add", ifname=f"port{name}", kind="veth", peer={"ifname": "eth0", "net_ns_pid": process.pid})
            self._netlink.link("set", index=self._port(name), master=self._bridge, state="up")
            _limit(self._netlink, self._port(name), CABLE)

    def _port(self, name: str) -> int:
        port: int = self._netlink.link_lookup(ifname=f"port{name}")[0]
        return port

    @contextmanager
    def cut(self, names: Sequence[str], *, noticed: bool) -> Iterator[None]:
        """No packet passes. Where that is noticed, the workers' own interfaces are down, as if cables were pulled out."""
        for name in names:
            self._netlink.link("set", index=self._port(name), **({"state": "down"} if noticed else {"master": 0}))
        yield
        for name in names:
            self._netlink.link("set", index=self._port(name), master=self._bridge, state="up")


def together(records: list[Record], since: float, times: int) -> bool:
    """Whether all have made so many syncs with all, since then."""
    found = Counter(record["name"] for record in syncs(records) if record["time"] > since and record["workers"] == NAMES)
    return all(found[name] >= times for name in NAMES)


def lose_and_return(workers: Switch, names: Sequence[str], *, noticed: bool) -> None:
    """The others go on while the links of some are cut, and these take part again after that."""
    others = [each for each in NAMES if each not in names]
    with workers.cut(names, noticed=noticed):
        began = time.time()
        time.sleep(CUT_SECONDS)
        records = [record for record in syncs(workers.records()) if record["time"] > began + 0.2]
    alone = [record for record in records if record["workers"] == others]
    assert {record["name"] for record in alone} == set(others), f"the others did not go on in {CUT_SECONDS} s"
    for other in others:
        times = [began, *(record["time"] for record in alone if record["name"] == other)]
        longest = max(later - before for before, later in pairwise(times))
        assert longest < TIMEOUT_SECONDS + HEARTBEAT_SECONDS + 1, f"{other} waited for {longest:.1f} s"
    strange = {record["name"] for record in records} & set(names)
    assert not strange, f"{strange} made a sync, and nobody is there with whom"
    back = time.time()
    workers.until(lambda found: together(found, back, 4), 40)
    print(f"{names} were back after {time.time() - back:.1f} s", flush=True)


def main(folder: str, names: str, noticed: str) -> None:
    """Be the switch, and cut some cables for a time."""
    with IPRoute() as netlink:
        bridge = _bridge(netlink)
        netlink.link("set", index=bridge, address=OWN_NUMBER)
        netlink.addr("add", index=bridge, address=OWN_ADDRESS, prefixlen=24)
        with elastic.lighthouse(bind=f"{OWN_ADDRESS}:0", heartbeat_seconds=HEARTBEAT_SECONDS) as address:
            job = Job(address, "diloco(period=8)", 10**9, folder, timeout_seconds=TIMEOUT_SECONDS, quorum_seconds=4)
            workers = Switch(job, netlink, bridge)
            try:
                workers.start(*NAMES)
                workers.until(lambda found: together(found, 0.0, 1))
                lose_and_return(workers, names, noticed=noticed == "noticed")
                assert assert_alike(workers.records()) > 3
            finally:
                workers.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
