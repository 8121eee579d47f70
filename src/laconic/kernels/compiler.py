"""`python -m laconic.kernels.compiler DEVICE NICE MODULE:KERNEL ...` compiles into the cache, one process at a time."""

import fcntl
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def main(kind: str, nice: int, jobs: Sequence[str]) -> None:
    """Compile what is not there yet. Others that want to compile wait, and find it done."""
    if nice:
        os.nice(nice)
        if hasattr(os, "SCHED_IDLE"):  # only what nobody else wants
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ["OMP_NUM_THREADS"] = "1"
    # Before torch is imported: who only waits should cost nothing.
    place = Path(os.environ["LACONIC_CACHE"]) / "kernels"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        import torch

        from laconic._torch.compiled import compile_to
        from laconic.kernels import cache
        from laconic.kernels.kernel import Kernel

        device = torch.device(kind)
        for job in jobs:
            module, _, name = job.partition(":")
            importlib.import_module(module)
            kernel = Kernel.known[name]
            target, failed = cache.file(kernel, device), cache.failure(kernel, device)
            if cache.trusted(target):
                continue
            # Sizes that differ, so that none is taken for another.
            names = dict.fromkeys(size for spec in kernel.specs for size in spec.sizes)
            sizes = {size: 96 + 64 * number for number, size in enumerate(names)}
            example = [torch.zeros([sizes[size] for size in spec.sizes], device=device).to(spec.dtype) for spec in kernel.specs]
            unfinished = place / f"{target.stem}.{os.getpid()}.pt2"
            try:
                compile_to(unfinished, kernel.function, example, [spec.sizes for spec in kernel.specs])
                unfinished.chmod(0o600)
                unfinished.rename(target)
                failed.unlink(missing_ok=True)
            except Exception:  # whatever the compiler has to say is for the next who asks
                failed.write_text(traceback.format_exc())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
