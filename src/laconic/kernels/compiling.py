"""Have kernels compiled, by a process of its own: once a machine, and no step waits for it."""

import atexit
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import torch

from laconic.kernels import cache
from laconic.kernels.kernel import Kernel

Fused: TypeAlias = bool | Literal["auto"]

OVERRIDE = "LACONIC_FUSED"  # the environment variable that stands for "auto": 1, 0 or auto
LIMIT_SECONDS = 900.0


class CompilerError(RuntimeError):
    """What was asked for can't be compiled here."""


_background: list[subprocess.Popen[bytes]] = []  # kept so that those that have ended don't linger as zombies


def checked(fused: object) -> Fused:
    """What `fused=` says; the environment decides where it leaves the choice."""
    if fused not in (True, False, "auto"):
        raise ValueError(f"fused must be 'auto', True or False, got {fused!r}")
    if fused != "auto":
        return bool(fused)
    text = os.environ.get(OVERRIDE, "auto")
    if text not in ("0", "1", "auto"):
        raise ValueError(f"{OVERRIDE} must be 1, 0 or auto, got {text!r}")
    return "auto" if text == "auto" else text == "1"


def prepare(kernels: Iterable[Kernel], fused: Fused, device: torch.device) -> bool:
    """Whether compiled kernels are to be used; those that are missing get compiled.

    "auto": on the CPU, where there is a compiler, and in the background. True: on any device, and it waits until all are there.
    """
    if not fused or (fused == "auto" and device.type != "cpu"):
        return False
    importable = [kernel for kernel in dict.fromkeys(kernels) if kernel.home != "__main__"]
    missing = [kernel for kernel in importable if not cache.trusted(cache.file(kernel, device))]
    if fused == "auto":
        missing = [kernel for kernel in missing if not cache.failure(kernel, device).exists()]
        if missing and compiler() is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            _background[:] = [process for process in _background if process.poll() is None]
            _background.append(_start(missing, device, nice=19))
        return True
    if missing:
        _compile_now(missing, device)
    return True


def compiler() -> str | None:
    """The C++ compiler that torch would use; None where there is none."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def _compile_now(missing: Sequence[Kernel], device: torch.device) -> None:
    """Wait until they are compiled, by this process or another."""
    if device.type == "cpu" and compiler() is None:
        raise CompilerError(
            "fused=True compiles with a C++ compiler, and there is no g++ or clang++; install one, or leave fused at 'auto'"
        )
    process, start = _start(missing, device, nice=0), time.monotonic()
    while process.poll() is None:
        if time.monotonic() - start > LIMIT_SECONDS:
            process.kill()
            raise CompilerError(f"fused=True: compiling took longer than {LIMIT_SECONDS:.0f} s; leave fused at 'auto'")
        time.sleep(0.1)
    for kernel in missing:
        if not cache.trusted(cache.file(kernel, device)):
            report = cache.failure(kernel, device)
            said = report.read_text()[-2000:] if report.exists() else f"the compiling process ended with {process.returncode}"
            raise CompilerError(f"fused=True: {kernel.name} can't be compiled here; leave fused at 'auto'. It says: {said}")


def _start(kernels: Sequence[Kernel], device: torch.device, nice: int) -> subprocess.Popen[bytes]:
    jobs = [f"{kernel.home}:{kernel.name}" for kernel in kernels]
    # In a session of its own: what is compiled is of use to the next run, even if this one ends before.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "laconic.kernels.compiler", device.type, str(nice), *jobs],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**_without_launcher(os.environ), cache.FOLDER: str(cache.folder().parent)},
    )


def _without_launcher(environment: "os._Environ[str]") -> dict[str, str]:
    """Without what makes a process a rank, or has a strategy attached to it."""
    ours = ("LACONIC_", "TORCHELASTIC_")
    rank = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environment.items() if not name.startswith(ours) and name not in rank}


@atexit.register
def _leave() -> None:
    """Compilation goes on when this process ends, and Python need not warn of it."""
    for process in _background:
        process.returncode = process.poll() or 0
