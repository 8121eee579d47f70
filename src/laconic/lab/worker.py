"""One worker of a comparison: trains a task by one strategy after the other, and tells how it goes."""

import gc
import io
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import laconic
from laconic._torch.process_groups import default_group
from laconic.comm.group import TorchGroup
from laconic.lab.file_task import blame
from laconic.lab.link import sent_bytes
from laconic.lab.prediction import compute_of, step_ms
from laconic.lab.trainee import Trainee, build, step, undone
from laconic.probing.probe import measure

TICK_SECONDS, PACE = 0.5, 1000  # how often the step is told; of how many steps, the last ones, the pace is kept
PACED, MOST_PACED = 6, 512  # steps by which the pace of a run is judged: at first, and at most
OTHER_DATA = 1_000_003  # added to a seed, for steps that are no part of a run: it must not see their batches again
MOST_SAID, MOST_CHARACTERS = 40, 600  # lines of a job that are passed on, and characters of each: see `tell`
STDOUT = 1
LINE_PREFIX = "laconic-lab"  # begins the lines that are meant for the lab


def tell(facts: Mapping[str, object]) -> None:
    """A line for the lab, in one write: up to 4096 bytes, the lines of several workers don't mix in a pipe."""
    os.write(STDOUT, f"\n{LINE_PREFIX} {json.dumps(facts)}\n".encode())


class Said(io.TextIOBase):
    """Stands for `sys.stdout` while a job runs: what the task prints is told, line by line, with the number of the worker."""

    def __init__(self) -> None:
        self._line, self._lines = "", 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDOUT

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._lines += 1
            if self._lines <= MOST_SAID + 1:
                said = (
                    line[:MOST_CHARACTERS]
                    if self._lines <= MOST_SAID
                    else f"(more than {MOST_SAID} lines; the rest is left out)"
                )
                tell({"kind": "said", "rank": os.environ.get("RANK"), "line": said})
        return len(text)


def warm_up(job: Mapping[str, Any]) -> None:
    """Steps of plain DDP at the optimizer's own rate; the first worker keeps what comes of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainee = build(job)
    batches = trainee.task.batches(rank, world, job["seed"] + OTHER_DATA)
    torch.manual_seed(1000 * job["seed"] + rank)
    for number in range(job["warm"]):
        step(trainee, next(batches))
        if rank == 0 and number % 50 == 49:
            tell({"kind": "tick", "step": number + 1, "bytes": 0})
    if rank == 0:
        partial = f"{job['save']}.{os.getpid()}"
        torch.save({"model": trainee.bare.state_dict(), "optimizer": trainee.optimizer.state_dict()}, partial)
        os.replace(partial, job["save"])
        tell({"kind": "end"})


def steps_within(job: Mapping[str, Any], trainee: Trainee) -> int:
    """As many steps as take `job["seconds"]`, by the pace of some that are made for that alone; then all is as it was."""
    strategy = laconic.strategy(job["strategy"])
    batches = trainee.task.batches(dist.get_rank(), dist.get_world_size(), job["seed"] + OTHER_DATA)

    def pace(steps: int) -> float:
        """Seconds a step, of so many more; the first worker's, on all."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(trainee, next(batches))
        dist.barrier()
        took = torch.tensor([(time.perf_counter() - start) / steps], dtype=torch.float64)
        dist.broadcast(took, 0)
        return took.item()

    with undone(trainee), laconic.attach(trainee.model, trainee.optimizer, job["strategy"], mesh=trainee.mesh):
        pace(job["warmup"])  # untimed in the run, too
        early, made = pace(PACED), job["warmup"] + PACED
        warm = max(0, strategy.warmup - job["warmup"])  # timed steps of a warm-up of the strategy's own
        count: float = job["seconds"] / early
        if count > warm:
            if strategy.warmup > made:
                pace(strategy.warmup - made)
            fitting = job["seconds"] / early - warm
            later = pace(_whole_periods(strategy, max(1, min(int(fitting), MOST_PACED))))
            count = warm + (job["seconds"] - warm * early) / later
    return max(10, int(job["warmup"]) + round(count))


def expected(job: Mapping[str, Any], trainee: Trainee, steps: int) -> list[float]:
    """What the cost model says of a step of the run that follows, over each of the job's links; none where nobody asks."""
    if "probe" not in job:
        return []
    with undone(trainee):
        batches = trainee.task.batches(dist.get_rank(), dist.get_world_size(), job["seed"] + OTHER_DATA)
        compute = compute_of(trainee, batches)
    return step_ms(job, trainee, compute, steps)


def probe(job: Mapping[str, Any], mesh: DeviceMesh | None) -> None:
    """How long collectives of those who average together take between these hosts; kept in a file."""
    group = default_group() if mesh is None else mesh["replicate"].get_group()
    found = measure(TorchGroup(group), torch.device("cpu"), seconds=job["probe_seconds"])
    if dist.get_rank() == 0:
        partial = Path(f"{job['save']}.{os.getpid()}")
        partial.write_text(found.text())
        partial.replace(job["save"])
    dist.barrier()
    if dist.get_rank() == 0:
        tell({"kind": "end"})


