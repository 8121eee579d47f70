"""When should a bucket's second round leave? Measured, because docs/ordering.md has to say why.

A two-round reducer (`Cast`, all-to-all then all-gather) on a model of many buckets, two ranks, over links of several
speeds: the next round leaves 1, 2 or 4 buckets later, or all of them after the last bucket.
"""

import sys

import torch
from torch import nn

import laconic
from benchmarks.harness import interleave, limit_loopback, on_private_link, report
from laconic.hook import Dispatcher
from tests.ranks import ranks_within

DEPTHS = {"1 later": 1, "2 later": 2, "4 later": 4, "at the end": 10_000}
LINKS_MBIT = [4000, 1500, 500]
LAYERS, WIDTH, BATCH, STEPS, REPEATS = 16, 768, 256, 3, 10


def measure(rank: int) -> dict[str, tuple[float, float]]:
    """Seconds a step, best and median, for each rule."""
    alternatives = {}
    for name, depth in DEPTHS.items():
        torch.manual_seed(0)
        module = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
        model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        laconic.attach(model, optimizer, "bf16()")
        target = Dispatcher.of(model).target
        assert target is not None
        target._depth = depth

        def steps(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(STEPS):
                model(torch.ones(BATCH, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        alternatives[name] = steps
        steps()
    return {name: (t.best / STEPS, t.median / STEPS) for name, t in interleave(alternatives, REPEATS).items()}


def main() -> None:
    """Every link in turn, each in a namespace of its own."""
    for rate in LINKS_MBIT:
        on_private_link("benchmarks.ordering", rate)


def inside(rate_mbit: int) -> None:
    """One link."""
    limit_loopback(rate_mbit)
    timings = ranks_within(900, 2, measure)[0]
    base = timings["at the end"]
    rows = [
        {"next round leaves": name, "best ms": f"{best * 1e3:.1f}", "median ms": f"{median * 1e3:.1f}",
         "best, relative": f"{best / base[0]:.3f}", "median, relative": f"{median / base[1]:.3f}"}
        for name, (best, median) in timings.items()
    ]  # fmt: skip
    legend = (
        f"Step time of bf16() on {LAYERS} layers of {WIDTH}x{WIDTH} (2 MB buckets), 2 ranks, all traffic over one loopback "
        f"limited to {rate_mbit} Mbit/s. {REPEATS} interleaved repeats of {STEPS} steps; relative to the last row."
    )
    report(f"ordering-{rate_mbit}mbit", f"When the second round leaves, {rate_mbit} Mbit/s", rows, legend)


if __name__ == "__main__":
    if "--inside" in sys.argv:
        inside(int(sys.argv[-1]))
    else:
        main()
