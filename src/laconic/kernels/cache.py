"""What was compiled, on disk: one file a kernel, found by everything that its bits depend on."""

import hashlib
import inspect
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from laconic._torch import compiled

if TYPE_CHECKING:
    from laconic.kernels.kernel import Kernel

Compiled: TypeAlias = Callable[[list[Tensor]], None]

LOOK_SECONDS = 0.5  # between two looks for a file that another process is about to write
FOLDER = "LACONIC_CACHE"  # the environment variable that names another folder

_loaded: dict[tuple[str, torch.device], Compiled | None] = {}  # None: it can't be loaded
_looked: dict[tuple[str, torch.device], float] = {}


def folder() -> Path:
    """Where compiled kernels are kept: for this user alone, because they are code that is run."""
    base = os.environ.get(FOLDER) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"
    return Path(base) / "kernels"


def file(kernel: "Kernel", device: torch.device) -> Path:
    """The file of a kernel, whether or not it is there."""
    return folder() / f"{kernel.name}-{device.type}-{_key(kernel, device.type)}.pt2"


def failure(kernel: "Kernel", device: torch.device) -> Path:
    """What the compiler said, where it failed."""
    return file(kernel, device).with_suffix(".failed")


def loaded(kernel: "Kernel", device: torch.device) -> Compiled | None:
    """What was compiled of a kernel; None as long as there is nothing."""
    place = (kernel.name, device)
    if place in _loaded:
        return _loaded[place]
    now = time.monotonic()
    if now - _looked.get(place, -LOOK_SECONDS) < LOOK_SECONDS:
        return None
    _looked[place] = now
    path = file(kernel, device)
    if device.type == "meta" or not trusted(path):
        return None
    try:
        _loaded[place] = compiled.load(path, device)
    except (RuntimeError, OSError) as error:
        warnings.warn(f"{path} can't be loaded and is not used; delete it to have it compiled again: {error}", stacklevel=2)
        _loaded[place] = None
    return _loaded[place]


def trusted(path: Path) -> bool:
    """Whether it is there, and nobody but this user (or root) can have written it."""
    try:
        found, around = path.stat(), path.parent.stat()
    except OSError:
        return False
    return all(each.st_uid in (os.getuid(), 0) and not each.st_mode & 0o022 for each in (found, around))


def forget() -> None:
    """Look for all files again: for tests, which change the folder."""
    _loaded.clear()
    _looked.clear()


@lru_cache(maxsize=1024)
def _key(kernel: "Kernel", kind: str) -> str:
    sources = [inspect.getsource(sys.modules[name]) for name in sorted({kernel.home, kernel.function.__module__})]
    parts = [torch.__version__, platform.machine(), _hardware(kind), kernel.name, repr(kernel.specs), *sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _hardware(kind: str) -> str:
    """What code was compiled for: a folder may be shared by machines that differ."""
    if kind != "cpu":
        return str(torch.get_device_module(kind).get_device_properties())
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
