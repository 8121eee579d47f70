"""Hosts whose workers are killed, started again, join and leave: each host of the lab runs `supervise`, without torch.

A plan says what is trained, for how long, and what happens when. Worker and supervisor talk by files in a folder; the machine
has one monotonic clock for all.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple, Self

from laconic.cost.link import parse
from laconic.lab.link import sent_bytes, start

READY_SECONDS = 120.0
HEARTBEATS_SECONDS = 0.5  # in which a new lighthouse hears of all
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Plan:
    """One run."""

    method: str  # a strategy of ours, or "torchft FRAGMENTS DELAY"
    seed: int
    size: str  # of the byte-level transformer
    hosts: int
    seconds: float
    link: str = "none"
    period: int = 24
    outer: tuple[float, float] = (1.0, 0.2)  # learning rate and momentum of torchft's; ours are in the strategy
    sleep_seconds: float = 0.0  # in each step
    kills: Sequence[tuple[float, int]] = ()  # seconds after the start, and who
    joins: dict[int, float] = field(default_factory=dict)  # who is not there from the start, and when
    leaves: Sequence[tuple[float, int]] = ()
    keep: bool = False  # the state after each sync of the first host, not only the newest
    folder: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON, which knows no number as a key."""
        facts = json.loads(text)
        return cls(**{**facts, "joins": {int(rank): seconds for rank, seconds in facts["joins"].items()}})

    @property
    def first(self) -> list[int]:
        """Who is there from the start."""
        return [rank for rank in range(self.hosts) if rank not in self.joins]


class Moment(NamedTuple):
    """What a worker writes down after a step."""

    time: float  # since the start
    steps: int  # that this process has made
    version: int  # of the state
    committed: int  # steps of this process that are in a sync
    dropped: int  # syncs that came to nothing
    life: int = 0  # of the worker of its host
    rank: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    plan: Plan
    moments: list[Moment]  # in the order of time
    sent: list[int | None]  # bytes on each host's cable
    deaths: list[str]  # those that nobody ordered: who, and its last words

    @property
    def folder(self) -> Path:
        """What the workers saved."""
        return Path(self.plan.folder)


def wait_for(what: Callable[[], object], why: str, seconds: float = READY_SECONDS) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{why} did not happen in {seconds:.0f} s")
        time.sleep(0.005)


