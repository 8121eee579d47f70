"""What our hook costs beside torch's own: the same model, the same buckets, interleaved in the same processes."""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

import laconic
from benchmarks.harness import Ratio, Timing, interleave, ratio, relative, report, stack, stepper
from tests.live import ranks_within

LAYERS, WIDTH, BATCH, STEPS, REPEATS, BRIEF_REPEATS = 16, 512, 64, 5, 40, 30


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


def watched(timings: Mapping[str, Timing]) -> list[Ratio]:
    """Our hooks over torch's."""
    return [
        ratio("ddp() over allreduce_hook", timings["laconic ddp()"], timings["torch allreduce_hook"]),
        ratio("fp16() over fp16_compress_hook", timings["laconic fp16()"], timings["torch fp16_compress_hook"]),
    ]


def brief() -> list[Ratio]:
    """What is watched, in half the time."""
    return watched(ranks_within(600, 2, measure, NAMES[1:5], BRIEF_REPEATS)[0])


def main() -> None:
    """Two ranks, one core each."""
    timings = ranks_within(900, 2, measure, NAMES, REPEATS)[0]
    rows = relative(timings, "hook", "torch allreduce_hook")
    legend = (
        f"Whole training step, {LAYERS} layers of {WIDTH}x{WIDTH} in 2 MB buckets, 2 ranks over loopback without a limit, "
        f"where bytes are cheap: what a hook costs, not what it saves. {REPEATS} interleaved repeats of {STEPS} steps; "
        "relative to torch's allreduce_hook."
    )
    report("hook_cost", "Step time under each hook", rows, legend, watched(timings))


if __name__ == "__main__":
    main()
