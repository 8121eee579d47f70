"""What the meter costs: the same model with and without it, interleaved in the same processes."""

import tempfile

import torch

import laconic
from benchmarks.harness import Timing, interleave, relative, report, stack, stepper
from tests.ranks import ranks_within

# As many steps as lie between two looks into the layers, so that each repeat has one.
LAYERS, WIDTH, BATCH, STEPS, REPEATS = 8, 512, 64, 100, 12
STRATEGIES = ["ddp()", "int8()", "diloco(20)"]


def measure(rank: int, folder: str) -> dict[str, Timing]:
    """Seconds a step of each strategy, metered and not."""
    alternatives = {}
    for text in STRATEGIES:
        for metered in (False, True):
            model = stack(LAYERS, WIDTH)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            run = laconic.attach(model, optimizer, text)
            name = f"{text}, metered" if metered else text
            if metered:
                laconic.Meter(run, f"{folder}/{name}")
            alternatives[name] = stepper(model, optimizer, torch.ones(BATCH, WIDTH), STEPS)
    return interleave(alternatives, REPEATS, STEPS)


def main() -> None:
    """Two ranks, one core each."""
    with tempfile.TemporaryDirectory() as folder:
        timings = ranks_within(1500, 2, measure, folder)[0]
    rows = [
        row
        for text in STRATEGIES
        for row in relative({name: timing for name, timing in timings.items() if name.startswith(text)}, "strategy", text)
    ]
    legend = (
        f"Whole training step, {LAYERS} layers of {WIDTH}x{WIDTH}, 2 ranks over loopback without limit. {REPEATS} interleaved "
        f"repeats of {STEPS} steps, each with one look into all layers; relative to the same strategy without the meter."
    )
    report("meter_cost", "Step time with the meter", rows, legend)


if __name__ == "__main__":
    main()
