"""What a step costs under hooks of the same name, torch's and ours, side by side."""

import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Ratio, Timing, interleave, ratio, report, stepper
from tests.live import ranks_within

LAYERS, WIDTH, BATCH, STEPS, REPEATS, BRIEF_REPEATS = 16, 512, 64, 5, 40, 24
WORLDS = (1, 2, 4)
LIBRARIES = {"torch": "torch.distributed.algorithms", "laconic": "laconic.compat"}
NAMES = ["allreduce_hook", "fp16_compress_hook", "powerSGD_hook, rank 1", "powerSGD_hook, rank 4", "post_localSGD_hook"]


def hooked(library: str, name: str) -> DistributedDataParallel:
    """A model of one bucket, which is what torch's PowerSGD works with on gloo."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    model = DistributedDataParallel(layers, bucket_cap_mb=1000)
    hook, _, rank = name.partition(", rank ")
    if rank:
        power = importlib.import_module(f"{LIBRARIES[library]}.ddp_comm_hooks.powerSGD_hook")
        model.register_comm_hook(power.PowerSGDState(None, int(rank), start_powerSGD_iter=2), power.powerSGD_hook)
    elif hook == "post_localSGD_hook":
        local = importlib.import_module(f"{LIBRARIES[library]}.ddp_comm_hooks.post_localSGD_hook")
        model.register_comm_hook(local.PostLocalSGDState(None, dist.group.WORLD, 2), local.post_localSGD_hook)
    else:
        default = importlib.import_module(f"{LIBRARIES[library]}.ddp_comm_hooks.default_hooks")
        model.register_comm_hook(None, getattr(default, hook))
    return model


def measure(rank: int, name: str, repeats: int) -> dict[str, Timing]:
    """Seconds a step, of both."""
    runs = {}
    for library in LIBRARIES:
        model = hooked(library, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        runs[library] = stepper(model, optimizer, torch.ones(BATCH, WIDTH), STEPS)
    return interleave(runs, repeats, STEPS)


def brief() -> list[Ratio]:
    """What is watched, in half the time."""
    found = {name: ranks_within(600, 2, measure, name, BRIEF_REPEATS)[0] for name in NAMES}
    return [ratio(name, timings["laconic"], timings["torch"]) for name, timings in found.items()]


def main() -> None:
    """Worlds of 1, 2 and 4 ranks, one thread each."""
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for world in WORLDS:
        for name in NAMES:
            timings = ranks_within(600, world, measure, name, REPEATS)[0]
            theirs, ours = timings["torch"], timings["laconic"]
            where = "" if world == 2 else f", {world} process{'es' if world > 1 else ''}"
            ratios.append(ratio(f"{name}{where}", ours, theirs))
            rows.append(
                {
                    "hook": name,
                    "processes": world,
                    "torch, ms": f"{theirs.best * 1e3:.1f}",
                    "laconic.compat, ms": f"{ours.best * 1e3:.1f}",
                    "best, relative": f"{ours.best / theirs.best:.2f}",
                    "median, relative": f"{ours.median / theirs.median:.2f}",
                }
            )
    legend = (
        f"Whole training step, {LAYERS} layers of {WIDTH}x{WIDTH} in one bucket, ranks over loopback without a limit on two "
        f"cores; {REPEATS} interleaved repeats of {STEPS} steps."
    )
    report("compat_cost", "Step time under hooks of the same name", rows, legend, ratios)


if __name__ == "__main__":
    main()
