"""Workers in processes of their own, which tests may kill, stop and start; and what they wrote down."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.elastic.training import HEARTBEAT_SECONDS, Job, train

_processes = multiprocessing.get_context("forkserver")  # torch is imported once
_processes.set_forkserver_preload(["tests.elastic.training"])

Record = dict[str, Any]


class Crew:
    """Workers by name. A name that is started again is a worker that was restarted."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._running: dict[str, list[Any]] = {}
        self._seeds = 0

    def start(self, *names: str, **changed: Any) -> None:
        for name in names:
            self._seeds += 1
            job = replace(self.job, **changed)
            self._running[name] = []
            for rank in range(job.ranks):
                process = _processes.Process(target=train, args=(name, job, self._seeds, rank), daemon=True)
                process.start()
                self._running[name].append(process)

    def signal(self, name: str, number: int) -> None:
        for process in self._running[name]:
            os.kill(process.pid, number)

    def kill(self, name: str, *, first: int = 0) -> None:
        """All ranks of it; the one that is named before the others, as torchrun ends the ranks of one that has died."""
        processes = self._running.pop(name)
        for process in [processes[first], *processes]:
            process.kill()
            process.join(10)

    def await_death(self, name: str) -> None:
        """Until it has died of itself."""
        for process in self._running.pop(name):
            process.join(60)
            assert process.exitcode == -signal.SIGKILL, f"worker {name} ended with {process.exitcode}"

    def end(self) -> None:
        for processes in self._running.values():
            for process in processes:
                process.kill()

    def records(self) -> list[Record]:
        """All that was written so far, in the order of time."""
        found = []
        for path in Path(self.job.folder).glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(found, key=lambda record: record["time"])

    def until(self, what: Callable[[list[Record]], object], seconds: float = 60.0) -> list[Record]:
        """Wait for it; what was written by then."""
        deadline = time.monotonic() + seconds
        while not what(records := self.records()):
            if time.monotonic() > deadline:
                tail = "\n".join(map(str, records[-12:]))
                raise AssertionError(f"it did not come to that in {seconds:.0f} s; the last records:\n{tail}")
            time.sleep(0.05)
        return records

    def finish(self, *names: str, seconds: float = 90.0) -> dict[str, Record]:
        """Wait until these have come to their end; their last records, by name."""
        records = self.until(lambda found: {r["name"] for r in found if r.get("end")} >= set(names), seconds)
        return {record["name"]: record for record in records if record.get("end")}


@contextmanager
def crew(folder: Path, strategy: str, steps: int, lighthouse: str, **options: Any) -> Iterator[Crew]:
    made = Crew(Job(lighthouse, strategy, steps, str(folder), **options))
    try:
        yield made
    finally:
        made.end()


def syncs(records: list[Record]) -> list[Record]:
    return [record for record in records if "digest" in record and not record.get("end")]


def at_version(version: int) -> Callable[[list[Record]], bool]:
    """Somebody has come as far."""
    return lambda records: any(record.get("version", 0) >= version for record in syncs(records))


def assert_alike(records: list[Record]) -> int:
    """After every sync, all who took part have the same bits; how many syncs were compared."""
    by_sync: dict[tuple[int, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in syncs(records):
        by_sync[record["version"], record["step"]][record["digest"]].append(record["name"])
    unlike = {sync: dict(digests) for sync, digests in by_sync.items() if len(digests) > 1}
    assert not unlike, f"workers differ after the same sync: {unlike}"
    return sum(1 for digests in by_sync.values() for names in digests.values() if len(names) > 1)


class Lighthouse:
    """torchft's own, in a process of its own: it can be killed, and started again at the same port."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._process: subprocess.Popen[str] | None = None

    def start(self, *, min_replicas: int = 1, deadline_seconds: float = 10.0) -> str:
        code = (
            "import sys, time\nfrom laconic.elastic import lighthouse\n"
            f"with lighthouse(bind='127.0.0.1:{self.port}', min_replicas={min_replicas}, deadline_seconds={deadline_seconds}, "
            f"heartbeat_seconds={HEARTBEAT_SECONDS}) as address:\n    print(address, flush=True)\n    time.sleep(10000)\n"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        self.port = int(address.rpartition(":")[2])
        return address

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
