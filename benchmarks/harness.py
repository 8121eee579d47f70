"""What benchmarks share: live ranks, interleaved timing, a private slow link, and a table with the machine below it."""

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.kernels.compiling import prepare
from laconic.kernels.kernel import Kernel
from laconic.reducers import discover

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Timing:
    """Seconds of one alternative, repeat by repeat."""

    seconds: Sequence[float]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """What a benchmark stands for, and `python -m benchmarks check` watches: the smaller, the better."""

    name: str
    value: float
    noise: float = 0.0  # as a share of it: a repetition is that far off, in two cases of three


def ratio(name: str, ours: Timing, theirs: Timing) -> Ratio:
    """The median over repeats of ours to theirs, each pair taken at the same time."""
    pairs = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return Ratio(name, statistics.median(pairs), median_error(pairs) / statistics.median(pairs))


def mean_ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The mean over pairs of ours to theirs, of few whole runs: its noise is what the pairs differ by."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(name, statistics.mean(pairs), statistics.stdev(pairs) / statistics.mean(pairs) if len(pairs) > 1 else 0.0)


def median_error(values: Sequence[float]) -> float:
    """The standard error of a median, from the quartiles, as if they were those of a normal distribution."""
    low, _, high = statistics.quantiles(values)
    return float(1.25 * (high - low) / 1.35 / len(values) ** 0.5)


def interleave(alternatives: Mapping[str, Callable[[], object]], repeats: int, steps: int) -> dict[str, Timing]:
    """Seconds a step of each alternative, each run once a round in turn: a slow moment of the machine hits them all.

    What an alternative has as its `prepare` is called before, untimed. Live ranks start each together: one's tail is not the
    next one's head.
    """
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, run in alternatives.items():
            prepare = getattr(run, "prepare", None)
            if prepare is not None:
                prepare()
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - start) / steps)
    return {name: Timing(all_) for name, all_ in seconds.items()}


@dataclass(frozen=True)
class Extra:
    """Bytes that a process held more than before."""

    peak: int  # at most
    kept: int  # in the end


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """How much more memory the process held at most while `run` ran than before: pages, as Linux counts them."""
    return extra_bytes(run).peak


def extra_bytes(run: Callable[[], object]) -> Extra:
    """The same, and how much more it holds after, as long as what `run` refers to is alive."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once,
    libc.malloc_trim(0)  # and so does what was freed before; else a peak would hide in it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    run()
    peak = _status_bytes("VmHWM") - before
    gc.collect()
    libc.malloc_trim(0)
    return Extra(peak, _status_bytes("VmRSS") - before)


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def compile_all() -> None:
    """Have every kernel compiled, which takes minutes the first time, so that no compiler runs beside what is timed."""
    discover()
    prepare(Kernel.known.values(), True, torch.device("cpu"))


def stack(layers: int, width: int) -> DistributedDataParallel:
    """Square layers, one 2 MB bucket or so each."""
    torch.manual_seed(0)
    module = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])
    return DistributedDataParallel(module, bucket_cap_mb=2)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, steps: int) -> Callable[[], None]:
    """A function that makes so many training steps; it has made some already."""

    def run() -> None:
        for _ in range(steps):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run()
    return run


def relative(timings: Mapping[str, Timing], label: str, base: str) -> list[dict[str, object]]:
    """Rows of a table: milliseconds, and shares of `base`."""
    return [
        {
            label: name,
            "best ms": f"{timing.best * 1e3:.1f}",
            "median ms": f"{timing.median * 1e3:.1f}",
            "best, relative": f"{timing.best / timings[base].best:.3f}",
            "median, relative": f"{timing.median / timings[base].median:.3f}",
        }
        for name, timing in timings.items()
    ]


def machine() -> dict[str, object]:
    """Where the numbers come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def show(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table."""
    columns = list(rows[0])
    cells = [[str(row[column]) for column in columns] for row in rows]
    widths = [max(len(text) for text in texts) for texts in zip(columns, *cells, strict=True)]
    print(f"\n{title}\n")
    for texts in (columns, ["-" * width for width in widths], *cells):
        print("  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip())


def report(name: str, title: str, rows: Sequence[Mapping[str, object]], legend: str, ratios: Sequence[Ratio] = ()) -> None:
    """Print a table and its legend, and keep both as JSON beside the benchmarks, with the ratios that are to be watched."""
    show(title, rows)
    where = machine()
    print(f"\n{legend}\nMachine: {where['cores']} cores, {where['cpu']}; torch {where['torch']}, gloo. Not run on a GPU.")
    RESULTS.mkdir(exist_ok=True)
    watched = {ratio.name: [round(ratio.value, 4), round(ratio.noise, 4)] for ratio in ratios}
    record = {"title": title, "legend": legend, "machine": where, "rows": rows, "ratios": watched}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def on_private_link(module: str, rate_mbit: int | None, *, capture: bool = False) -> str:
    """Run `python -m module` in a network namespace of its own whose loopback carries `rate_mbit` at most; what it printed."""
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", module, "--inside", str(rate_mbit or 0)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE if capture else None, text=True)
    return done.stdout or ""


def limit_loopback(rate_mbit: int) -> None:
    """Inside the namespace: bring loopback up and, above zero, put a token bucket on it."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        lo = netlink.link_lookup(ifname="lo")[0]
        netlink.link("set", index=lo, state="up")
        if rate_mbit:
            netlink.tc("add", "tbf", lo, 0x10000, rate=f"{rate_mbit}mbit", burst=256 * 1024, latency="200ms")
