"""Workers on hosts of their own, joined by limited links: network namespaces of this machine.

Each worker has a network namespace with one interface, eth0: the end of a cable whose other end is a port of a bridge. The
bridge is in a namespace of its own, so the machine's network is never touched and no address can clash. Both directions of a
cable are limited by a token bucket. Nothing has a name outside: all of it goes with its last process, and every process
goes with its parent, however that ends.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BURST_BYTES = 256 * 1024  # smaller ones split the kernel's large packets, which costs cores; but what fits is not limited:
SHORTEST_BURST_BYTES, BURST_SECONDS = 64 * 1024, 0.025  # so on a slow link it is as much as passes in that time
KILLED = "was killed by"
NETWORK, PORT = "10.77.0", 29500
SLOWEST, FASTEST, LONGEST_MS = 10 * 10**3, 34 * 10**9, 10_000  # bits a second: tbf's 32 bits hold 2 kbit to 34.3 gbit
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Link:
    """What each worker's cable carries: bits a second each way, and how long each packet takes; None: no limit."""

    bits_per_second: int | None = None
    delay_seconds: float = 0.0

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "none"
        unit = next(name for name in reversed(UNITS) if self.bits_per_second % UNITS[name] == 0 or name == "kbit")
        delay = f":{self.delay_seconds * 1e3:g}ms" if self.delay_seconds else ""
        return f"{self.bits_per_second / UNITS[unit]:g}{unit}{delay}"


def parse(text: str) -> Link:
    """`10mbit`, `1gbit`, `100mbit:20ms`, `none`.

    >>> parse("100mbit:20ms")
    Link(bits_per_second=100000000, delay_seconds=0.02)
    """
    if text == "none":
        return Link()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)(?::(\d+(?:\.\d+)?)ms)?", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(
            f"a link is a rate with its unit, and a delay if you like: 100mbit, 1gbit, 100mbit:20ms, none; got {text!r}"
        )
    bits, delay = round(float(found[1]) * UNITS[found[2]]), float(found[3] or 0)
    if not SLOWEST <= bits <= FASTEST or delay > LONGEST_MS:
        rates = f"from {Link(SLOWEST)} to {Link(FASTEST)}"
        raise ValueError(f"a link has a rate {rates}, and a delay of up to {LONGEST_MS}ms; got {text!r}")
    return Link(bits, delay / 1e3)


def refusal(link: Link) -> str | None:
    """Why such a link can't be had here, in one line; None: it can. Tried for real, in a namespace that goes at once."""
    if sys.platform != "linux":
        return f"limited links need Linux's network namespaces, and this is {sys.platform}"
    if shutil.which("unshare") is None:
        return "limited links need the program unshare (package util-linux)"
    command = [
        *_apart(),
        sys.executable,
        "-m",
        "laconic.lab.link",
        "try",
        json.dumps([link.bits_per_second, link.delay_seconds]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    hint = " (are namespaces switched off? See sysctl user.max_net_namespaces)" if "No space left" in lines[-1] else ""
    return f"limited links can't be had here: {lines[-1]}{hint}"


def start(
    command: Sequence[str], hosts: int, link: Link, environment: Mapping[str, str], stdin: IO[bytes] | None = None
) -> "subprocess.Popen[str]":
    """Run a command on so many hosts, with torchrun's variables; ends when all have ended, or one has failed.

    Without a limit they are plain processes of this host. They share `stdin`, and its position.
    """
    plan = json.dumps({"command": list(command), "hosts": hosts, "bits": link.bits_per_second, "delay": link.delay_seconds})
    inner = [sys.executable, "-m", "laconic.lab.link", "hosts", plan]
    outer = inner if link.bits_per_second is None else [*_apart(), *inner]
    return subprocess.Popen(
        outer,
        env={**environment, "LACONIC_PARENT": str(os.getpid())},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def sent_bytes() -> int | None:
    """What the kernel has put on this worker's cable so far; None: it has no cable of its own."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0" and os.environ.get("LACONIC_CABLE"):
            return int(numbers.split()[8])
    return None


def _apart() -> list[str]:
    """How to start something in a network namespace of its own: as root, or as an ordinary user in a user namespace."""
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]


# Inside


def _go_with_parent() -> None:
    """End when the parent ends, however it does, and if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it survives exec
    if os.getppid() != int(os.environ["LACONIC_PARENT"]):
        os._exit(1)


def _hosts(plan: Mapping[str, Any]) -> int:
    """Be the switch: start the workers, plug them in, and wait."""
    _go_with_parent()
    link, hosts = Link(plan["bits"], plan["delay"]), plan["hosts"]
    if link.bits_per_second is None:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        children = [_worker(plan, host, address, []) for host in range(hosts)]
        return _wait(children)
    address = {"MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "LACONIC_CABLE": "1"}
    from pyroute2 import IPRoute

    children = []
    with IPRoute() as netlink:
        bridge = _bridge(netlink)
        for host in range(hosts):
            child = _worker(plan, host, address, ["unshare", "--net"])
            children.append(child)
            _until_apart(child.pid)
            netlink.link("add", ifname=f"port{host}", kind="veth", peer={"ifname": "eth0", "net_ns_pid": child.pid})
            port = netlink.link_lookup(ifname=f"port{host}")[0]
            netlink.link("set", index=port, master=bridge, state="up")
            _limit(netlink, port, link)
    return _wait(children)


def _worker(plan: Mapping[str, Any], host: int, address: Mapping[str, str], apart: list[str]) -> "subprocess.Popen[bytes]":
    ranks = {
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(plan["hosts"]),
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(host),
    }
    environment = {**os.environ, **ranks, **address, "OMP_NUM_THREADS": "1", "LACONIC_PARENT": str(os.getpid())}
    inner = [sys.executable, "-m", "laconic.lab.link", "host", json.dumps(plan)]
    return subprocess.Popen([*apart, *inner], env=environment)


def _host(plan: Mapping[str, Any]) -> None:
    """Be a worker: take the cable's end, then become the command."""
    _go_with_parent()
    if os.environ.get("LACONIC_CABLE"):
        _plug_in(Link(plan["bits"], plan["delay"]))
    os.execvp(plan["command"][0], plan["command"])


def _plug_in(link: Link) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        deadline = time.monotonic() + 60
        while not (found := netlink.link_lookup(ifname="eth0")):
            if time.monotonic() > deadline:
                raise TimeoutError("no cable was plugged in")
            time.sleep(0.02)
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        netlink.addr("add", index=found[0], address=f"{NETWORK}.{int(os.environ['RANK']) + 1}", prefixlen=24)
        netlink.link("set", index=found[0], state="up")
        _limit(netlink, found[0], link)


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
    match arguments:
        case ("hosts", plan):
            sys.exit(_hosts(json.loads(plan)))
        case ("host", plan):
            _host(json.loads(plan))
        case ("try", link):
            _try(Link(*json.loads(link)))


if __name__ == "__main__":
    main(sys.argv[1:])