def write(path: Path, text: str) -> None:
    """All of it at once, for those who wait for the file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def all_have(plan: Plan, name: str) -> Callable[[], bool]:
    """Whether the workers of the start have come as far as that."""
    return lambda: all(Path(plan.folder, f"{name}-{rank}").exists() for rank in plan.first)


def _go_with(parent: int) -> Callable[[], None]:
    """For a new process: end when the parent ends, however it does."""

    def act() -> None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it survives exec
        if os.getppid() != parent:
            os._exit(1)

    return act


def _spawn(command: Sequence[str], errors: Path) -> "subprocess.Popen[bytes]":
    with errors.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=_go_with(os.getpid()))


class Supervisor:
    """As one host: start its worker, end it when the plan says so, and start it again whenever it ends."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.folder = plan, rank, Path(plan.folder)
        self.life, self.deaths, self.leaving = -1, [], False  # type: int, list[str], bool
        self.worker = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.life += 1
        command = [sys.executable, "-m", "benchmarks.elastic_workers", json.dumps(asdict(self.plan)), str(self.life)]
        return _spawn(command, self._errors)

    @property
    def _errors(self) -> Path:
        return self.folder / f"errors-{self.rank}-{self.life}"

    def check(self) -> None:
        """A worker that has ended by itself is started again; but for one that has left."""
        code = self.worker.poll()
        if code is None or (self.leaving and code == 0):
            return
        self.deaths.append(self._last_words())
        self.worker = self._start()

    def ready(self, what: Callable[[], bool]) -> bool:
        """Whether it is so; before the run begins, no worker may end."""
        if self.worker.poll() is not None:
            raise SystemExit(f"before the start, {self._last_words()}")
        return what()

    def _last_words(self) -> str:
        words = self._errors.read_text(errors="replace").strip().splitlines() or ["nothing"]
        return f"worker {self.rank} ended with {self.worker.returncode} and said: {words[-1][:300]}"

    def run(self) -> int | None:
        """Do what is planned; how many bytes went on this host's cable."""
        began = Path(self.folder, "began")
        wait_for(lambda: self.ready(began.exists), "the start of the run")
        start = float(began.read_text())
        mine = [(at, signal.SIGKILL) for at, rank in self.plan.kills if rank == self.rank]
        mine += [(at, signal.SIGTERM) for at, rank in self.plan.leaves if rank == self.rank]
        _sleep_until(start)
        before = sent_bytes()
        for at, what in sorted(mine):
            self._watch(start + at)
            self.worker.send_signal(what)
            self.leaving = what == signal.SIGTERM
            if what == signal.SIGKILL:
                self.worker.wait()
                self.worker = self._start()
        self._watch(start + self.plan.seconds)
        after = sent_bytes()
        self.worker.kill()
        self.worker.wait()
        return None if before is None or after is None else after - before

    def _watch(self, until: float) -> None:
        while time.monotonic() < until:
            self.check()
            time.sleep(0.01)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def lighthouse() -> str:
    """Where it listens."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _light(plan: Plan, wanted: int) -> "subprocess.Popen[bytes]":
    """A lighthouse in a process of its own, for a quorum of so many at least."""
    command = [sys.executable, "-m", "benchmarks.elastic_hosts", "light", str(wanted)]
    return _spawn(command, Path(plan.folder, f"lighthouse-{wanted}"))


def be_lighthouse(wanted: int) -> None:
    """torchft's own, with the defaults of its program: 5 s without a heartbeat is dead, 60 s for those who are late.

    Its compiled part is loaded by its path, since the package would import torch, which takes a core for more than a second.
    """
    package = find_spec("torchft")
    if package is None or package.origin is None:
        raise SystemExit("this benchmark needs torchft: pip install -e '.[dev]'")
    spec = spec_from_file_location("_torchft", next(Path(package.origin).parent.glob("_torchft.*.so")))
    if spec is None or spec.loader is None:
        raise SystemExit(f"{package.origin} has no compiled part")
    part = module_from_spec(spec)
    spec.loader.exec_module(part)
    limits = {"join_timeout_ms": 60_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5_000}
    server = part.LighthouseServer(bind=lighthouse(), min_replicas=wanted, **limits)
    signal.pause()
    server.shutdown()


def supervise(plan: Plan) -> None:
    """As one of the lab's hosts: the first one has the lighthouse, which is never killed, and says when the run begins."""
    rank = int(os.environ["RANK"])
    lights = _light(plan, len(plan.first)) if rank == 0 else None
    host = Supervisor(plan, rank)
    if lights is not None:
        attached = all_have(plan, "attached")
        wait_for(lambda: host.ready(attached), "all workers being attached")
        # All of the start are there; from now on one worker is enough. It takes a lighthouse to forget how many are wanted.
        lights.kill()
        lights.wait()
        _light(plan, 1)
        write(Path(plan.folder, "began"), str(time.monotonic() + HEARTBEATS_SECONDS))
    sent = host.run()
    write(Path(plan.folder, f"answer-{rank}"), json.dumps({"sent": sent, "deaths": host.deaths}))


@contextmanager
def run(plan: Plan) -> Iterator[Outcome]:
    """Hosts, and what came of them; what the workers saved is in the plan's folder as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="laconic-elastic-") as folder:
        plan = Plan.read(json.dumps({**asdict(plan), "folder": folder}))
        command = [sys.executable, "-m", "benchmarks.elastic_hosts", json.dumps(asdict(plan))]
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "RUST_LOG": "error"}
        with start(command, plan.hosts, parse(plan.link), environment) as process:
            try:
                output, _ = process.communicate(timeout=READY_SECONDS + plan.seconds + 60)
            finally:
                process.kill()  # all that it started goes with it
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("answer-?"))]
        if len(answers) != plan.hosts:
            errors = [path.read_text(errors="replace")[-500:] for path in sorted(Path(folder).glob("errors-*"))]
            raise SystemExit(
                f"{plan.method}: the hosts ended with {process.returncode}:\n{output[-2000:]}\n" + "\n".join(errors)
            )
        deaths = [death for answer in answers for death in answer["deaths"]]
        yield Outcome(plan, moments(Path(folder), plan), [answer["sent"] for answer in answers], deaths)


def progress(text: str) -> None:
    """A line for who waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def moments(folder: Path, plan: Plan) -> list[Moment]:
    """What all workers wrote down until the end of the run."""
    found = []
    for path in folder.glob("moments-*"):
        _, rank, life = path.name.split("-")
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may have been cut off
                passed, steps, version, committed, dropped = line.split()
                counts = int(steps), int(version), int(committed), int(dropped)
                found.append(Moment(float(passed), *counts, int(life), int(rank)))
    return sorted(moment for moment in found if 0 <= moment.time <= plan.seconds)


def sync_times(found: Sequence[Moment]) -> list[float]:
    """When the first worker had a newer version than all before."""
    times: list[float] = []
    version = found[0].version
    for moment in found:
        if moment.version > version:
            version = moment.version
            times.append(moment.time)
    return times


if __name__ == "__main__":
    be_lighthouse(int(sys.argv[2])) if sys.argv[1] == "light" else supervise(Plan.read(sys.argv[1]))
