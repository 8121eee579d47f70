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
from laconic.elastic.membership import LIGHTHOUSE
from laconic.script.elastic_auto import MIN_REPLICAS, WORKER

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
    if not 1 <= plan.min_replicas <= plan.workers or plan.max_restarts < 0 or plan.deadline_seconds <= 0:
        raise ValueError(
            "--min-replicas must be from 1 to --nproc-per-node, --max-restarts at least 0, and --deadline-seconds above 0; got "
            f"{plan.min_replicas} of {plan.workers} workers, {plan.max_restarts} and {plan.deadline_seconds}"
        )
    with ExitStack() as stack:
        address = plan.lighthouse or os.environ.get(LIGHTHOUSE)
        if not address:
            address = stack.enter_context(lighthouse(min_replicas=plan.min_replicas, deadline_seconds=plan.deadline_seconds))
            _say(f"a lighthouse listens at {address}; other workers join with {LIGHTHOUSE}={address}")
        environment = {
            **os.environ,
            LIGHTHOUSE: address,
            "LACONIC_STRATEGY": plan.strategy,
            "LACONIC_ELASTIC": "1",
            MIN_REPLICAS: str(plan.min_replicas),
        }
        workers = [_Worker(f"{socket.gethostname()}-{number}") for number in range(plan.workers)]
        stopping = stack.enter_context(_stopping())
        try:
            return _supervise(plan, workers, environment, stopping)
        finally:
            _end(workers)


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
    return subprocess.Popen([sys.executable, "-m", "laconic.script", *plan.command], env={**environment, **own})


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


def _end(workers: Sequence[_Worker]) -> None:
    """Whoever is still there is asked to leave, and killed if it doesn't."""
    running = [worker.process for worker in workers if worker.process is not None and worker.process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + LEAVE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _say(sentence: str) -> None:
    print(f"laconic: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
