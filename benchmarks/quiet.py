"""Whether this machine is quiet enough to tell: what others take of its cores, and how evenly a fixed computation runs.

python -m benchmarks.quiet    # what it finds here, now
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IDLE_SECONDS, BUSY_SECONDS = 2.0, 2.0
# Beside other jobs, two cores were seen 25 to 100 % busy, with spreads of up to 190 %; between them, 0.3 % busy. Under a steady
# load the spread is 1 % as well: it takes both.
MOST_BUSY, MOST_SPREAD = 0.05, 0.10
NUMBERS = bytes(4 << 20)  # about 3 ms to hash: as long as a small exchange


@dataclass(frozen=True)
class Reading:
    """What was found in some seconds."""

    busy: float  # the share of all cores that others took while this process slept
    spread: float  # how much longer than the median a fixed computation takes, once in ten, one process on each core


def read() -> Reading:
    """Look for some seconds."""
    before = _cpu_times()
    time.sleep(IDLE_SECONDS)
    after = _cpu_times()
    return Reading(busy_share(before, after), max(spread(seconds) for seconds in _side_by_side()))


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """The share of time in which cores worked, for anybody, other machines of the same host included.

    >>> busy_share([0, 0, 0, 0, 0, 0, 0, 0], [15, 0, 5, 70, 5, 0, 0, 5])  # user nice system idle iowait irq softirq stolen
    0.25
    """
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return 1 - sum(spent[3:5]) / max(1, sum(spent))


def spread(seconds: Sequence[float]) -> float:
    """How much longer than the median the ninth of ten takes.

    >>> round(spread([1.0] * 9 + [1.5, 1.5]), 2)
    0.5
    """
    return statistics.quantiles(seconds, n=10)[-1] / statistics.median(seconds) - 1


def reasons(reading: Reading, here: Mapping[str, object], committed: Mapping[str, object]) -> list[str]:
    """Why ratios measured here and now can't be compared with those that were committed; none: they can."""
    found = [
        f"the committed results are from {name} {committed.get(name)}, and here is {here.get(name)}"
        for name in ("cpu", "cores", "torch")
        if committed.get(name) != here.get(name)
    ]
    if reading.busy > MOST_BUSY:
        found.append(f"others take {reading.busy:.0%} of the cores, and {MOST_BUSY:.0%} would be quiet")
    if reading.spread > MOST_SPREAD:
        found.append(f"a fixed computation takes {reading.spread:.0%} longer once in ten, and {MOST_SPREAD:.0%} would be quiet")
    return found


def _cpu_times() -> list[int]:
    stat = Path("/proc/stat")
    if not stat.exists():
        return [0] * 8
    return [int(text) for text in stat.read_text().splitlines()[0].split()[1:9]]


def _side_by_side() -> list[list[float]]:
    """Seconds of the computation, again and again, in one process for each core at once."""
    start = time.time() + 0.5
    command = [sys.executable, "-m", "benchmarks.quiet", "--compute", str(start)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    return [json.loads(process.communicate()[0]) for process in processes]


def _compute(start: float) -> list[float]:
    time.sleep(max(0.0, start - time.time()))
    seconds: list[float] = []
    end = time.perf_counter() + BUSY_SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        hashlib.sha256(NUMBERS)
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    print(json.dumps(_compute(float(sys.argv[2]))) if sys.argv[1:2] == ["--compute"] else read())
