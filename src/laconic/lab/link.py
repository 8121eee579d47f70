"""Workers on hosts behind limited links, from outside: what a link is, whether it can be had, and how workers are started.

What the processes that are started here do is in `hosts.py`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from laconic.cost.link import FASTEST_EMULATED, Link

KILLED = "was killed by"


def refusal(link: Link) -> str | None:
    """Why such a link can't be had here, in one line; None: it can. Tried for real, in a namespace that goes at once."""
    if link.bits_per_second is not None and link.bits_per_second > FASTEST_EMULATED:
        return f"the fastest link that can be emulated has {Link(FASTEST_EMULATED)}, and {link} is asked for"
    if sys.platform != "linux":
        return f"limited links need Linux's network namespaces, and this is {sys.platform}"
    if shutil.which("unshare") is None:
        return "limited links need the program unshare (package util-linux)"
    command = [
        *_apart(),
        sys.executable,
        "-m",
        "laconic.lab.hosts",
        "try",
        json.dumps([link.bits_per_second, link.delay_seconds]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    hint = " (are namespaces switched off? See sysctl user.max_net_namespaces)" if "No space left" in lines[-1] else ""
    without = Link(link.bits_per_second)
    if link.delay_seconds and link.bits_per_second is not None and refusal(without) is None:
        return f"a delay can't be had here: {lines[-1]}; the rate alone can: --link {without}"
    return f"limited links can't be had here: {lines[-1]}{hint}"


def start(
    command: Sequence[str],
    hosts: int,
    link: Link,
    environment: Mapping[str, str],
    stdin: IO[bytes] | None = None,
    *,
    per_host: int = 1,
) -> "subprocess.Popen[str]":
    """Run a command on so many hosts, with torchrun's variables; ends when all have ended, or one has failed.

    Each host has one cable, which its `per_host` processes share; what they send to each other is not limited. Without a
    limit they are plain processes of this host, with the same numbers. They all share `stdin`, and its position.
    """
    counts = {"hosts": hosts, "per_host": per_host}
    plan = json.dumps({"command": list(command), **counts, "bits": link.bits_per_second, "delay": link.delay_seconds})
    inner = [sys.executable, "-m", "laconic.lab.hosts", "hosts", plan]
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
    """What the kernel has put on the cable of this worker's host so far; None: there is no such cable."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0" and os.environ.get("LACONIC_CABLE"):
            return int(numbers.split()[8])
    return None


def _apart() -> list[str]:
    """How to start something in a network namespace of its own: as root, or as an ordinary user in a user namespace."""
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
