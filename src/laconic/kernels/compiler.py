"""`python -m laconic.kernels.compiler DEVICE NICE MODULE:KERNEL:FILE ...` compiles into the cache, one process at a time."""

import fcntl
import hashlib
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
    os.umask(0o077)
    place = Path(os.environ["LACONIC_CACHE"]) / "kernels"
    with (place / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module, name, target in (job.split(":") for job in jobs):
            path = place / target
            if path.exists() and path.with_suffix(".sha256").exists():
                continue  # before torch is imported: who only waited should pay nothing
            try:
                _compile(module, name, kind, path)
                path.with_suffix(".failed").unlink(missing_ok=True)
            except Exception:  # whatever the compiler has to say is for the next who asks
                path.with_suffix(".failed").write_text(traceback.format_exc())


def _compile(module: str, name: str, kind: str, path: Path) -> None:
    import torch

    from laconic._torch.compiled import compile_to
    from laconic.kernels.kernel import Kernel

    importlib.import_module(module)
    kernel = Kernel.known[name]
    # Sizes that differ, so that none is taken for another.
    names = dict.fromkeys(size for spec in kernel.specs for size in spec.sizes)
    sizes = {size: 96 + 64 * number for number, size in enumerate(names)}
    shapes = [[sizes[size] for size in spec.sizes] for spec in kernel.specs]
    example = [torch.zeros(shape, device=kind).to(spec.dtype) for shape, spec in zip(shapes, kernel.specs, strict=True)]
    unfinished = path.with_suffix(f".{os.getpid()}.pt2")
    compile_to(unfinished, kernel.function, example, [spec.sizes for spec in kernel.specs])
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    unfinished.rename(path)
    _write(path.with_suffix(".sha256"), hashlib.sha256(path.read_bytes()).hexdigest())


def _write(path: Path, text: str) -> None:
    """All of it, or nothing."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    unfinished.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
