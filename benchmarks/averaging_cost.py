"""What averaging a model's parameters costs beside torch's PeriodicModelAverager: time, memory, and over a slow link."""

import json
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.harness import Ratio, Timing, interleave, limit_loopback, on_private_link, peak_extra_bytes, ratio, report
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.local.parameter_averaging import ParameterAverager
from tests.live import last_ranks, ranks_within

WORLD, REPEATS, RATES_MBIT = 2, 12, [0, 1000]


def model() -> nn.Module:
    """50 million parameters: an embedding, sixteen blocks' worth of matrices and vectors."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512), nn.LayerNorm(512)) for _ in range(16)]
    return nn.Sequential(nn.Embedding(32000, 512), *blocks)


def alternatives() -> dict[str, Callable[[], Callable[[], object]]]:
    """Each with a model of its own, built when it is called for."""

    def theirs() -> Callable[[], object]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "When period is 1")
            averager, mine = PeriodicModelAverager(period=1, warmup_steps=0), model()
        # torch averages parameters that have a gradient, and no others.
        for parameter in mine.parameters():
            parameter.grad = torch.empty(1).expand(parameter.shape)
        return lambda: averager.average_parameters(mine.parameters())

    def ours(atomic: bool) -> Callable[[], object]:
        group, mine = TorchGroup(dist.group.WORLD), model()  # type: ignore[arg-type]
        averager = ParameterAverager(dict(mine.named_parameters()), Ledger())
        return lambda: averager.average(group, atomic=atomic)

    return {"torch": theirs, "laconic": lambda: ours(False), "laconic, atomic": lambda: ours(True)}


def measure(rank: int, repeats: int) -> dict[str, Timing]:
    """Seconds."""
    runs = {name: build() for name, build in alternatives().items()}
    for run in runs.values():
        run()
    return interleave(runs, repeats, 1)


def memory(rank: int, name: str) -> int:
    """Bytes."""
    run = alternatives()[name]()
    run()
    return peak_extra_bytes(run)


def inside(rate_mbit: int) -> None:
    """In a namespace whose loopback is limited."""
    limit_loopback(rate_mbit)
    timings = ranks_within(1200, WORLD, measure, REPEATS if rate_mbit == 0 else 4)[0]
    print(json.dumps({name: timing.seconds for name, timing in timings.items()}), flush=True)


def main() -> None:
    """All of it."""
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for rate in RATES_MBIT:
        found = json.loads(on_private_link("benchmarks.averaging_cost", rate, capture=True))
        timings = {name: Timing(seconds) for name, seconds in found.items()}
        theirs = timings["torch"]
        for name, ours in timings.items():
            rows.append(
                {
                    "link": f"{rate} Mbit/s" if rate else "no limit",
                    "what": "time, ms",
                    "who": name,
                    "best": f"{ours.best * 1e3:.0f}",
                    "best, relative": f"{ours.best / theirs.best:.2f}",
                    "median, relative": f"{ours.median / theirs.median:.2f}",
                }
            )
            if name != "torch":
                ratios.append(ratio(f"{name}: time, {rate or 'unlimited'} Mbit/s", ours, theirs))
    peaks = {name: last_ranks(WORLD, memory, name)[0] for name in alternatives()}
    for name, peak in peaks.items():
        relative = peak / peaks["torch"]
        rows.append(
            {
                "link": "",
                "what": "peak extra memory, MB",
                "who": name,
                "best": f"{peak / 1e6:.0f}",
                "best, relative": f"{relative:.2f}",
                "median, relative": f"{relative:.2f}",
            }
        )
        if name != "torch":
            ratios.append(Ratio(f"{name}: peak extra memory", relative, 0.05))
    legend = (
        f"One averaging of {sum(p.numel() for p in model().parameters()) / 1e6:.0f} million fp32 parameters, {WORLD} processes "
        f"on one machine's loopback, {REPEATS} interleaved repeats (4 over the limited link). Memory: pages held "
        "beyond those of the model, at most. Atomic: nothing is written before all has arrived, as in strategies by default."
    )
    report("averaging_cost", "Averaging parameters, beside torch's PeriodicModelAverager", rows, legend, ratios)


if __name__ == "__main__":
    inside(int(sys.argv[-1])) if "--inside" in sys.argv else main()
