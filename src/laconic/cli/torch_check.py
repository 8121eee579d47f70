"""What `laconic doctor` asks of torch, in processes of their own: a torch that is broken or stands still ends no other one.

`python -m laconic.cli.torch_check facts`, or `... collectives RANK WORLD FILE`. Answers are lines of JSON on stdout.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

BACKENDS = ("gloo", "nccl", "xccl", "mpi", "ucc")
SECONDS = 8.0  # after which a collective that others have not joined fails


def facts() -> dict[str, Any]:
    """What this torch is and can do."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = dist.is_available()
    return {
        "version": torch.__version__,
        "build": _build(torch.version),
        "debug": bool(torch.version.debug),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "accelerator": None if accelerator is None else f"{torch.accelerator.device_count()} x {accelerator.type}",
        "distributed": there,
        "backends": {name: there and bool(getattr(dist, f"is_{name}_available", bool)()) for name in BACKENDS},
    }


def kernels() -> dict[str, Any]:
    """Whether kernels can be compiled and kept, and how many of those that laconic has are there already."""
    import torch

    from laconic.kernels import cache, compiling
    from laconic.kernels.kernel import Kernel
    from laconic.reducers import discover

    discover()  # a kernel is known once its module is imported
    own = [kernel for kernel in Kernel.known.values() if kernel.home.startswith("laconic.")]
    refused = cache.refusal()
    lacking = compiling.missing(own, torch.device("cpu")) if refused is None else {}
    return {
        "compiler": compiling.compiler(),
        "fused": compiling.checked("auto"),
        "refused": refused,
        "folder": None if refused else str(cache.folder()),
        "known": len(own),
        "cached": 0 if refused else len(own) - len(lacking),
        "failed": sum(cache.failure(path).exists() for path in lacking.values()),
    }


def _build(versions: Any) -> str:
    found = [f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(versions, name, None))]
    return ", ".join(found) or "CPU only"


def collectives(rank: int, world: int, file: str) -> None:
    """Try those that laconic and DDP use, on gloo, with known answers; a line each."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    total = world * (world + 1) / 2

    def all_reduce() -> bool:
        one = torch.full((4,), rank + 1.0)
        dist.all_reduce(one)
        return bool((one == total).all())

    def all_gather() -> bool:
        rows = torch.empty(world * 2)
        dist.all_gather_single(rows, torch.full((2,), float(rank)))
        return rows.tolist() == [float(place // 2) for place in range(2 * world)]

    def all_to_all() -> bool:
        mine = torch.empty(world)
        dist.all_to_all_single(mine, torch.full((world,), float(rank)))
        return mine.tolist() == [float(place) for place in range(world)]

    def broadcast() -> bool:
        one = torch.full((4,), float(rank))
        dist.broadcast(one, 0)
        return bool((one == 0).all())

    def reduce_scatter() -> bool:
        part = torch.empty(2)
        dist.reduce_scatter_single(part, torch.full((2 * world,), rank + 1.0))
        return bool((part == total).all())

    def barrier() -> bool:
        dist.barrier()
        return True

    tried: list[Callable[[], bool]] = [all_reduce, all_gather, all_to_all, broadcast, reduce_scatter, barrier]
    for one in tried:
        try:
            problem = None if one() else "a wrong answer"
        except Exception as error:  # whatever a backend raises is what is asked for here
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        _say({"collective": one.__name__, "problem": problem})
    dist.destroy_process_group()


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """What is asked for."""
    match arguments:
        case ["facts"]:
            _say(facts())
            _say(kernels())
        case ["collectives", rank, world, file]:
            collectives(int(rank), int(world), file)


if __name__ == "__main__":
    main(sys.argv[1:])
