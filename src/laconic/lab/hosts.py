"""Hosts joined by limited links: network namespaces of this machine, from inside. `link.start` begins it.

Each host has a network namespace with one interface, eth0: the end of a cable whose other end is a port of a bridge. The
bridge is in a namespace of its own, so the machine's network is never touched and no address can clash. Both directions of a
cable are limited by a token bucket. What the workers of one host send to each other takes its loopback, which is not limited.
Nothing has a name outside: a namespace goes with its last process, and every process goes with its parent, however that ends.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.cost.link import Link
from laconic.lab.link import KILLED
from laconic.run.environment import expect_no_effect

BURST_BYTES = 256 * 1024  # smaller ones split the kernel's large packets, which costs cores; but what fits is not limited:
SHORTEST_BURST_BYTES, BURST_SECONDS = 64 * 1024, 0.025  # so on a slow link it is as much as passes in that time
NETWORK, PORT = "10.77.0", 29500
PLUG_IN_SECONDS = 60.0


def _go_with_parent() -> None:
    """End when the parent ends, however it does, and if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it survives exec
    if os.getppid() != int(os.environ["LACONIC_PARENT"]):
        os._exit(1)


def _hosts(plan: Mapping[str, Any]) -> int:
    """Be the switch: start the workers, plug their hosts in, and wait."""
    _go_with_parent()
    link, hosts = Link(plan["bits"], plan["delay"]), plan["hosts"]
    if link.bits_per_second is None:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return _wait([_worker(plan, rank, address, []) for rank in range(hosts * plan["per_host"])])
    address = {"MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "LACONIC_CABLE": "1"}
    from pyroute2 import IPRoute

    children = []
    with IPRoute() as netlink:
        bridge = _bridge(netlink)
        for host in range(hosts):
            first, *others = _workers(plan, host, address)
            children += [first, *others]
            netlink.link("add", ifname=f"port{host}", kind="veth", peer={"ifname": "eth0", "net_ns_pid": first.pid})
            port = netlink.link_lookup(ifname=f"port{host}")[0]
            netlink.link("set", index=port, master=bridge, state="up")
            _limit(netlink, port, link)
    return _wait(children)


def _workers(plan: Mapping[str, Any], host: int, address: Mapping[str, str]) -> "list[subprocess.Popen[bytes]]":
    """Those of one host: the first one in a namespace of its own, in which the others join it."""
    first, *others = range(host * plan["per_host"], (host + 1) * plan["per_host"])
    child = _worker(plan, first, address, ["unshare", "--net"])
    _until_apart(child.pid)
    # The first waits for its cable, so it is still there. The others join what is opened here, also if it ends before that.
    with Path(f"/proc/{child.pid}/ns/net").open("rb") as namespace:
        number = namespace.fileno()
        join = ["nsenter", f"--net=/proc/self/fd/{number}"]
        return [child, *(_worker(plan, rank, address, join, [number]) for rank in others)]


def _worker(
    plan: Mapping[str, Any], rank: int, address: Mapping[str, str], where: list[str], files: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    ranks = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % plan["per_host"]),
        "WORLD_SIZE": str(plan["hosts"] * plan["per_host"]),
        "LOCAL_WORLD_SIZE": str(plan["per_host"]),
        "GROUP_RANK": str(rank // plan["per_host"]),
    }
    environment = {**os.environ, **ranks, **address, "OMP_NUM_THREADS": "1", "LACONIC_PARENT": str(os.getpid())}
    inner = [sys.executable, "-m", "laconic.lab.hosts", "worker", json.dumps(plan)]
    return subprocess.Popen([*where, *inner], env=environment, pass_fds=files)


def _become(plan: Mapping[str, Any]) -> None:
    """Be a worker: have the host's end of the cable, then become the command."""
    _go_with_parent()
    if os.environ.get("LACONIC_CABLE"):
        _plug_in(Link(plan["bits"], plan["delay"]), int(os.environ["GROUP_RANK"]), first=os.environ["LOCAL_RANK"] == "0")
    os.execvp(plan["command"][0], plan["command"])


def _plug_in(link: Link, host: int, *, first: bool) -> None:
    """The first worker of a host brings its end of the cable up; the others wait until it is."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        wanted = {"ifname": "eth0"} if first else {"ifname": "eth0", "state": "up"}
        deadline = time.monotonic() + PLUG_IN_SECONDS
        while not (found := netlink.link_lookup(**wanted)):
            if time.monotonic() > deadline:
                raise TimeoutError("no cable was plugged in")
            time.sleep(0.02)
        if first:
            netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
            netlink.addr("add", index=found[0], address=f"{NETWORK}.{host + 1}", prefixlen=24)
            _limit(netlink, found[0], link)
            netlink.link("set", index=found[0], state="up")  # the last: for this the others wait


def _bridge(netlink: Any) -> int:
    netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
    netlink.link("add", ifname="switch", kind="bridge")
    bridge: int = netlink.link_lookup(ifname="switch")[0]
    netlink.link("set", index=bridge, state="up")
    return bridge


def burst_bytes(bits_per_second: int) -> int:
    """What may pass at once before the limit is felt.

    >>> burst_bytes(10_000_000), burst_bytes(100_000_000)
    (65536, 262144)
    """
    return max(SHORTEST_BURST_BYTES, min(BURST_BYTES, int(bits_per_second / 8 * BURST_SECONDS)))


def _limit(netlink: Any, index: int, link: Link) -> None:
    """A token bucket on what leaves by an interface; half of the delay before it, where there is one."""
    parent = {}
    if link.delay_seconds:
        netlink.tc("add", "netem", index, 0x10000, delay=round(link.delay_seconds / 2 * 1e6), limit=100000)
        parent = {"parent": 0x10001}
    handle = 0x20000 if parent else 0x10000
    netlink.tc(
        "add",
        "tbf",
        index,
        handle,
        rate=f"{link.bits_per_second}bit",
        burst=burst_bytes(link.bits_per_second or 0),
        latency="200ms",
        **parent,
    )


def _try(link: Link) -> None:
    """Build one cable and limit it; whatever is missing raises."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as netlink:
        _bridge(netlink)
        netlink.link("add", ifname="port0", kind="veth", peer={"ifname": "end0"})
        port = netlink.link_lookup(ifname="port0")[0]
        try:
            _limit(netlink, port, link)
        except NetlinkError as error:
            what = "delays (netem)" if link.delay_seconds else "token buckets (tbf)"
            raise SystemExit(f"this kernel has no {what}: {error}") from error


def _until_apart(pid: int) -> None:
    """Wait until a process has left this network namespace."""
    mine = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == mine:
        time.sleep(0.005)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(children: "Sequence[subprocess.Popen[bytes]]") -> int:
    """0 when all have ended well; when one fails, the others are ended, too."""
    going = list(children)
    try:
        while going:
            for child in list(going):
                code = child.poll()
                if code is not None:
                    going.remove(child)
                    if code:
                        time.sleep(1)  # the others may have something to say
                        _name_killed(children)
                        return code if code > 0 else 128 - code
            time.sleep(0.05)
        return 0
    finally:
        for child in children:
            child.kill()


def _name_killed(children: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Those that a signal ended could not say so themselves."""
    for rank, child in enumerate(children):
        if (code := child.poll()) is not None and code < 0:
            os.write(sys.stdout.fileno(), f"\nworker {rank} {KILLED} {signal.Signals(-code).name}\n".encode())


def main(arguments: Sequence[str]) -> None:
    """What the processes that are started here become."""
    expect_no_effect()  # of LACONIC_STRATEGY, which is for the script that a worker becomes
    match arguments:
        case ("hosts", plan):
            sys.exit(_hosts(json.loads(plan)))
        case ("worker", plan):
            _become(json.loads(plan))
        case ("try", link):
            _try(Link(*json.loads(link)))


if __name__ == "__main__":
    main(sys.argv[1:])
