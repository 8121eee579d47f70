"""A script that knows nothing of laconic, behind a slow link: as it is, and through `laconic run`."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import report
from laconic.cost.link import Link
from laconic.lab.link import start
from laconic.report.summary import seconds_to

SCRIPT = Path(__file__).parents[1] / "examples/gpt.py"
HOSTS, RATE, STEPS = 4, 100_000_000, 200
STRATEGIES = [
    "int8()",
    "powersgd(rank=8, warmup=10)",
    "diloco(8, warmup=20)",
    "streaming_diloco(8, fragments=2, delay=2, warmup=20)",
]


def plain() -> str:
    """The script alone, each process behind its link."""
    process = start([sys.executable, str(SCRIPT), f"--steps={STEPS}"], HOSTS, Link(RATE), os.environ)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(output)
    return output


def under(strategy: str) -> str:
    """The same by `laconic run`."""
    command = [sys.executable, "-m", "laconic.cli", "run", "-s", strategy, "--link", "100mbit", f"--nproc-per-node={HOSTS}"]
    done = subprocess.run([*command, str(SCRIPT), f"--steps={STEPS}"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def curve(output: str) -> list[tuple[float, float]]:
    """(seconds, loss), as the script prints them."""
    return [(float(seconds), float(loss)) for seconds, loss in re.findall(r"seconds ([\d.]+) loss ([\d.]+)", output)]


def main() -> None:
    """One table: seconds to 1.02 times the loss that the plain script ends with."""
    curves = {"the script, as it is": curve(plain()), **{f"laconic run -s '{text}'": curve(under(text)) for text in STRATEGIES}}
    base = curves["the script, as it is"]
    target = base[-1][1] * 1.02
    whole = seconds_to(base, target)
    assert whole is not None
    rows = []
    for name, points in curves.items():
        seconds = seconds_to(points, target)
        rows.append(
            {
                "": name,
                "final loss": f"{points[-1][1]:.4f}",
                "ms a step": f"{points[-1][0] / STEPS * 1e3:.0f}",
                f"seconds to loss {target:.3f}": "never" if seconds is None else f"{seconds:.1f}",
                "relative": "" if seconds is None else f"{seconds / whole:.2f}",
            }
        )
    legend = (
        f"examples/gpt.py, 0.8 million parameters, {STEPS} steps, {HOSTS} processes behind {RATE // 10**6} Mbit/s links "
        "on one machine, with torchrun's variables, one seed. The loss is what the script prints: held-out, of the first "
        "process's own replica."
    )
    report("script", "A script through laconic run, behind a slow link", rows, legend)


if __name__ == "__main__":
    main()
