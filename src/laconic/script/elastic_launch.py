"""`laconic run --elastic`: workers on this machine, each a process of its own, started again when they die."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from laconic.elastic import lighthouse
from laconic.elastic.membership import LIGHTHOUSE, LOOPBACK, listening
from laconic.script.elastic_auto import BIND, MIN_REPLICAS, START_WITH, WORKER

POLL_SECONDS, LEAVE_SECONDS = 0.2, 40.0
PAUSE_SECONDS = 1.0  # before a worker is started again; doubled each time


@dataclass(frozen=True)
class Plan:
    """What is started."""

    strategy: str
    command: Sequence[str]  # the script, or `-m` and a module, with its arguments
    workers: int
    min_replicas: int
    max_restarts: int
    deadline_seconds: float
    lighthouse: str | None = None  # of others; None: one is started here
    bind: str = LOOPBACK  # the address by which others reach this machine


@dataclass
class _Worker:
    name: str
    process: "subprocess.Popen[bytes] | None" = None
    restarts: int = 0
    start_at: float = 0.0
    code: int | None = None  # once it is over for good
    codes: list[int] = field(default_factory=list)


def run_workers(plan: Plan) -> int:
    """Until all have ended; 0 if any of them came to its end, else the exit code of the first that did not."""
    if plan.min_replicas < 1 or plan.max_restarts < 0 or plan.deadline_seconds <= 0:
        raise ValueError(
            "--min-replicas must be at least 1, --max-restarts at least 0, and --deadline-seconds above 0; got "
            f"{plan.min_replicas}, {plan.max_restarts} and {plan.deadline_seconds}"
        )
    address = plan.lighthouse or os.environ.get(LIGHTHOUSE)
    if not address and plan.bind == LOOPBACK and plan.min_replicas > plan.workers:
        raise ValueError(
            f"--min-replicas {plan.min_replicas} is more than the {plan.workers} workers of --nproc-per-node, and from other "
            "machines nobody can join; give this machine's address by --bind, or a --lighthouse of others"
        )
    listening(plan.bind).close()  # an error, if this machine has no such address
    own = not address
    with ExitStack() as stack:
        if not address:
            host = f"[{plan.bind}]" if ":" in plan.bind else plan.bind
            # One is enough for a quorum: workers with fewer than min_replicas beside them drop the sync and train on. Else the
            # last one to end would wait, sync by sync, for those that have ended.
            address = stack.enter_context(lighthouse(bind=f"{host}:0", deadline_seconds=plan.deadline_seconds))
            others = f"join with --lighthouse {address} --bind THEIR-ADDRESS"
            if plan.bind == LOOPBACK:
                others = "can't join; for that, give this machine's address by --bind"
            _say(f"a lighthouse listens at {address}; workers on other machines {others}")
        environment = {
            **os.environ,
            LIGHTHOUSE: address,
            "LACONIC_STRATEGY": plan.strategy,
            "LACONIC_ELASTIC": "1",
            MIN_REPLICAS: str(plan.min_replicas),
            BIND: plan.bind,
            START_WITH: str(plan.workers if own else 1),
        }
        workers = [_Worker(f"{socket.gethostname()}-{number}") for number in range(plan.workers)]
        stopping = stack.enter_context(_stopping())
        try:
            return _supervise(plan, workers, environment, stopping)
        finally:
            _end(workers, stopping)


def _supervise(plan: Plan, workers: Sequence[_Worker], environment: Mapping[str, str], stopping: list[int]) -> int:
    while any(worker.code is None for worker in workers):
        if stopping:
            return 128 + stopping[0]
        for place, worker in enumerate(workers):
            if worker.code is not None:
                continue
            if worker.process is None:
                if time.monotonic() >= worker.start_at:
                    worker.process = _start(plan, place, worker, environment)
                continue
            code = worker.process.poll()
            if code is None:
                continue
            worker.process = None
            worker.codes.append(code if code >= 0 else 128 - code)
            if code == 0:
                worker.code = 0
            elif any(other.code == 0 for other in workers):
                worker.code = worker.codes[-1]
                _say(f"worker {worker.name} ended with {worker.code}, after others were done; it is not started again")
            elif worker.restarts < plan.max_restarts:
                pause = PAUSE_SECONDS * 2**worker.restarts
                worker.restarts += 1
                worker.start_at = time.monotonic() + pause
                _say(f"worker {worker.name} ended with {worker.codes[-1]}; it is started again in {pause:.0f} s, "
                     f"for the {worker.restarts}. time of {plan.max_restarts}")  # fmt: skip
            else:
                worker.code = worker.codes[-1]
                _say(f"worker {worker.name} ended with {worker.code}, and has been started again {worker.restarts} times; "
                     "the others go on")  # fmt: skip
        time.sleep(POLL_SECONDS)
    codes = [worker.code or 0 for worker in workers]
    return 0 if 0 in codes else codes[0]


def _start(plan: Plan, place: int, worker: _Worker, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(place), "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), WORKER: worker.name,
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in environment:
        own["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "laconic.script", *plan.command]
    # Ctrl-C in the terminal reaches the launcher alone, which asks its workers to leave in order.
    return subprocess.Popen(command, env={**environment, **own}, start_new_session=True)


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """The signals that have asked for the end."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(workers: Sequence[_Worker], stopping: Sequence[int]) -> None:
    """Whoever is still there is asked to leave, and killed if it doesn't, or at a second signal."""
    running = [worker.process for worker in workers if worker.process is not None and worker.process.poll() is None]
    if running:
        _say(f"{len(running)} workers take part in one more sync and leave; Ctrl-C again kills them")
    for process in running:
        process.terminate()
    deadline, signals = time.monotonic() + LEAVE_SECONDS, len(stopping)
    while any(process.poll() is None for process in running) and time.monotonic() < deadline and len(stopping) == signals:
        time.sleep(POLL_SECONDS)
    for process in running:
        process.kill()
        process.wait()


def _say(sentence: str) -> None:
    print(f"laconic: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
