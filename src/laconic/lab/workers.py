"""The workers of a comparison, from outside: started behind a link, given jobs, listened to, ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from laconic.cost.link import Link
from laconic.lab.link import KILLED, start
from laconic.lab.worker import LINE_PREFIX

Told = dict[str, list[dict[str, Any]]]
"""What the workers tell of one job, by kind."""


class WorkerError(RuntimeError):
    """A worker failed; the message has its traceback, once."""


class Workers:
    """So many processes, which do jobs in turn. Whatever ends the block, nothing is left.

    Each is behind a link of its own; or, in islands of several, those of one island behind one link.
    """

    def __init__(self, jobs: Sequence[Mapping[str, Any]], count: int, link: Link, *, island_size: int = 1) -> None:
        self._jobs, self._count, self._link, self._island_size = jobs, count, link, island_size
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Workers":
        with TemporaryFile() as file:  # without a name, and so it goes with its last reader
            file.write(json.dumps(self._jobs).encode())
            file.flush()
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-m", "laconic.lab.worker"]
            hosts = self._count // self._island_size
            self._process = start(command, hosts, self._link, environment, file, per_host=self._island_size)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def told(self, name: str, progress: Callable[[dict[str, Any]], object]) -> Told:
        """What they tell of the next job until they tell its end; `name` is what an error calls it."""
        assert self._process is not None
        told: Told = {kind: [] for kind in ("plan", "tick", "look", "pace", "said", "error", "end")}
        other: list[str] = []
        for line in self._process.stdout or ():
            if not line.startswith(LINE_PREFIX):
                other.append(line)
                continue
            facts = json.loads(line[len(LINE_PREFIX) :])
            told[facts["kind"]].append(facts)
            if facts["kind"] == "end":
                return told
            if facts["kind"] in ("plan", "tick", "look", "said"):
                progress(facts)
        raise WorkerError(_explained(name, told["error"], other, self._process.wait()))


def _explained(name: str, errors: list[dict[str, Any]], other: list[str], code: int | None) -> str:
    """The first worker's own error; those of its peers, which only lost a connection, are left out."""
    heard = ("CommunicationError", "PeerError", "UnevenError")
    own = [error for error in errors if not any(kind in error["text"] for kind in heard)]
    killed = [line.strip() for line in other if KILLED in line]
    if killed and not own:
        return f"{name}: {', '.join(killed)}"
    if own or errors:
        first = (own or errors)[0]
        return f"{name}: worker {first['rank']} failed:\n{first['trace']}"
    said = "".join(other[-20:]).strip()
    return f"{name}: a worker died (exit code {code})" + (f"; the last it said:\n{said}" if said else " and said nothing")
