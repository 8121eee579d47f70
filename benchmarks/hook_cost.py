"""What our hook costs beside torch's own: the same model, the same buckets, interleaved in the same processes."""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

import laconic
from benchmarks.harness import Ratio, Timing, interleave, ratio, relative, report, stack, stepper
from tests.live import ranks_within

LAYERS, WIDTH, BATCH, STEPS, REPEATS, BRIEF_REPEATS = 16, 512, 64, 5, 40, 30
WORLDS = (1, 2, 4)


NAMES = [
    "torch, no hook",
    "torch allreduce_hook",
    "laconic ddp()",
    "torch fp16_compress_hook",
    "laconic fp16()",
    "laconic bf16()",
]


def measure(rank: int, names: Sequence[str], repeats: int) -> dict[str, Timing]:
    """Seconds a step under each hook."""
    alternatives = {}
    for name in names:
        model = stack(LAYERS, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if name == "torch allreduce_hook":
            model.register_comm_hook(None, allreduce_hook)
        elif name == "torch fp16_compress_hook":
            model.register_comm_hook(None, fp16_compress_hook)
        elif name.startswith("laconic"):
            laconic.attach(model, optimizer, name.removeprefix("laconic "))
        alternatives[name] = stepper(model, optimizer, torch.ones(BATCH, WIDTH), STEPS)
    return interleave(alternatives, repeats, STEPS)


PAIRS = {"laconic ddp()": "torch allreduce_hook", "laconic fp16()": "torch fp16_compress_hook"}


def watched(timings: Mapping[str, Timing], world: int = 2) -> list[Ratio]:
    """Our hooks over torch's."""
    where = "" if world == 2 else f", {world} process{'es' if world > 1 else ''}"
    return [
        ratio(f"{ours.removeprefix('laconic ')} over {theirs.removeprefix('torch ')}{where}", timings[ours], timings[theirs])
        for ours, theirs in PAIRS.items()
    ]


def brief() -> list[Ratio]:
    """What is watched, in half the time."""
    return watched(ranks_within(600, 2, measure, NAMES[1:5], BRIEF_REPEATS)[0])


def main() -> None:
    """Worlds of 1, 2 and 4 ranks, one thread each."""
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for world in WORLDS:
        timings = ranks_within(1800, world, measure, NAMES, REPEATS)[0]
        found = watched(timings, world)
        beside = dict(zip(PAIRS, found, strict=True))
        for row in relative(timings, "hook", "torch allreduce_hook"):
            one = beside.get(str(row["hook"]))
            against = "" if one is None else f"{one.value:.3f} ± {one.noise * one.value:.3f}"
            rows.append({"processes": world, **row, "over torch's of its name": against})
        ratios += found
    legend = (
        f"Whole training step, {LAYERS} layers of {WIDTH}x{WIDTH} in 2 MB buckets, over loopback without a limit, "
        f"where bytes are cheap: what a hook costs, not what it saves. {REPEATS} interleaved repeats of {STEPS} steps; "
        "relative to torch's allreduce_hook. The last column: the median over repeats of ours to torch's of its name, each "
        "pair taken at the same time, and its standard error. Four processes share two cores."
    )
    report("hook_cost", "Step time under each hook", rows, legend, ratios)


if __name__ == "__main__":
    main()
