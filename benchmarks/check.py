"""Run benchmarks again and compare their ratios with the committed ones.

python -m benchmarks check            # those that are quick
python -m benchmarks check rates      # or by name
python -m benchmarks gate             # those that are quick, in brief; what is worse, twice; fails where that can be told here
python -m benchmarks gate --ci        # fewer of them, and only where the machine is quiet
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import harness, quiet

QUICK = ["startup", "growth", "hook_cost", "compat_cost", "compressor_cost"]
CI = ["hook_cost"]  # compressors would have to be compiled first
ALLOWED, SIGMAS = 0.05, 3.0  # what may get worse in any case, and how often its noise
# What two runs differ by, one standard deviation, beyond what the repeats of one run show. Step times: 1.052 and 1.045, 1.088
# and 1.108 in two commits that changed nothing there. Exchanges vary by a tenth. Start-up is in milliseconds, not beside
# anything: 0.43, 0.54, 0.40 of its limit.
BETWEEN_RUNS = {"startup": 0.10, "compressor_cost": 0.03}
BETWEEN_OTHERS = 0.015

Found: TypeAlias = Mapping[str, Sequence[float]]
"""By ratio: its value and its noise."""


def compare(committed: Found, now: Found, between_runs: float = 0.0) -> list[dict[str, Any]]:
    """A row for each committed ratio; `worse` where it rose by more than its noise allows.

    >>> compare({"a": [1.0, 0.01], "b": [1.0, 0.01]}, {"a": [1.04, 0.01], "b": [1.2, 0.01]})[1]["verdict"]
    'worse'
    """
    rows = []
    for name, (before, noise_before) in committed.items():
        if name not in now:
            rows.append({"ratio": name, "committed": before, "now": "", "allowed": "", "verdict": "gone"})
            continue
        after, noise = now[name]
        # Of what is counted and has no noise, two runs differ by nothing.
        apart = between_runs if noise or noise_before else 0.0
        room = max(ALLOWED, SIGMAS * (noise**2 + noise_before**2 + apart**2) ** 0.5)
        verdict = "worse" if after > before * (1 + room) else "better" if after < before * (1 - room) else "same"
        allowed = round(before * (1 + room), 4)
        rows.append({"ratio": name, "committed": before, "now": round(after, 4), "allowed": allowed, "verdict": verdict})
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


def committed_machine(name: str) -> dict[str, Any]:
    """Where a benchmark's committed results are from."""
    found: dict[str, Any] = json.loads((harness.RESULTS / f"{name}.json").read_text()).get("machine", {})
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


# The gate


def in_brief(name: str) -> dict[str, list[float]]:
    """What a benchmark finds now: by its brief form where it has one, else by all of it."""
    brief = getattr(importlib.import_module(f"benchmarks.{name}"), "brief", None)
    if brief is not None:
        return {one.name: [one.value, one.noise] for one in brief()}
    with tempfile.TemporaryDirectory() as folder:
        run_again(name, Path(folder))
        found: dict[str, list[float]] = {}
        for file in Path(folder).glob("*.json"):
            found |= json.loads(file.read_text())["ratios"]
        return found


def twice(name: str, measure: Callable[[str], Found]) -> list[dict[str, Any]]:
    """A row for each ratio that is committed and measured in brief; what is worse is measured once more.

    `worse` is then what was worse both times, and `worse once` what was not.
    """
    first = measure(name)
    committed = {ratio: both for file in committed_ratios(name).values() for ratio, both in file.items() if ratio in first}
    between = BETWEEN_RUNS.get(name, BETWEEN_OTHERS)
    rows = [{**row, "again": ""} for row in compare(committed, first, between)]
    suspects = [row for row in rows if row["verdict"] == "worse"]
    if suspects:
        print(f"\n{name}: {len(suspects)} of the ratios look worse; once more")
        again = {row["ratio"]: row for row in compare(committed, measure(name), between)}
        for row in suspects:
            second = again[row["ratio"]]
            row["again"] = second["now"]
            row["verdict"] = "worse" if second["verdict"] == "worse" else "worse once"
    return rows


def doubts(names: Sequence[str], reading: quiet.Reading) -> list[str]:
    """Why these benchmarks can't be compared with their committed results here and now."""
    here = harness.machine()
    found = [reason for name in names for reason in quiet.reasons(reading, here, committed_machine(name))]
    return list(dict.fromkeys(found))


def gate(
    names: Sequence[str],
    *,
    only_if_quiet: bool,
    measure: Callable[[str], Found] = in_brief,
    look: Callable[[], quiet.Reading] = quiet.read,
) -> int:
    """1: something was worse both times it was measured, on a machine like the committed results' that was quiet throughout."""
    noisy = doubts(names, look())
    if noisy and only_if_quiet:
        print(f"SPEED NOT CHECKED: {'; '.join(noisy)}")
        return 0
    worse: list[str] = []
    for name in names:
        try:
            rows = twice(name, measure)
        except AssertionError as problem:  # a rank died: those of torch's hooks that use callbacks may
            if not only_if_quiet:
                raise
            print(f"\n{name} could not be measured: {problem}")
            continue
        harness.show(f"{name}: against what is committed", rows)
        worse += [f"{name}: {row['ratio']} is {row['now']} and {row['again']}" for row in rows if row["verdict"] == "worse"]
    noisy = noisy or doubts(names, look())
    if not worse:
        print("\nSPEED: nothing got worse by more than its noise")
        return 0
    print(f"\nSPEED: {len(worse)} of the ratios are worse than committed, measured twice")
    print("\n".join(worse))
    if noisy:
        print(f"NOT CONFIRMED, and so no failure: {'; '.join(noisy)}")
        return 0
    print("CONFIRMED on a quiet machine. Where that is the price of something, commit the new results with it.")
    return 1
