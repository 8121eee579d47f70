"""What our hook costs beside torch's own: the same model, the same buckets, interleaved in the same processes."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import interleave, report
from tests.ranks import ranks_within

LAYERS, WIDTH, BATCH, STEPS, REPEATS = 16, 512, 64, 5, 40


def prepare(name: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A fresh model under one of the alternatives."""
    torch.manual_seed(0)
    module = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    model = DistributedDataParallel(module, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "torch allreduce_hook":
        model.register_comm_hook(None, allreduce_hook)
    elif name == "torch fp16_compress_hook":
        model.register_comm_hook(None, fp16_compress_hook)
    elif name.startswith("laconic"):
        laconic.attach(model, optimizer, name.removeprefix("laconic "))
    return model, optimizer


NAMES = [
    "torch, no hook",
    "torch allreduce_hook",
    "laconic ddp()",
    "torch fp16_compress_hook",
    "laconic fp16()",
    "laconic bf16()",
]


def measure(rank: int) -> dict[str, tuple[float, float]]:
    """Seconds a step, best and median, for each alternative."""
    alternatives = {}
    for name in NAMES:
        model, optimizer = prepare(name)

        def steps(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(STEPS):
                model(torch.ones(BATCH, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        alternatives[name] = steps
        steps()
    return {name: (t.best / STEPS, t.median / STEPS) for name, t in interleave(alternatives, REPEATS).items()}


def main() -> None:
    """Two ranks, one core each."""
    timings = ranks_within(900, 2, measure)[0]
    base = timings["torch allreduce_hook"]
    rows = [
        {"hook": name, "best ms": f"{best * 1e3:.1f}", "median ms": f"{median * 1e3:.1f}",
         "best, relative": f"{best / base[0]:.3f}", "median, relative": f"{median / base[1]:.3f}"}
        for name, (best, median) in timings.items()
    ]  # fmt: skip
    legend = (
        f"Whole training step, {LAYERS} layers of {WIDTH}x{WIDTH} in 2 MB buckets, 2 ranks over loopback without a limit, "
        f"where bytes are cheap: what a hook costs, not what it saves. {REPEATS} interleaved repeats of {STEPS} steps; "
        "relative to torch's allreduce_hook."
    )
    report("hook_cost", "Step time under each hook", rows, legend)


if __name__ == "__main__":
    main()
