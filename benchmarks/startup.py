"""What starting costs: `import laconic` above `import torch`, and `laconic --help` above the interpreter."""

import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import TypeAlias

from benchmarks.harness import Ratio, interleave, median_error, report

REPEATS, BRIEF_REPEATS = 15, 7
NOTHING = "python -c pass"
# Whole processes, above one that does nothing; and how many milliseconds each may cost.
PROCESSES = {
    "import laconic, without torch": ([sys.executable, "-c", "import laconic"], 50),
    "laconic --help": ([sys.executable, "-m", "laconic.cli", "--help"], 500),
    "laconic compare --help": ([sys.executable, "-m", "laconic.cli", "compare", "--help"], 500),
}
# After `import torch`, which takes two seconds and varies by more than what is measured: timed inside the process.
AFTER_TORCH = {"import laconic": 50, "import laconic; laconic.attach": None}


def process(command: list[str]) -> Callable[[], object]:
    """One process from start to end."""
    return lambda: subprocess.run(command, check=True, capture_output=True)


def inside(statement: str) -> float:
    """Seconds of a statement in a new process that has imported torch."""
    code = f"import time, torch; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


Extra: TypeAlias = dict[str, tuple[str, list[float], int | None]]
"""By command: above what, how many seconds more, and how many milliseconds more there may be."""


def measured(repeats: int) -> Extra:
    """All of it."""
    runs = {NOTHING: process([sys.executable, "-c", "pass"])}
    timings = interleave(runs | {name: process(command) for name, (command, _) in PROCESSES.items()}, repeats, 1)
    extra: Extra = {}
    for name, (_, limit) in PROCESSES.items():
        pairs = zip(timings[name].seconds, timings[NOTHING].seconds, strict=True)
        extra[name] = NOTHING, [a - b for a, b in pairs], limit
    for name, most in AFTER_TORCH.items():
        extra[name] = "import torch", [inside(name) for _ in range(repeats)], most
    return extra


def watched(extra: Extra) -> list[Ratio]:
    """Shares of what they may take."""
    found = []
    for name, (_, seconds, most) in extra.items():
        typical = statistics.median(seconds) * 1e3
        if most is not None:
            found.append(Ratio(f"{name}, of its limit", typical / most, median_error(seconds) * 1e3 / typical))
    return found


def brief() -> list[Ratio]:
    """What is watched, in half the time."""
    return watched(measured(BRIEF_REPEATS))


def main() -> None:
    """One table."""
    extra = measured(REPEATS)
    rows: list[dict[str, object]] = []
    for name, (above, seconds, most) in extra.items():
        typical = statistics.median(seconds) * 1e3
        rows.append({"command": name, "above": above, "extra ms": f"{typical:.0f}", "at most": "" if most is None else most})
    ratios = watched(extra)
    legend = (
        f"Medians of {REPEATS}: of paired differences between whole processes, or, after torch, of the time inside one. "
        "What `attach` loads is torch's distributed part, above all."
    )
    report("startup", "Start-up", rows, legend, ratios)
    if any(one.value > 1 for one in ratios):
        raise SystemExit("a command takes longer than it may")


if __name__ == "__main__":
    main()
