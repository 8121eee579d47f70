"""Steps a second of a sharded model on islands, where the link between islands is slow: torch's HSDP and ours."""

import gc
import json
import logging
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import laconic
from benchmarks.harness import Ratio, Timing, ratio, report
from benchmarks.peers import Trainee
from benchmarks.rates import block, row
from benchmarks.sharded_step import sharded
from laconic.cost.link import Link, parse
from laconic.lab.islands import island_mesh
from laconic.lab.link import start
from laconic.lab.tasks import BytesGPT
from laconic.run.run import Run

ISLANDS, SHARDS, SIZE, LINK = 2, 2, "1m", "100mbit"
ROUNDS, FEW, BESIDE, LONG = 8, 6, 12, 32  # steps of a block: of those that average in every step, of silent(), of all others
NATIVE, SILENT = "torch HSDP", "laconic silent()"
EACH_STEP = [NATIVE, "laconic ddp()", "laconic int8()"]
SELDOM = [  # blocks hold whole periods of all of these
    "laconic local_adam(warmup=0, refresh=32)",
    "laconic diloco(16)",
    "laconic streaming_diloco(32, fragments=4, delay=4)",
]
NAMES = [SILENT, *EACH_STEP, *SELDOM]


def trainee(name: str, task: BytesGPT, mesh: DeviceMesh) -> tuple[Trainee, Run | None]:
    """A model on its islands, with its run if it is ours."""
    torch.manual_seed(0)
    model = sharded(task.model(), mesh if name == NATIVE else mesh["shard"])
    one = Trainee(model, task.optimizer(model), period=LONG if name in SELDOM else 1)
    if name == NATIVE:
        return one, None
    run = laconic.attach(model, one.optimizer, name.removeprefix("laconic "), mesh=mesh)
    one.stack.callback(run.detach)
    one.stack.callback(run.sync)
    return one, run


def timed(one: Trainee, run: Run | None, batches: Iterator[Tensor], steps: int) -> dict[str, Any]:
    """One block: seconds a step, bytes a step that this island's kernel has sent, and that its ranks have counted."""
    before = run.stats().wire_bytes if run else 0
    seconds, sent = block(one, batches, steps)
    mine = torch.tensor([(run.stats().wire_bytes if run else 0) - before])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    counted = sum(int(count) for count in everyone[:SHARDS]) // steps
    return {"seconds": seconds, "sent": sent, "counted": counted if run else None}


def host(rounds: int, few: int, long: int) -> None:
    """All of them, block by block in turn, as one of the ranks; a repeat later the turn begins with another one."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    task, mesh = BytesGPT(SIZE), island_mesh(SHARDS)
    batches = task.batches(dist.get_rank(), dist.get_world_size(), 0)
    working = {name: trainee(name, task, mesh) for name in NAMES}
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in NAMES}
    for one, _ in working.values():  # caches, the first exchanges, warm starts
        block(one, batches, long if one.period > 1 else 3)
    silent, _ = working[SILENT]
    before, _ = block(silent, batches, BESIDE)
    for round_ in range(rounds):
        first = round_ * len(NAMES) // rounds
        for name in NAMES[first:] + NAMES[:first]:
            one, run = working[name]
            measured = timed(one, run, batches, long if one.period > 1 else few)
            after, _ = block(silent, batches, BESIDE)
            for key, value in {**measured, "beside": (before + after) / 2}.items():
                found[name].setdefault(key, []).append(value)
            before = after
    if dist.get_rank() == 0:
        print(json.dumps({"found": found}), flush=True)
    for one, _ in working.values():
        one.stack.close()
    working.clear()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(link: Link, rounds: int = ROUNDS, few: int = FEW, long: int = LONG) -> dict[str, dict[str, list[Any]]]:
    """Two hosts of two ranks each, one answer."""
    command = [sys.executable, "-m", "benchmarks.sharded_rates", "--host", str(rounds), str(few), str(long)]
    with start(command, ISLANDS, link, {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}, per_host=SHARDS) as process:
        output, _ = process.communicate()
    answers = [line for line in output.splitlines() if line.startswith('{"found"')]
    if not answers:
        raise SystemExit(f"{link}: the hosts ended with {process.returncode}:\n{output[-3000:]}")
    found: dict[str, dict[str, list[Any]]] = json.loads(answers[-1])["found"]
    return found


def tables(found: Mapping[str, Mapping[str, list[Any]]]) -> tuple[list[dict[str, object]], list[Ratio]]:
    """Rows, and what is watched."""
    rows: list[dict[str, object]] = []
    for name, one in found.items():
        counted = [count for count in one["counted"] if count is not None]
        rows.append({**row(name, one), "kB counted": f"{statistics.median(counted) / 1e3:.1f}" if counted else ""})
    ours = [name for name in found if name.startswith("laconic") and name != SILENT]
    ratios = [
        ratio(f"{name}, time over the silent run's", Timing(found[name]["seconds"]), Timing(found[name]["beside"]))
        for name in ours
    ]
    return rows, ratios


def main() -> None:
    """One table."""
    rows, ratios = tables(measure(parse(LINK)))
    count = sum(parameter.numel() for parameter in BytesGPT(SIZE).model().parameters())
    legend = (
        f"Byte-level transformer of {count / 1e6:.2f} million parameters, AdamW, {ISLANDS} islands of {SHARDS} processes on "
        f"one machine. Each island is a network namespace with one cable of {LINK} (tbf both ways); inside, ranks use loopback "
        f"without a limit. 'share': the time of silent(), which sends nothing between islands, over this one's: the median of "
        f"{ROUNDS} repeats, each beside the {BESIDE} steps of silent() before and after it, +- its standard error; 'best': of "
        "the quickest blocks. 'kB': what the kernel counted on the first island's cable, a step, of both ranks together; 'kB "
        f"counted': what laconic did. A block has {FEW} steps, or {LONG} of those that average seldom: whole periods."
    )
    report("sharded_rates", f"Step rate on islands, link between islands: {LINK}", rows, legend, ratios)


if __name__ == "__main__":
    host(*map(int, sys.argv[2:])) if "--host" in sys.argv else main()
