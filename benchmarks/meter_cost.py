"""What the meter costs: one run, in which it is off, on, or looking into the layers, block by block in turn."""

import statistics
import tempfile
import time

import torch

import laconic
from benchmarks.harness import median_error, report, stack, stepper
from laconic.run.run import engine_of
from tests.live import ranks_within

LAYERS, WIDTH, BATCH, BLOCK, ROUNDS, EVERY = 8, 512, 64, 20, 50, 100
STRATEGIES = {"ddp()": BLOCK, "int8()": BLOCK, f"diloco({BLOCK})": 1}  # and the exchanges of a block that can be looked into


class Timed:
    """A meter, and the seconds in its own code."""

    def __init__(self, meter: laconic.Meter) -> None:
        self.meter, self.seconds = meter, 0.0

    def stepped(self) -> None:
        """A step is complete."""
        start = time.perf_counter()
        self.meter.stepped()
        self.seconds += time.perf_counter() - start

    def ended(self, failure: str | None) -> None:
        """The run is over."""
        self.meter.ended(failure)


def measure(rank: int, text: str, folder: str) -> tuple[dict[str, list[float]], float]:
    """Seconds of each block, by what the meter did in it; and seconds a step in the meter's own code, where it is on."""
    model = stack(LAYERS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = laconic.attach(model, optimizer, text)
    inspector = engine_of(run).inspector
    meter, own = Timed(laconic.Meter(run, folder, every=0)), 0.0
    block = stepper(model, optimizer, torch.ones(BATCH, WIDTH), BLOCK)
    seconds: dict[str, list[float]] = {"off": [], "on": [], "looking": []}
    for round_ in range(ROUNDS):
        names = list(seconds)[round_ % 3 :] + list(seconds)[: round_ % 3]
        for name in names:
            engine_of(run).observers[:] = [] if name == "off" else [meter]
            inspector.watching, inspector.looking = name != "off", name == "looking"
            meter.meter._every = int(name == "looking")
            meter.seconds = 0.0
            start = time.perf_counter()
            block()
            seconds[name].append(time.perf_counter() - start)
            own += meter.seconds if name == "on" else 0.0
    engine_of(run).observers[:] = [meter]
    run.detach()
    return seconds, own / (ROUNDS * BLOCK)


def main() -> None:
    """Two ranks, one core each."""
    rows = []
    for text, looks in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as folder:
            seconds, own = ranks_within(600, 2, measure, text, folder)[0]
        off = statistics.median(seconds["off"])
        on = [a / b - 1 for a, b in zip(seconds["on"], seconds["off"], strict=True)]
        look = [(a - b) / looks / EVERY / (off / BLOCK) for a, b in zip(seconds["looking"], seconds["on"], strict=True)]
        both = statistics.median(on) + statistics.median(look)
        rows.append(
            {
                "strategy": text,
                "step ms": f"{off / BLOCK * 1e3:.1f}",
                "own code": f"{own / (off / BLOCK):+.2%}",
                "a row a step": f"{statistics.median(on):+.2%}",
                f"a look every {EVERY} steps": f"{statistics.median(look):+.2%}",
                "both": f"{both:+.2%}",
                "standard error": f"{(median_error(on) ** 2 + median_error(look) ** 2) ** 0.5:.2%}",
            }
        )
    legend = (
        f"Whole training step, {LAYERS} layers of {WIDTH}x{WIDTH}, 2 ranks over loopback without limit. Median over {ROUNDS} "
        f"rounds of three blocks of {BLOCK} steps: without the meter, with it, and with a look into all layers at every "
        f"exchange, whose cost is then divided as if it came every {EVERY} steps. All relative to the step without the "
        "meter. Own code: the time inside the meter's own function, which needs no difference of two noisy numbers."
    )
    report("meter_cost", "What the meter adds to a step", rows, legend)


if __name__ == "__main__":
    main()
