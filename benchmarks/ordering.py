"""When should a bucket's second round leave? Measured, because docs/ordering.md has to say why.

A two-round reducer (`Cast`, all-to-all then all-gather) on a model of many buckets, two ranks, over links of several
speeds: the next round leaves 1, 2 or 4 buckets later, or all of them after the last bucket.
"""

import sys

import torch

import laconic
from benchmarks.harness import Timing, interleave, limit_loopback, on_private_link, relative, report, stack, stepper
from laconic.gradients.dispatcher import Dispatcher
from tests.live import ranks_within

DEPTHS = {"1 later": 1, "2 later": 2, "4 later": 4, "at the end": 10_000}
LINKS_MBIT = [4000, 1500, 500]
LAYERS, WIDTH, BATCH, STEPS, REPEATS = 16, 768, 256, 3, 10


def measure(rank: int) -> dict[str, Timing]:
    """Seconds a step under each rule."""
    alternatives = {}
    for name, depth in DEPTHS.items():
        model = stack(LAYERS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        laconic.attach(model, optimizer, "bf16()")
        target = Dispatcher.of(model).target
        assert target is not None
        target._depth = depth
        alternatives[name] = stepper(model, optimizer, torch.ones(BATCH, WIDTH), STEPS)
    return interleave(alternatives, REPEATS, STEPS)


def main() -> None:
    """Every link in turn, each in a namespace of its own."""
    for rate in LINKS_MBIT:
        on_private_link("benchmarks.ordering", rate)


def inside(rate_mbit: int) -> None:
    """One link."""
    limit_loopback(rate_mbit)
    rows = relative(ranks_within(900, 2, measure)[0], "next round leaves", "at the end")
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
