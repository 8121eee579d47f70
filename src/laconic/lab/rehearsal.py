"""A rehearsal: a command in several processes on this machine, each on a host of its own behind a limited link."""

import sys
from collections.abc import Mapping

from laconic.lab.link import Link, refusal, start


def rehearse(command: list[str], hosts: int, environment: Mapping[str, str], link: Link) -> int:
    """Run it, and pass on what it prints; returns its exit code."""
    problem = refusal(link)
    if problem is not None:
        raise ValueError(problem)
    process = start(command, hosts, link, dict(environment))
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
