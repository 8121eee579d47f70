"""How long training stands still for a checkpoint: written at once, or while training goes on."""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import report
from tests.live import ranks_within

WORLD, REPEATS, STEPS, WIDTH, LAYERS = 2, 6, 12, 1024, 12


def measure(rank: int, folder: str) -> dict[str, list[float]]:
    """Seconds of: one step; the call of a save, both ways; and of the steps during an asynchronous one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = laconic.attach(model, optimizer, "diloco(8)")
    seconds: dict[str, list[float]] = {"step": [], "blocking": [], "asynchronous": [], "step meanwhile": [], "end": []}

    def steps(into: list[float], count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            model(torch.ones(32, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            into.append(time.perf_counter() - start)

    steps([], 8)
    for _ in range(REPEATS):
        steps(seconds["step"], STEPS)
        start = time.perf_counter()
        laconic.checkpoint.save(Path(folder) / "blocking", run=run, keep=1)
        seconds["blocking"].append(time.perf_counter() - start)
        steps([], STEPS)
        start = time.perf_counter()
        saving = laconic.checkpoint.save(Path(folder) / "asynchronous", run=run, keep=1, asynchronous=True)
        seconds["asynchronous"].append(time.perf_counter() - start)
        steps(seconds["step meanwhile"], STEPS)  # as many on both ranks
        start = time.perf_counter()
        saving.wait()
        seconds["end"].append(time.perf_counter() - start)
    run.sync()
    run.detach()
    return seconds


def main() -> None:
    """Two ranks, one core each, and a disk that both write to."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = ranks_within(900, WORLD, measure, folder)[0]
        bytes_ = sum(file.stat().st_size for file in Path(folder).glob("blocking/*/*"))
    typical = {name: statistics.median(times) for name, times in seconds.items()}
    slower = sum(each - typical["step"] for each in seconds["step meanwhile"]) / REPEATS
    rows: list[dict[str, object]] = [
        {
            "save": name,
            "call, ms": f"{typical[name] * 1e3:.0f}",
            "share of blocking": f"{typical[name] / typical['blocking']:.3f}",
            "steps slower by, ms": f"{lost * 1e3:.0f}",
            "lost in all, share": f"{(typical[name] + lost) / typical['blocking']:.3f}",
        }
        for name, lost in (("blocking", 0.0), ("asynchronous", slower))
    ]
    legend = (
        f"A checkpoint of {bytes_ / 1e6:.0f} MB ({WORLD} ranks, {LAYERS} layers of {WIDTH}x{WIDTH}, AdamW, diloco with its "
        f"anchors): median of {REPEATS} saves, alternating. 'call': the training thread stands still. 'steps slower by': what "
        f"the steps during the write took longer in all, because both ranks' threads share {WORLD} cores with the writers; an "
        f"undisturbed step takes {typical['step'] * 1e3:.0f} ms, {typical['step meanwhile'] * 1e3:.0f} ms meanwhile. "
        f"After those {STEPS} steps the write had {typical['end'] * 1e3:.0f} ms to go, which nobody has to wait for."
    )
    report("checkpoint_cost", "Standing still for a checkpoint", rows, legend)


if __name__ == "__main__":
    main()
