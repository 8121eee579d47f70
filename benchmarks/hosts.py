"""Hosts of one machine: processes in network namespaces of their own, joined by a bridge through limited links."""

import os
import subprocess
import sys
import time
from pathlib import Path

BURST_BYTES = 256 * 1024  # smaller ones split the kernel's large packets, which costs cores
NETWORK = "10.77.0"


def run_on_hosts(module: str, hosts: int, rate_mbit: int, *args: str) -> None:
    """Run `python -m module --host ...` on so many hosts, each behind a link of `rate_mbit` both ways.

    All of it lives in a user and network namespace of its own, which goes with its last process.
    """
    inner = [sys.executable, "-m", "benchmarks.hosts", module, str(hosts), str(rate_mbit), *args]
    subprocess.run(["unshare", "--user", "--map-root-user", "--net", *inner], check=True)


def _switch(module: str, hosts: int, rate_mbit: int, args: list[str]) -> None:
    """Inside the namespace: a bridge, and a process behind each of its ports."""
    from pyroute2 import IPRoute

    children: list[subprocess.Popen[bytes]] = []
    try:
        with IPRoute() as netlink:
            netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
            netlink.link("add", ifname="switch", kind="bridge")
            bridge = netlink.link_lookup(ifname="switch")[0]
            netlink.link("set", index=bridge, state="up")
            for host in range(hosts):
                env = {**os.environ, "RANK": str(host), "WORLD_SIZE": str(hosts), "OMP_NUM_THREADS": "1"}
                env |= {"MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
                command = ["unshare", "--net", sys.executable, "-m", module, "--host", str(rate_mbit), *args]
                child = subprocess.Popen(command, env=env)
                children.append(child)
                _until_apart(child.pid)
                netlink.link("add", ifname=f"port{host}", kind="veth", peer={"ifname": "eth0", "net_ns_pid": child.pid})
                port = netlink.link_lookup(ifname=f"port{host}")[0]
                netlink.link("set", index=port, master=bridge, state="up")
                _limit(netlink, port, rate_mbit)
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"hosts ended with {codes}")
    finally:
        for child in children:
            child.kill()


def plug_in(rate_mbit: int) -> None:
    """On a host: wait for the cable, take an address, limit what leaves."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        deadline = time.monotonic() + 30
        while not (found := netlink.link_lookup(ifname="eth0")):
            if time.monotonic() > deadline:
                raise TimeoutError("no cable was plugged in")
            time.sleep(0.02)
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        netlink.addr("add", index=found[0], address=f"{NETWORK}.{int(os.environ['RANK']) + 1}", prefixlen=24)
        netlink.link("set", index=found[0], state="up")
        _limit(netlink, found[0], rate_mbit)


def _limit(netlink: "object", index: int, rate_mbit: int) -> None:
    netlink.tc("add", "tbf", index, 0x10000, rate=f"{rate_mbit}mbit", burst=BURST_BYTES, latency="200ms")  # type: ignore[attr-defined]


def _until_apart(pid: int) -> None:
    """Wait until a process has left this network namespace."""
    mine = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == mine:
        time.sleep(0.005)


if __name__ == "__main__":
    _switch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
