"""Loss for seconds and bytes: a transformer of two million parameters behind 100 Mbit/s, equal samples, three seeds."""

import gc
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness, peers
from benchmarks.harness import Ratio, report
from laconic.cost.link import parse
from laconic.lab.link import sent_bytes, start
from laconic.lab.tasks import BytesGPT
from laconic.report.summary import seconds_to

HOSTS, LINK, SIZE, SEEDS = 4, "100mbit", "2m", (0, 1, 2)
STEPS, LONGER = 192, 240  # LONGER: a quarter more, for those that are nearly as fast as no communication at all
DDP, OURS = "torch DDP", f"laconic {peers.STREAMING}"
FRAGMENTS = f"torchft DiLoCo, {peers.PERIOD}, 4 fragments, delay 5"
ALL: Mapping[str, peers.Making] = {**peers.TORCH, **peers.ACCELERATE, **peers.TORCHFT, **peers.OURS, **peers.LIMIT}
# What runs, in this order, and its steps.
RUNS: dict[str, tuple[str, int]] = {
    peers.SILENT: (peers.SILENT, 48),
    DDP: (DDP, STEPS),
    "torch powerSGD_hook, rank 4": ("torch powerSGD_hook, rank 4", STEPS),
    f"torch post-local SGD, {peers.PERIOD}": (f"torch post-local SGD, {peers.PERIOD}", STEPS),
    **{name: (name, STEPS) for name in (*peers.ACCELERATE, *peers.TORCHFT)},
    "laconic int8()": ("laconic int8()", STEPS),
    "laconic streaming_diloco": (OURS, STEPS),
    f"{FRAGMENTS}, a quarter longer": (FRAGMENTS, LONGER),
    "laconic streaming_diloco, a quarter longer": (OURS, LONGER),
}


@contextmanager
def averaged(one: peers.Trainee) -> Iterator[nn.Module]:
    """The module with the mean of the replicas' parameters in it, whoever trains it; then its own again."""
    module: nn.Module = getattr(one.model, "module", one.model)
    kept = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters() if one.period > 1 else ():
            dist.all_reduce(parameter.detach())
            parameter.div_(HOSTS)
        yield module
        for parameter, mine in zip(module.parameters(), kept, strict=True):
            parameter.copy_(mine)


def train(name: str, steps: int, seed: int) -> dict[str, Any]:
    """One run: (seconds, loss) now and then, and what the cable carried."""
    task = BytesGPT(SIZE)
    torch.manual_seed(seed)
    one = ALL[name](task.model(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    inner = getattr(one.optimizer, "optim", getattr(one.optimizer, "optimizer", one.optimizer))  # unwrapped
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: min(1, (step + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1)))
    )
    batches = task.batches(dist.get_rank(), HOSTS, seed)
    seconds, sent, curve = 0.0, 0, []
    for step in range(1, steps + 1):
        if step % peers.PERIOD == 1:
            dist.barrier()
            before, began = sent_bytes(), time.perf_counter()
        one.step(next(batches))
        schedule.step()
        if step % peers.PERIOD == 0:
            dist.barrier()
            seconds += time.perf_counter() - began
            sent += (sent_bytes() or 0) - (before or 0)
            with averaged(one) as module:
                loss = task.evaluate(module) if dist.get_rank() == 0 else 0.0
            curve.append((seconds, loss))
    one.stack.close()
    return {"curve": curve, "sent": sent, "steps": steps}


def run_all(runs: Iterable[tuple[str, int, Callable[[], dict[str, Any]]]]) -> None:
    """As one of the hosts: run after run, each with its label and seed; the first host prints what comes of it."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for label, seed, run in runs:
        found = run()
        gc.collect()
        if dist.get_rank() == 0:
            print(json.dumps({"label": label, "seed": seed, **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def host() -> None:
    """All runs of all seeds."""
    run_all((label, seed, partial(train, name, steps, seed)) for seed in SEEDS for label, (name, steps) in RUNS.items())


def measure(module: str, link: str, *arguments: str) -> list[dict[str, Any]]:
    """Four hosts that run a benchmark's `host()`; every run as it comes."""
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    found, said = [], []
    with start([sys.executable, "-m", module, "--host", *arguments], HOSTS, parse(link), environment) as process:
        for line in process.stdout or ():
            said.append(line)
            if line.startswith('{"label"'):
                found.append(json.loads(line))
                seconds, loss = found[-1]["curve"][-1]
                print(f"seed {found[-1]['seed']}, {found[-1]['label']}: {seconds:.0f} s, loss {loss:.4f}", flush=True)
    if process.returncode:
        raise SystemExit(f"the hosts ended with {process.returncode}:\n{''.join(said[-40:])}")
    return found


def main() -> None:
    """One table."""
    found = measure("benchmarks.learning", LINK)
    by = {label: {run["seed"]: run for run in found if run["label"] == label} for label in RUNS}
    finals = {seed: run["curve"][-1][1] for seed, run in by[DDP].items()}
    silent = {seed: run["curve"][-1][0] / run["steps"] * STEPS for seed, run in by[peers.SILENT].items()}
    rows, ratios = [], []
    for label, runs in by.items():
        if label == peers.SILENT:
            continue
        losses = [run["curve"][-1][1] / finals[seed] for seed, run in runs.items()]
        times = [seconds_to(run["curve"], finals[seed]) for seed, run in runs.items()]
        reached = [time_ / silent[seed] for seed, time_ in zip(runs, times, strict=True) if time_ is not None]
        bytes_ = [run["sent"] / by[DDP][seed]["sent"] for seed, run in runs.items()]
        rows.append(
            {
                "": label,
                "steps": next(iter(runs.values()))["steps"],
                "final loss": f"{statistics.mean(run['curve'][-1][1] for run in runs.values()):.4f}",
                "relative to DDP's": " ".join(f"{loss:.4f}" for loss in losses),
                "bytes, of DDP's": f"1/{1 / statistics.mean(bytes_):.0f}",
                "seconds": f"{statistics.mean(run['curve'][-1][0] for run in runs.values()):.0f}",
                "time to DDP's loss, of the silent run's": " ".join(f"{time_:.2f}" for time_ in reached) or "never",
                "reached by": f"{len(reached)} of {len(runs)}",
            }
        )
        if label.startswith("laconic"):
            ratios.append(
                Ratio(f"{label}, final loss over DDP's", statistics.mean(losses), statistics.stdev(losses) / len(losses) ** 0.5)
            )
            ratios.append(Ratio(f"{label}, bytes over DDP's", statistics.mean(bytes_)))
    legend = (
        f"Byte-level transformer of 2.1 million parameters, SGD with momentum and a cosine, {HOSTS} processes behind "
        f"{LINK} links on one machine, batch {BytesGPT.BATCH} x {BytesGPT.CONTEXT} each, {len(SEEDS)} seeds, one after "
        "the other in the same processes. Held-out loss of the mean of the replicas, for everybody. All bytes that the kernel "
        f"counted. The last column but one: seconds until DDP's final loss, over those that {STEPS} silent steps take, "
        "seed by seed."
    )
    report("learning", "Loss for seconds and bytes", rows, legend, ratios)
    curves = {label: next(iter(runs.values()))["curve"] for label, runs in by.items() if label != peers.SILENT}
    (harness.RESULTS / "learning_curves.json").write_text(json.dumps(curves) + "\n")


if __name__ == "__main__":
    host() if "--host" in sys.argv else main()