def _whole_periods(strategy: laconic.Strategy, most: int) -> int:
    """Steps in which as much is sent as in the long run: whole periods, of 12 steps or more; or `most`, if that is fewer."""
    schedules = strategy.averaging.route.schedules if strategy.averaging else []
    period = math.lcm(*(schedule.cycle or schedule.fixed_period or 1 for schedule in schedules))
    return min(most, -(-12 // period) * period)


def evaluate(trainee: Trainee) -> float:
    """The held-out loss on the first worker; on all where the model is sharded, because they compute it together."""
    model = trainee.bare
    with torch.no_grad():
        model.eval()
        value = trainee.task.evaluate(model) if dist.get_rank() == 0 or trainee.mesh is not None else 0.0
        model.train()
    return value


def train(job: Mapping[str, Any], mesh: DeviceMesh | None = None) -> None:
    """All steps, with a look at the held-out loss of the averaged model now and then, which is not timed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainee = build(job, mesh)
    task, optimizer, replicas = trainee.task, trainee.optimizer, trainee.replicas
    steps = int(job["steps"]) if "steps" in job else steps_within(job, trainee)
    if rank == 0:
        tell({"kind": "plan", "steps": steps})
    expected_ms = expected(job, trainee, steps)
    predicted = laconic.predict(job["strategy"], trainee.bare, world_size=replicas, step=0, steps=steps, sizes={"node": 1})
    schedule = task.schedule(optimizer, steps)
    batches = task.batches(rank, world, job["seed"])
    torch.manual_seed(1000 * job["seed"] + rank)
    looks = {max(1, round(steps * share / job["looks"])) for share in range(1, job["looks"] + 1)}
    pace: deque[tuple[float, float | None]] = deque(maxlen=PACE)  # of each timed step: its seconds, and those of waiting in it
    with laconic.attach(trainee.model, optimizer, job["strategy"], mesh=mesh) as run:
        seconds, timed, start, ticked, kernel = 0.0, 0, 0.0, time.perf_counter(), sent_bytes()
        waited_before = run.stats().wait_seconds
        for number in range(1, steps + 1):
            if number == job["warmup"] + 1:  # the first steps build buckets and caches: they are not timed
                dist.barrier()
                start, seconds, timed = time.perf_counter(), 0.0, 0
                waited_before = run.stats().wait_seconds
            began, waited = time.perf_counter(), run.stats().wait_seconds
            step(trainee, next(batches))
            if schedule is not None:
                schedule.step()
            timed += 1
            now_waited, ended = run.stats().wait_seconds, time.perf_counter()
            if number > job["warmup"]:
                pace.append((ended - began, _waited(waited, now_waited)))
            if rank == 0 and ended - ticked > TICK_SECONDS:
                tell({"kind": "tick", "step": number, "bytes": run.stats().wire_bytes})
                ticked = ended
            if number in looks and number > job["warmup"]:
                dist.barrier()
                seconds += time.perf_counter() - start
                now = _at_rest(job["settle_seconds"])
                with run.consensus():
                    value = evaluate(trainee)
                if rank == 0:
                    sent = run.stats().wire_bytes
                    # A worker's share: those of an island have one cable.
                    cable = None if now is None or kernel is None else (now - kernel) * replicas / world
                    look = {"step": number, "seconds": seconds, "bytes": sent, "loss": value, "kernel": cable, "timed": timed}
                    tell({"kind": "look", **look})
                if now is not None and kernel is not None:
                    kernel += (sent_bytes() or 0) - now  # what looking cost is no part of training
                dist.barrier()
                start = time.perf_counter()
        stats = run.stats()
    if rank == 0:
        _tell_pace(pace)
        tell(
            {
                "kind": "end",
                "wait_seconds": _waited(waited_before, stats.wait_seconds),
                "predicted": predicted.wire_bytes,
                "expected_ms": expected_ms,
            }
        )


def _tell_pace(pace: Iterable[tuple[float, float | None]]) -> None:
    """In milliseconds, some rows at a time: a line of a pipe has an end."""
    rows = [[round(took * 1e3, 2), None if wait is None else round(wait * 1e3, 2)] for took, wait in pace]
    for first in range(0, len(rows), 50):
        tell({"kind": "pace", "rows": rows[first : first + 50]})


def _waited(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _at_rest(quiet_seconds: float) -> int | None:
    """What the kernel has sent, when that has been all for so long: what is outstanding is sent while replicas stand still."""
    sent = sent_bytes()
    while sent is not None and quiet_seconds > 0:
        time.sleep(quiet_seconds)
        before, sent = sent, sent_bytes()
        if sent == before:
            break
    return sent


def _mesh(on_a_host: int) -> DeviceMesh | None:
    """The workers of one host are an island; None: each has a model of its own."""
    if on_a_host == 1:
        return None
    from laconic.lab.islands import island_mesh

    return island_mesh(on_a_host)


def main() -> None:
    """The jobs are on standard input, a file that all workers share; what goes wrong is told, and ends them all."""
    torch.set_num_threads(1)
    jobs = json.loads(os.pread(0, os.fstat(0).st_size, 0))
    try:
        dist.init_process_group("gloo")
        mesh = _mesh(int(os.environ["LOCAL_WORLD_SIZE"]))
        for job in jobs:
            dist.barrier()
            with redirect_stdout(Said()):
                if "warm" in job:
                    warm_up(job)
                elif "probe_seconds" in job:
                    probe(job, mesh)
                else:
                    train(job, mesh)
            gc.collect()  # DDP's cycles go before the next one, and before the process group
        dist.destroy_process_group()
    except BaseException as error:
        text, trace = f"{type(error).__name__}: {error}"[:500], blame(error, jobs[0].get("task", ""))[-3000:]
        tell({"kind": "error", "rank": os.environ.get("RANK"), "text": text, "trace": trace})
        sys.exit(1)


if __name__ == "__main__":
    main()
