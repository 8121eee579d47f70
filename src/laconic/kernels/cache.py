"""What was compiled, on disk: one file a kernel, found by everything that its bits depend on, with its checksum beside it."""

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
    """Where compiled kernels are kept; a RuntimeError where this user has no home."""
    base = os.environ.get(FOLDER) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"
    return Path(base) / "kernels"


def refusal() -> str | None:
    """Why nothing can be kept there, or None: it must be this user's alone, because what is in it is run."""
    try:
        place = folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(place, os.W_OK):
            return f"{place} can't be written to; {FOLDER} names another folder"
    except (OSError, RuntimeError) as error:
        return f"there is no folder to keep kernels in ({error}); {FOLDER} names one"
    if not _own(place):
        return f"others could write to {place}; run chmod 700 on it, or name another folder by {FOLDER}"
    return None


def file(kernel: "Kernel", device: torch.device) -> Path | None:
    """The file of a kernel, whether or not it is there; None for one whose source can't be read."""
    key = _key(kernel, device.type)
    return folder() / f"{kernel.name}-{device.type}-{key}.pt2" if key else None


def checksum(path: Path) -> Path:
    """Beside a kernel's file; it is written last."""
    return path.with_suffix(".sha256")


def failure(path: Path) -> Path:
    """What the compiler said, where it failed to make that file."""
    return path.with_suffix(".failed")


def there(path: Path) -> bool:
    """Whether the file is there and complete, and nobody but this user (or root) can have written it."""
    return checksum(path).exists() and _own(path) and _own(path.parent)


def loaded(kernel: "Kernel", device: torch.device) -> Compiled | None:
    """What was compiled of a kernel; None as long as there is nothing."""
    place = (kernel.name, device)
    if place in _loaded:
        return _loaded[place]
    now = time.monotonic()
    if now - _looked.get(place, -LOOK_SECONDS) < LOOK_SECONDS:
        return None
    _looked[place] = now
    try:
        path = None if device.type == "meta" else file(kernel, device)
    except RuntimeError:  # no home
        path = None
    if path is None or not there(path):
        return None
    _loaded[place] = None
    try:
        # A damaged file could do worse than fail: it is code.
        if hashlib.sha256(path.read_bytes()).hexdigest() != checksum(path).read_text():
            raise ValueError("it is damaged")
        _loaded[place] = compiled.load(path, device)
    except Exception as error:
        path.unlink(missing_ok=True)
        warnings.warn(f"{path} can't be loaded, and has been removed; the next run compiles it again: {error}", stacklevel=2)
    return _loaded[place]


def forget() -> None:
    """Look for all files again: for tests, which change the folder."""
    _loaded.clear()
    _looked.clear()


def _own(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


@lru_cache(maxsize=1024)
def _key(kernel: "Kernel", kind: str) -> str | None:
    modules = sorted({kernel.home, kernel.function.__module__, compiled.__name__})
    try:
        sources = [inspect.getsource(sys.modules[name]) for name in modules]
    except (OSError, TypeError, KeyError):  # typed into an interpreter, or installed without its source
        return None
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
