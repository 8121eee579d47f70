"""What starting a run costs: attach and the first training step beside a plain DDP's first step, in new processes.

python -m benchmarks.first_step --profile "int8()"   # where the time goes, by cProfile, on the first rank
"""

import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import Ratio, Timing, ratio, report
from laconic.kernels import compiling
from laconic.run.state import kernels_of
from laconic.strategies.parsing import strategy as parse

WORLD, REPEATS, LAYERS, WIDTH, BATCH, STEPS = 2, 11, 100, 256, 64, 30
TARGET = 1.1
LIMIT_SECONDS = 120
DDP, HOOK = "torch DDP", "torch allreduce_hook"
STRATEGIES = ["ddp()", "int8()", "powersgd(rank=4)", "powersgd(rank=4, warmup=0)"]
COLD, WARM = ", empty cache", ", compiled before"


def labels() -> list[str]:
    """What is compared: with an empty cache and a full one where there is something to compile."""
    found = [DDP, HOOK]
    for name in STRATEGIES:
        found += [name + COLD, name + WARM] if kernels_of(parse(name)) else [name]
    return found


def begin(ddp: DistributedDataParallel, strategy: str) -> tuple[Callable[[], None], object]:
    """Attach, and what one training step is."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    run = None
    if strategy == HOOK:
        ddp.register_comm_hook(None, allreduce_hook)
    elif strategy:
        run = laconic.attach(ddp, optimizer, strategy)
    batch = torch.ones(BATCH, WIDTH)

    def step() -> None:
        ddp(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, run


def inside(strategy: str, rank: int, store: str, profile: bool) -> None:
    """One rank: seconds from the finished DDP to the end of the first step, and of the steps after it."""
    torch.set_num_threads(1)
    _ = laconic.attach  # what it imports has a benchmark of its own
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    module = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    ddp = DistributedDataParallel(module)
    profiler = cProfile.Profile() if profile and rank == 0 else None
    dist.barrier()
    if profiler is not None:
        profiler.enable()
    start = time.perf_counter()
    step, run = begin(ddp, strategy)
    attached = time.perf_counter()
    step()
    first = time.perf_counter()
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    later = []
    for _ in range(STEPS - 1):
        began = time.perf_counter()
        step()
        later.append(time.perf_counter() - began)
    compiling._later.clear()  # it would run beside the next one
    dist.barrier()
    if rank == 0:
        print(json.dumps({"attach": attached - start, "first": first - start, "later": statistics.median(later)}), flush=True)
    del run
    dist.destroy_process_group()


def started(label: str, *, profile: bool = False) -> dict[str, float]:
    """One run in new processes; what the first rank found."""
    strategy = "" if label == DDP else label.removesuffix(COLD).removesuffix(WARM)
    with tempfile.TemporaryDirectory() as folder:
        empty = {"LACONIC_CACHE": str(Path(folder, "cache"))} if label.endswith(COLD) else {}
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(WORLD):
            arguments = ["--inside", strategy, str(rank), str(Path(folder, "store")), *(["--profile"] if profile else [])]
            command = [sys.executable, "-m", "benchmarks.first_step", *arguments]
            environment = {**os.environ, **empty, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        try:
            outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    failed = [process.returncode for process in ranks if process.returncode]
    if failed:
        raise SystemExit(f"{label}: a rank ended with {failed[0]}")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def measured(repeats: int = REPEATS) -> dict[str, list[dict[str, float]]]:
    """Each alternative once a round, in turn."""
    kernels = [kernel for name in STRATEGIES for kernel in kernels_of(parse(name))]
    compiling.prepare(kernels, True, torch.device("cpu"))
    found: dict[str, list[dict[str, float]]] = {label: [] for label in labels()}
    for _ in range(repeats):
        for label, runs in found.items():
            runs.append(started(label))
    return found


def tables(found: dict[str, list[dict[str, float]]]) -> tuple[list[dict[str, object]], list[Ratio]]:
    """Rows, and what is to be watched."""
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    timings: dict[tuple[str, str], Timing] = {
        (label, what): Timing([run[what] for run in runs])
        for label, runs in found.items()
        for what in ("attach", "first", "later")
    }
    for label in found:
        first = ratio(f"{label}: attach and first step over DDP's", timings[label, "first"], timings[DDP, "first"])
        later = ratio(f"{label}: steps after it over DDP's", timings[label, "later"], timings[DDP, "later"])
        row: dict[str, object] = {
            "": label,
            "attach, ms": f"{timings[label, 'attach'].median * 1e3:.0f}",
            "and first step, ms": f"{timings[label, 'first'].median * 1e3:.0f}",
            "over DDP's": _with_error(first),
            f"steps 2 to {STEPS}, ms": f"{timings[label, 'later'].median * 1e3:.1f}",
            "over DDP's steps": _with_error(later),
            "over steps with compiled kernels": "",
        }
        if label.endswith(COLD):
            warm = label.removesuffix(COLD) + WARM
            beside = ratio(
                f"{label}: steps beside the compiler over steps without", timings[label, "later"], timings[warm, "later"]
            )
            row["over steps with compiled kernels"] = _with_error(beside)
            ratios.append(beside)
        if label not in (DDP, HOOK):
            ratios.append(first)
        rows.append(row)
    return rows, ratios


def _with_error(one: Ratio) -> str:
    return f"{one.value:.2f} ± {one.noise * one.value:.2f}"


def main() -> None:
    """One table."""
    rows, ratios = tables(measured())
    legend = (
        f"From a finished DDP to the end of the first training step, and the median step after it, to step {STEPS}: "
        f"{LAYERS} layers of {WIDTH}x{WIDTH}, batches of {BATCH}, SGD, {WORLD} new processes each time, all imported before. "
        f"Medians of {REPEATS} interleaved repeats and their standard errors, pair by pair. With an empty cache, nothing is "
        f"compiled before the end. '{HOOK}': what torch itself asks for a hook. At most {TARGET} of DDP's first step."
    )
    report("first_step", "The first step", rows, legend, ratios)


def _command(arguments: list[str]) -> Any:
    if arguments[:1] == ["--inside"]:
        return inside(arguments[1], int(arguments[2]), arguments[3], "--profile" in arguments)
    if arguments[:1] == ["--profile"]:
        return print(started(arguments[1] if len(arguments) > 1 else DDP, profile=True))
    return main()


if __name__ == "__main__":
    _command(sys.argv[1:])
