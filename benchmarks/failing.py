"""What doesn't run: torch's hooks on gloo and peers that can't be had, each with the error it gave."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import report
from tests.live import ranks_within

STEPS = 6
HOOKS: dict[str, tuple[int, Callable[[], tuple[Any, Any]]]] = {  # with the megabytes of a bucket
    "torch bf16_compress_hook": (25, lambda: (None, bf16_compress_hook)),
    "torch quantization_pertensor_hook": (25, lambda: (dist.group.WORLD, quantization.quantization_pertensor_hook)),
    "torch quantization_perchannel_hook": (25, lambda: (dist.group.WORLD, quantization.quantization_perchannel_hook)),
    "torch batched_powerSGD_hook": (25, lambda: (power.PowerSGDState(None, 1, 2), power.batched_powerSGD_hook)),
    "torch powerSGD_hook, one bucket": (25, lambda: (power.PowerSGDState(None, 1, 2), power.powerSGD_hook)),
    "torch powerSGD_hook, four buckets": (1, lambda: (power.PowerSGDState(None, 1, 2), power.powerSGD_hook)),
}
PACKAGES = ["torchft", "accelerate", "powersgd"]


def hook(rank: int, name: str) -> None:
    """A few steps of training."""
    torch.manual_seed(0)
    megabytes, make = HOOKS[name]
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), bucket_cap_mb=megabytes)
    model.register_comm_hook(*make())
    for _ in range(STEPS):
        model(torch.randn(4, 512)).sum().backward()


def outcome(name: str) -> str:
    """`runs`, or the last line of the error."""
    try:
        ranks_within(30, 2, hook, name)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "rank", "Traceback"))]
        errors = [line for line in lines if "Error" in line] or lines or ["the process died"]
        return errors[-1].rpartition("callback: ")[2][:150]
    return "runs"


def package(name: str) -> str:
    """`can be imported`, or the error."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "can be imported"


def main() -> None:
    """One table."""
    rows = [{"": name, "outcome": outcome(name)} for name in HOOKS]
    rows += [{"": f"package {name}", "outcome": package(name)} for name in PACKAGES]
    legend = (
        f"torch's hooks: {STEPS} backwards of eight 512x512 layers, 2 processes, gloo, 30 seconds at most. Of epfml's powersgd "
        "the registry has 0.0.1 and 0.0.2: wheels without code."
    )
    report("failing", "What doesn't run", rows, legend)


if __name__ == "__main__":
    main()
