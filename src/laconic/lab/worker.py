"""One worker of a comparison: trains a task by one strategy after the other, and tells how it goes."""

import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.lab import tasks
from laconic.lab.file_task import blame
from laconic.lab.link import sent_bytes

TICK_SECONDS, PACE = 0.5, 1000  # how often the step is told; of how many steps, the last ones, the pace is kept
LINE_PREFIX = "laconic-lab"  # begins the lines that are meant for the lab


def tell(facts: Mapping[str, object]) -> None:
    """A line for the lab, in one write: up to 4096 bytes, the lines of several workers don't mix in a pipe."""
    os.write(sys.stdout.fileno(), f"\n{LINE_PREFIX} {json.dumps(facts)}\n".encode())


def train(job: Mapping[str, Any]) -> None:
    """All steps, with a look at the held-out loss of the averaged model now and then, which is not timed."""
    rank, world, steps = dist.get_rank(), dist.get_world_size(), int(job["steps"])
    task = tasks.load(job["task"])
    torch.manual_seed(job["seed"])
    bare = task.model()
    predicted = laconic.predict(job["strategy"], bare, world_size=world, step=0, steps=steps, sizes={"node": 1})
    model: Any = DistributedDataParallel(bare)
    optimizer = task.optimizer(model)
    batches = task.batches(rank, world, job["seed"])
    torch.manual_seed(1000 * job["seed"] + rank)
    looks = {max(1, round(steps * share / job["looks"])) for share in range(1, job["looks"] + 1)}
    pace: deque[tuple[float, float | None]] = deque(maxlen=PACE)  # of each timed step: its seconds, and those of waiting in it
    with laconic.attach(model, optimizer, job["strategy"]) as run:
        seconds, timed, start, ticked, kernel = 0.0, 0, 0.0, time.perf_counter(), sent_bytes()
        waited_before = run.stats().wait_seconds
        for step in range(1, steps + 1):
            if step == job["warmup"] + 1:  # the first steps build buckets and caches: they are not timed
                dist.barrier()
                start, seconds, timed = time.perf_counter(), 0.0, 0
                waited_before = run.stats().wait_seconds
            began, waited = time.perf_counter(), run.stats().wait_seconds
            loss: Any = task.loss(model, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            timed += 1
            now_waited, ended = run.stats().wait_seconds, time.perf_counter()
            if step > job["warmup"]:
                pace.append((ended - began, _waited(waited, now_waited)))
            if rank == 0 and ended - ticked > TICK_SECONDS:
                tell({"kind": "tick", "step": step, "bytes": run.stats().wire_bytes})
                ticked = ended
            if step in looks and step > job["warmup"]:
                dist.barrier()
                seconds += time.perf_counter() - start
                now = _at_rest(job["settle_seconds"])
                with run.consensus(), torch.no_grad():
                    model.eval()
                    value = task.evaluate(model.module) if rank == 0 else 0.0
                    model.train()
                if rank == 0:
                    sent = run.stats().wire_bytes
                    cable = None if now is None or kernel is None else now - kernel
                    look = {"step": step, "seconds": seconds, "bytes": sent, "loss": value, "kernel": cable, "timed": timed}
                    tell({"kind": "look", **look})
                if now is not None and kernel is not None:
                    kernel += (sent_bytes() or 0) - now  # what looking cost is no part of training
                dist.barrier()
                start = time.perf_counter()
        stats = run.stats()
    if rank == 0:
        rows = [[round(took * 1e3, 2), None if wait is None else round(wait * 1e3, 2)] for took, wait in pace]
        for first in range(0, len(rows), 50):
            tell({"kind": "pace", "rows": rows[first : first + 50]})
        tell(
            {
                "kind": "end",
                "wait_seconds": _waited(waited_before, stats.wait_seconds),
                "predicted": predicted.wire_bytes,
                "wire_bytes": {kind: count / steps for kind, count in stats.wire_bytes_by_kind.items()},
                "collectives": {kind: count / steps for kind, count in stats.collectives_by_kind.items()},
            }
        )


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


def main() -> None:
    """The jobs are on standard input, a file that all workers share; what goes wrong is told, and ends them all."""
    torch.set_num_threads(1)
    jobs = json.loads(os.pread(0, os.fstat(0).st_size, 0))
    try:
        dist.init_process_group("gloo")
        for job in jobs:
            dist.barrier()
            train(job)
            gc.collect()  # DDP's cycles go before the next one, and before the process group
        dist.destroy_process_group()
    except BaseException as error:
        text, trace = f"{type(error).__name__}: {error}"[:500], blame(error, jobs[0]["task"])[-3000:]
        tell({"kind": "error", "rank": os.environ.get("RANK"), "text": text, "trace": trace})
        sys.exit(1)


if __name__ == "__main__":
    main()
