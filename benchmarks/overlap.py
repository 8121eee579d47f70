"""Does the wire work while the cores compute? Steps a second behind 100 Mbit/s links, beside a run that never talks.

Four hosts train a byte-level transformer on the source text of Python's standard library.
"""

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import report
from laconic.lab.link import Link, start
from laconic.lab.tasks import BytesGPT

HOSTS, RATE_MBIT = 4, 100
STREAMING = "streaming_diloco(24, fragments=4, delay=2, blend=0.0, outer_lr=1.0, outer_momentum=0.2)"
BLOCKING = "diloco(24, outer_lr=1.0, outer_momentum=0.2)"
# One after the other, and the run that never talks at both ends: the machine's own drift is seen.
RUNS = [("silent()", 96), (STREAMING, 240), (BLOCKING, 240), ("ddp()", 240), ("silent()", 96)]


def train(rank: int, strategy: str, steps: int, seed: int = 0) -> dict[str, object]:
    """Seconds a step from the first to the last, and what the model has learnt."""
    task = BytesGPT("2m")
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    batches = task.batches(rank, HOSTS, seed)
    run = laconic.attach(model, optimizer, strategy)
    with run:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            model(next(batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        dist.barrier()
        seconds = time.perf_counter() - start
        stats = run.stats()
    with torch.no_grad():
        loss = task.evaluate(model.module)
    return {
        "strategy": strategy,
        "seconds": seconds / steps,
        "loss": loss,
        "bytes": stats.wire_bytes / steps,
        "wait": (stats.wait_seconds or 0) / steps,
    }


def host(out: str) -> None:
    """All runs, as one of the hosts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for strategy, steps in RUNS:
        rows.append(train(dist.get_rank(), strategy, steps))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
            Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Four hosts, one table."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.overlap", "--host", file.name]
        with start(command, HOSTS, Link(RATE_MBIT * 10**6), os.environ) as process:
            for line in process.stdout or ():
                print(line, end="")
        if process.returncode:
            raise SystemExit(f"the hosts ended with {process.returncode}")
        rows = json.loads(Path(file.name).read_text())
    tell(rows)


def tell(rows: list[dict[str, Any]]) -> None:
    """The table."""
    limit = min(row["seconds"] for row in rows if row["strategy"] == "silent()")
    plain = next(row["loss"] for row in rows if row["strategy"] == "ddp()")
    table = [
        {
            "strategy": row["strategy"],
            "ms a step": f"{row['seconds'] * 1e3:.0f}",
            "share of silent's rate": f"{limit / row['seconds']:.3f}",
            "wait, ms a step": f"{row['wait'] * 1e3:.1f}",
            "kB a step": f"{row['bytes'] / 1e3:.0f}",
            "validation loss": f"{row['loss']:.4f}" if row["strategy"] != "silent()" else "",
            "loss, relative": f"{row['loss'] / plain:.4f}" if row["strategy"] != "silent()" else "",
        }
        for row in rows
    ]
    legend = (
        f"A byte-level transformer of 2.1 million parameters, {HOSTS} hosts in network namespaces behind {RATE_MBIT} Mbit/s "
        "links (tbf both ways, burst 256 KB), all on two cores; "
        f"batch {BytesGPT.BATCH} x {BytesGPT.CONTEXT} a host, {dict(RUNS)['ddp()']} steps, one seed. "
        "'share': the step time of the faster of the two runs that never talk, divided by this one's. Loss on "
        "held-out text, of the averaged model."
    )
    report("overlap", "Steps a second behind slow links", table, legend)


if __name__ == "__main__":
    host(sys.argv[2]) if "--host" in sys.argv else main()
