"""What starting costs: `import laconic` above `import torch`, and `laconic --help` above the interpreter."""

import statistics
import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import Ratio, interleave, median_error, report

REPEATS = 15
PYTHON = [sys.executable, "-c"]
COMMANDS = {
    "python -c pass": [*PYTHON, "pass"],
    "import laconic, without torch": [*PYTHON, "import laconic"],
    "import torch": [*PYTHON, "import torch"],
    "import torch, laconic": [*PYTHON, "import torch, laconic"],
    "import torch; laconic.attach": [*PYTHON, "import torch, laconic; laconic.attach"],
    "laconic --help": [sys.executable, "-m", "laconic.cli", "--help"],
    "laconic compare --help": [sys.executable, "-m", "laconic.cli", "compare", "--help"],
}
# What each is measured above, and how many milliseconds it may cost.
ABOVE = {
    "import laconic, without torch": ("python -c pass", 50),
    "import torch, laconic": ("import torch", 50),
    "import torch; laconic.attach": ("import torch", None),
    "laconic --help": ("python -c pass", 500),
    "laconic compare --help": ("python -c pass", 500),
}


def runner(command: list[str]) -> Callable[[], object]:
    """One process from start to end."""
    return lambda: subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """One table."""
    timings = interleave({name: runner(command) for name, command in COMMANDS.items()}, REPEATS, 1)
    rows, ratios = [], []
    for name, (base, limit) in ABOVE.items():
        extra = [(a - b) * 1e3 for a, b in zip(timings[name].seconds, timings[base].seconds, strict=True)]
        above = statistics.median(extra)
        rows.append(
            {
                "command": name,
                "ms": f"{timings[name].median * 1e3:.0f}",
                "above": base,
                "extra ms": f"{above:.0f}",
                "at most": "" if limit is None else limit,
            }
        )
        if limit is not None:
            ratios.append(Ratio(f"{name}, of its limit", above / limit, median_error(extra) / abs(above)))
    legend = (
        f"Whole processes, median of {REPEATS} interleaved repeats; 'extra' is the median of the paired differences. The last "
        "of the imports also loads what attach needs: torch's distributed part, above all."
    )
    report("startup", "Start-up", rows, legend, ratios)
    if any(one.value > 1 for one in ratios):
        raise SystemExit("a command takes longer than it may")


if __name__ == "__main__":
    main()
