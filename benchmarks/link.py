"""What a limited link makes of collectives, and of DDP's step: the ground that the lab's cost model stands on.

Four hosts behind 100 Mbit/s. For each kind of collective: seconds over those of its bytes at the link's rate, and what the
kernel counted over what we count. Then a step of DDP, between the longer of compute and wire and the sum of both.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import report
from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Collective
from laconic.comm.group import TorchGroup
from laconic.cost.link import Link
from laconic.lab.link import sent_bytes, start
from laconic.lab.tasks import BytesGPT

HOSTS, RATE = 4, 100_000_000
SIZES = [16 << 10, 128 << 10, 1 << 20, 4 << 20]  # wire bytes, about
# Bytes a collective beyond its own, in headers, acknowledgements and gloo's messages, with four hosts: fitted to 16 and 128 KB.
FRAMING = {"AllReduce": 4800, "AllGather": 2400, "AllToAll": 1300}
KINDS: dict[str, Callable[[int], Collective]] = {
    "AllReduce": lambda wire: AllReduce(torch.ones(wire * HOSTS // (2 * (HOSTS - 1)) // 4)),
    "AllGather": lambda wire: AllGather(torch.ones(wire // (HOSTS - 1) // 4)),
    "AllToAll": lambda wire: AllToAll(torch.ones(HOSTS, wire // (HOSTS - 1) // 4)),
}


def collectives() -> list[dict[str, Any]]:
    """Each kind at each size: seconds, counted and kernel's bytes of one."""
    assert dist.group.WORLD is not None
    found, group = [], TorchGroup(dist.group.WORLD)
    for kind, make in KINDS.items():
        for size in SIZES:
            repeats = max(4, (8 << 20) // size)
            group.launch(make(size)).wait()
            dist.barrier()
            time.sleep(0.2)  # the bucket is full again
            before, began = sent_bytes() or 0, time.perf_counter()
            for _ in range(repeats):
                group.launch(make(size)).wait()
            seconds = time.perf_counter() - began
            dist.barrier()  # a rank may have all it waits for, and be sending still
            time.sleep(0.2)
            kernel = (sent_bytes() or 0) - before
            counted = make(size).traffic(HOSTS).wire_bytes * repeats
            paid = max(counted - 256 * 1024, counted // 8)  # the first 256 KB are in the bucket already
            found.append(
                {
                    "kind": kind,
                    "wire": counted // repeats,
                    "factor": seconds / (paid * 8 / RATE),
                    "kernel": kernel / counted,
                    "framing": (kernel - counted) / repeats,
                }
            )
    return found


def steps(strategy: str, count: int = 40) -> dict[str, float]:
    """Seconds and wire bytes of a step."""
    task = BytesGPT("1m")
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model)
    batches = task.batches(dist.get_rank(), HOSTS, 0)
    with laconic.attach(model, optimizer, strategy) as run:
        for step in range(count + 5):
            if step == 5:
                dist.barrier()
                began, sent = time.perf_counter(), run.stats().wire_bytes
            model(next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        seconds = (time.perf_counter() - began) / count
        wire = (run.stats().wire_bytes - sent) / count
    return {"seconds": seconds, "wire": wire}


def host() -> None:
    """All of it, as one of the hosts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"collectives": collectives(), "silent()": steps("silent()"), "ddp()": steps("ddp()")}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure() -> dict[str, Any]:
    """Four hosts, one answer."""
    command = [sys.executable, "-m", "benchmarks.link", "--host"]
    with start(command, HOSTS, Link(RATE), os.environ) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the hosts ended with {process.returncode}:\n{output}")
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def bounds(found: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of DDP's step: at the least, at the most, and measured."""
    reduce = [row for row in found["collectives"] if row["kind"] == "AllReduce"]
    factor = reduce[-1]["factor"]
    compute, wire = found["silent()"]["seconds"], found["ddp()"]["wire"] * 8 / RATE * factor
    return max(compute, wire), compute + wire, found["ddp()"]["seconds"]


def main() -> None:
    """Two tables."""
    found = measure()
    rows = [
        {
            "collective": row["kind"],
            "wire bytes": row["wire"],
            "seconds / (bytes / rate)": f"{row['factor']:.2f}",
            "kernel / counted": f"{row['kernel']:.3f}",
            "framing, bytes": f"{row['framing']:.0f}",
        }
        for row in found["collectives"]
    ]
    legend = f"{HOSTS} hosts behind {RATE // 10**6} Mbit/s (tbf both ways, burst 256 KB), all on this machine's cores."
    report("link", "Collectives on a limited link", rows, legend)
    least, most, measured = bounds(found)
    step = [
        {
            "max(compute, wire), ms": f"{least * 1e3:.0f}",
            "DDP's step, ms": f"{measured * 1e3:.0f}",
            "compute + wire, ms": f"{most * 1e3:.0f}",
        }
    ]
    report(
        "link_step",
        "DDP's step between its bounds",
        step,
        "bytes-gpt:1m; compute is a step of silent(), wire the counted bytes times the factor above.",
    )


if __name__ == "__main__":
    host() if "--host" in sys.argv else main()
