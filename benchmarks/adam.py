"""AdamW from a warm model, in real processes behind 100 Mbit/s: ours, torchft's DiLoCo and accelerate's LocalSGD.

The learning rate is the one that `frontier` finds best for DDP with this model and batch. torchft and accelerate send fp32
here: what torchft has to send less needs a GPU.
"""

import math
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import peers
from benchmarks.harness import Ratio, report
from benchmarks.learning import HOSTS, averaged, measure, run_all
from laconic.lab.link import sent_bytes
from laconic.lab.tasks import BytesGPT

LINK, SIZE, SEEDS, WARM, STEPS, RATE = "100mbit", "500k", (0, 1, 2), 700, 320, 4e-3
UNTIMED = 16  # the first steps build buckets and caches
DDP = "torch DDP"


def ours(strategy: str, period: int = 1) -> tuple[str, peers.Making]:
    """A strategy by its own name."""
    return f"laconic {strategy}", peers.laconics(strategy, period)


RUNS: dict[str, peers.Making] = {
    DDP: peers.torch_ddp,
    "accelerate LocalSGD, 4": peers.accelerate_local(4),
    "accelerate LocalSGD, 16": peers.accelerate_local(16),
    "torchft DiLoCo, 16, outer 0.7/0.9": peers.torchft_diloco(1, 0, 16, 0.7, 0.9),
    "torchft DiLoCo, 16, outer 0.7/0.6": peers.torchft_diloco(1, 0, 16, 0.7, 0.6),
    "torchft DiLoCo, 4, outer 1/0": peers.torchft_diloco(1, 0, 4, 1.0, 0.0),
    **dict(
        [
            ours("int4()"),
            ours("local_adam(2, warmup=0)", 2),
            ours("local_adam(warmup=0)", 4),
            ours("local_adam(warmup=0, delay=1)", 4),
            ours("diloco(16, reducer=Quantized(8))", 16),
        ]
    ),
    peers.SILENT: peers.laconics("silent()", 16),
}


def optimizer(model: nn.Module) -> Optimizer:
    """AdamW as in the simulation."""
    return AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)


def warm(seed: int, path: Path) -> dict[str, Any]:
    """DDP at a constant rate; the first host keeps what comes of it."""
    task = BytesGPT(SIZE)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.model())
    one = peers.Trainee(ddp, optimizer(ddp))
    batches = task.batches(dist.get_rank(), HOSTS, seed + 1000)
    for step in range(WARM):
        one.optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 40)
        one.step(next(batches))
    if dist.get_rank() == 0:
        torch.save((ddp.module.state_dict(), one.optimizer.state_dict()), path)
    return {"curve": [(0.0, task.evaluate(ddp.module))]}


def train(name: str, seed: int, path: Path) -> dict[str, Any]:
    """One run from the warm model: its final loss, its pace, and what the cable carried."""
    task = BytesGPT(SIZE)
    weights, memory = torch.load(path)
    model = task.model()
    model.load_state_dict(weights)

    def resumed(module: nn.Module) -> Optimizer:
        found = optimizer(module)
        found.load_state_dict(memory)
        found.param_groups[0]["lr"] = RATE
        return found

    one = RUNS[name](model, resumed)
    inner = getattr(one.optimizer, "optim", getattr(one.optimizer, "optimizer", one.optimizer))  # unwrapped
    schedule = LambdaLR(inner, lambda step: 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
    batches = task.batches(dist.get_rank(), HOSTS, seed)
    before = sent_bytes()
    for step in range(STEPS):
        if step == UNTIMED:
            dist.barrier()
            began = time.perf_counter()
        one.step(next(batches))
        schedule.step()
    dist.barrier()
    seconds = time.perf_counter() - began
    sent = (sent_bytes() or 0) - (before or 0)
    with averaged(one) as module:
        loss = task.evaluate(module) if dist.get_rank() == 0 else 0.0
    one.stack.close()
    return {"curve": [(seconds, loss)], "sent": sent / STEPS, "step": seconds / (STEPS - UNTIMED)}


def host(what: str, folder: Path) -> None:
    """Warm models of all seeds, or all runs of all seeds; each seed begins with another one."""
    paths = {seed: folder / f"{seed}.pt" for seed in SEEDS}
    if what == "warm":
        run_all(("warm", seed, partial(warm, seed, path)) for seed, path in paths.items())
        return
    names, shift = [*RUNS], len(RUNS) // len(SEEDS)
    turns = {seed: names[seed * shift :] + names[: seed * shift] for seed in SEEDS}
    run_all((label, seed, partial(train, label, seed, paths[seed])) for seed in SEEDS for label in turns[seed])


def main() -> None:
    """One table."""
    with tempfile.TemporaryDirectory() as folder:
        measure("benchmarks.adam", "none", "warm", folder)
        found = measure("benchmarks.adam", LINK, "run", folder)
    by = {label: {run["seed"]: run for run in found if run["label"] == label} for label in RUNS}
    rows, ratios = [], []
    for label, runs in by.items():
        above = [100 * (run["curve"][-1][1] / by[DDP][seed]["curve"][-1][1] - 1) for seed, run in runs.items()]
        rates = [by[peers.SILENT][seed]["step"] / run["step"] for seed, run in runs.items()]
        sent = statistics.mean(run["sent"] for run in runs.values())
        part = statistics.mean(run["sent"] for run in by[DDP].values()) / sent
        rows.append(
            {
                "": label,
                "loss": f"{statistics.mean(run['curve'][-1][1] for run in runs.values()):.4f}",
                "above DDP, %": f"{statistics.mean(above):+.2f} ± {statistics.stdev(above):.2f}",
                "kB a step": f"{sent / 1e3:.1f}",
                "bytes": f"1/{part:.1f}" if label != peers.SILENT else "0",
                "ms a step": f"{statistics.mean(run['step'] for run in runs.values()) * 1e3:.1f}",
                "share of the silent rate": f"{statistics.mean(rates):.2f}",
            }
        )
        if label.startswith("laconic"):
            error = statistics.stdev(above) / 100 / len(above) ** 0.5
            ratios.append(Ratio(f"{label}, final loss over DDP's", 1 + statistics.mean(above) / 100, error))
    legend = (
        f"Byte-level transformer of 0.47 million parameters, {HOSTS} processes behind {LINK} links on one machine, "
        f"batch {BytesGPT.BATCH} x {BytesGPT.CONTEXT} each; AdamW, lr {RATE:g}, betas 0.9, 0.95, weight decay 0.01, "
        f"norms clipped to 1; {WARM} steps of DDP, then {STEPS} with a cosine. Held-out loss of the mean of the replicas, "
        f"in percent above DDP's with the same seed: mean and standard deviation over {len(SEEDS)} seeds. "
        f"Bytes as the kernel counted them, of the first process; time without the first {UNTIMED} steps."
    )
    report("adam", "AdamW from a warm model, in real processes", rows, legend, ratios)


if __name__ == "__main__":
    host(sys.argv[2], Path(sys.argv[3])) if "--host" in sys.argv else main()
