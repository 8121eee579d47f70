"""A rehearsal: a command in several processes on this machine, on hosts behind limited links."""

import sys
from collections.abc import Mapping

from laconic.cost.link import Link
from laconic.lab.link import refusal, start


def rehearse(command: list[str], processes: int, environment: Mapping[str, str], link: Link, island_size: int = 1) -> int:
    """Run it, so many processes of it on each host, and pass on what it prints; returns its exit code."""
    if processes % island_size:
        raise ValueError(f"--nproc-per-node must be a multiple of --island-size, got {processes} and {island_size}")
    problem = refusal(link)
    if problem is not None:
        raise ValueError(problem)
    process = start(command, processes // island_size, link, dict(environment), per_host=island_size)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
        return process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
