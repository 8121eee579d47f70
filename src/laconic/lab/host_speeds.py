"""How long collectives take between the hosts of a comparison where no link limits them: probed once, and kept for a day."""

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from laconic.cost.link import FASTEST_EMULATED, Link
from laconic.cost.measured import read
from laconic.lab.workers import Workers

SECONDS, KEPT_SECONDS = 6.0, 24 * 3600.0


def folder() -> Path:
    """Where probes are kept between comparisons; a user may delete it at any time. Where it can't be made, a temporary one."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic" / "hosts"
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir(), f"laconic-hosts-{os.getuid()}")
    return found


def ensure(workers: int, island_size: int, *, cables: bool, say: Callable[[str], object]) -> Path:
    """The file of a probe: of plain processes, or with `cables` of hosts whose links are as fast as they get."""
    path = _path(workers, island_size, cables)
    if _usable(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    where = "on hosts with links as fast as they get" if cables else "that are plain processes, without links"
    say(f"collectives among {workers} workers {where}: {SECONDS:g} s; kept for a day in {folder()}")
    job = {"probe_seconds": SECONDS, "save": str(path)}
    with Workers([job], workers, Link(FASTEST_EMULATED) if cables else Link(), island_size=island_size) as probing:
        probing.told("the probe of this machine", lambda facts: None)
    return path


def _usable(path: Path) -> bool:
    """Whether it is a probe of today; a file that is no probe is made anew."""
    try:
        read(path)
        return 0 <= time.time() - path.stat().st_mtime < KEPT_SECONDS
    except (ValueError, OSError):
        return False


def _path(*facts: object) -> Path:
    import torch

    here = (torch.__version__, platform.node(), platform.machine(), os.cpu_count())
    return folder() / f"{hashlib.sha256(repr((*facts, *here)).encode()).hexdigest()[:20]}.json"
