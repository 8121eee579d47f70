"""A gate: run benchmarks again and compare their ratios with the committed ones.

python -m benchmarks check            # those that are quick
python -m benchmarks check rates      # or by name
"""

import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

QUICK = ["startup", "growth", "hook_cost", "compressor_cost"]
ALLOWED, SIGMAS = 0.05, 3.0  # what may get worse in any case, and how often its noise


def compare(committed: dict[str, list[float]], now: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each ratio that both have; `worse` where it rose by more than its noise allows.

    >>> compare({"a": [1.0, 0.01], "b": [1.0, 0.01]}, {"a": [1.04, 0.01], "b": [1.2, 0.01]})[1]["verdict"]
    'worse'
    """
    rows = []
    for name, (before, noise_before) in committed.items():
        if name not in now:
            rows.append({"ratio": name, "committed": before, "now": "", "allowed": "", "verdict": "gone"})
            continue
        after, noise = now[name]
        limit = before * (1 + max(ALLOWED, SIGMAS * (noise**2 + noise_before**2) ** 0.5))
        better = before * (1 - max(ALLOWED, SIGMAS * (noise**2 + noise_before**2) ** 0.5))
        verdict = "worse" if after > limit else "better" if after < better else "same"
        rows.append({"ratio": name, "committed": before, "now": after, "allowed": round(limit, 4), "verdict": verdict})
    return rows


def committed_ratios(name: str) -> dict[str, dict[str, list[float]]]:
    """The committed ratios of a benchmark by file: it may have written one table or, as `rates` one a link, several."""
    files = [harness.RESULTS / f"{name}.json", *sorted(harness.RESULTS.glob(f"{name}-*.json"))]
    found = {file.name: json.loads(file.read_text()).get("ratios", {}) for file in files if file.exists()}
    found = {file: ratios for file, ratios in found.items() if ratios}
    if not found:
        raise SystemExit(
            f"{name} has no committed ratios to compare with: run python -m benchmarks {name}, and commit {files[0].name}"
        )
    return found


def run_again(name: str, folder: Path) -> None:
    """The benchmark, its results in that folder instead of the committed ones'."""
    home, harness.RESULTS = harness.RESULTS, folder
    try:
        importlib.import_module(f"benchmarks.{name}").main()
    finally:
        harness.RESULTS = home


def main(names: Sequence[str] = ()) -> int:
    """0: nothing got worse."""
    committed, worse = {name: committed_ratios(name) for name in names or QUICK}, 0
    for name, files in committed.items():
        with tempfile.TemporaryDirectory() as folder:
            run_again(name, Path(folder))
            for file, before in files.items():
                now = Path(folder, file)
                rows = compare(before, json.loads(now.read_text())["ratios"] if now.exists() else {})
                worse += sum(row["verdict"] in ("worse", "gone") for row in rows)
                harness.show(f"{file}: against what is committed", rows)
    print(
        f"\n{worse} of the ratios got worse by more than their noise" if worse else "\nnothing got worse by more than its noise"
    )
    return 1 if worse else 0
