"""Have kernels compiled, by a process of its own: once a machine, and no step waits for it."""

import atexit
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from laconic.kernels import cache
from laconic.kernels.kernel import Kernel

Fused: TypeAlias = bool | Literal["auto"]

OVERRIDE = "LACONIC_FUSED"  # the environment variable that stands for "auto": 1, 0 or auto
LIMIT_SECONDS = 900.0


class CompilerError(RuntimeError):
    """What was asked for can't be compiled here."""


_later: dict[Kernel, Path] = {}  # what is to be compiled in the background


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

    "auto": on the CPU, where there is a compiler, in the background: now if a core is free, else when this process ends.
    (Beside two ranks on two cores, a compiler of the lowest priority doubled the time of a step.) True: on any device, and
    it waits.
    """
    if not fused or (fused == "auto" and device.type != "cpu"):
        return False
    try:
        lacking = missing(kernels, device)
    except RuntimeError as error:  # no home
        if fused == "auto":
            return False
        raise CompilerError(f"fused=True: {error}") from error
    if fused == "auto":
        new = {kernel: path for kernel, path in lacking.items() if not cache.failure(path).exists()}
        if new and compiler() is not None and os.environ.get("LOCAL_RANK", "0") == "0" and cache.refusal() is None:
            _later.update(new)
            if _core_is_free():
                _compile_later()
        return True
    if lacking:
        _compile_now(lacking, device)
    return True


def missing(kernels: Iterable[Kernel], device: torch.device) -> dict[Kernel, Path]:
    """Those that are to be compiled, and where to."""
    paths = {kernel: cache.file(kernel, device) for kernel in kernels if kernel.home != "__main__"}
    return {kernel: path for kernel, path in paths.items() if path is not None and not cache.there(path)}


def compiler() -> str | None:
    """The C++ compiler that torch would use; None where there is none."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def _compile_now(lacking: Mapping[Kernel, Path], device: torch.device) -> None:
    """Wait until they are compiled, by this process or another."""
    if device.type == "cpu" and compiler() is None:
        raise CompilerError(
            "fused=True compiles with a C++ compiler, and there is no g++ or clang++; install one, or leave fused at 'auto'"
        )
    refused = cache.refusal()
    if refused is not None:
        raise CompilerError(f"fused=True: {refused}")
    try:
        process, start = _start(lacking, device, nice=0), time.monotonic()
    except OSError as error:
        raise CompilerError(f"fused=True: the compiler can't be started: {error}") from error
    while process.poll() is None:
        if time.monotonic() - start > LIMIT_SECONDS:
            process.kill()
            raise CompilerError(f"fused=True: compiling took longer than {LIMIT_SECONDS:.0f} s; leave fused at 'auto'")
        time.sleep(0.1)
    for kernel, path in lacking.items():
        if not cache.there(path):
            report = cache.failure(path)
            said = report.read_text()[-2000:] if report.exists() else _log().read_text()[-2000:]
            raise CompilerError(f"fused=True: {kernel.name} can't be compiled here; leave fused at 'auto'. It says: {said}")


def _log() -> Path:
    """What the compiling process says beside that."""
    return cache.folder() / "log"


def _start(lacking: Mapping[Kernel, Path], device: torch.device, nice: int) -> subprocess.Popen[bytes]:
    jobs = [f"{kernel.home}:{kernel.name}:{path.name}" for kernel, path in lacking.items()]
    # In a session of its own: what is compiled is of use to the next run, even if this one ends before.
    with _log().open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "laconic.kernels.compiler", device.type, str(nice), *jobs],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**_without_launcher(os.environ), cache.FOLDER: str(cache.folder().parent)},
        )


def _without_launcher(environment: "os._Environ[str]") -> dict[str, str]:
    """Without what makes a process a rank, or has a strategy attached to it."""
    ours = ("LACONIC_", "TORCHELASTIC_")
    rank = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environment.items() if not name.startswith(ours) and name not in rank}


def _core_is_free() -> bool:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > ranks * torch.get_num_threads()


@atexit.register
def _compile_later() -> None:
    """In a process that goes on when this one ends, so that Python need not warn of it."""
    if _later:
        with suppress(OSError):  # no room for another process: it goes without
            _start(_later, torch.device("cpu"), nice=19).returncode = 0
    _later.clear()
