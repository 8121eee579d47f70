"""What starting costs: `import laconic` above `import torch`, and `laconic --help` above the interpreter."""

import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import Ratio, Timing, interleave, report

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
        above = Timing([a - b for a, b in zip(timings[name].seconds, timings[base].seconds, strict=True)]).median * 1e3
        rows.append(
            {
                "command": name,
                "ms": f"{timings[name].median * 1e3:.0f}",
                "above": base,
                "extra ms": f"{above:.0f}",
                "at most": "" if limit is None else limit,
            }
        )
        if limit is not None:  # in units of what is allowed: a few milliseconds more are nothing
            ratios.append(Ratio(f"{name}, of its limit", above / limit, 0.1 * limit / max(above, 1.0)))
    legend = (
        f"Whole processes, median of {REPEATS} interleaved repeats; 'extra' is the median of the paired differences. The last "
        "of the imports also loads what attach needs: torch's distributed part, above all."
    )
    report("startup", "Start-up", rows, legend, ratios)


if __name__ == "__main__":
    main()
