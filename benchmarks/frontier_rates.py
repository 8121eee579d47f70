"""How fast each strategy of the frontier is behind 100 Mbit/s: real processes, short and long steps."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import laconic
from benchmarks.frontier import SMALL_BATCH, with_adam
from benchmarks.harness import report
from laconic.cost.link import parse
from laconic.lab.compare import Comparison, begin, compare
from laconic.report.live_comparison import Board
from laconic.report.summary import BASE, LIMIT, Row, rows

LINK, SEEDS = "100mbit", (0, 1)
TASKS = {"short steps": ("bytes-gpt:500k", 69), "long steps": (str(Path(__file__).with_name("long_steps.py")), 53)}


def measure(task: str, steps: int, strategies: Sequence[str]) -> dict[str, Row]:
    """By the lab, with four workers; by strategy."""
    comparison = Comparison(task, [BASE, *strategies, LIMIT], 4, parse(LINK), steps, SEEDS)
    results = begin(comparison)
    with tempfile.TemporaryDirectory() as out, Board(Console(), comparison.strategies, f"{steps} steps", len(SEEDS)) as board:
        compare(comparison, results, Path(out), board)
    return {row.strategy: row for row in rows(results)}


def main() -> None:
    """One table."""
    names = [str(laconic.strategy(text)) for text in with_adam(SMALL_BATCH) if text != LIMIT]
    found = {label: measure(task, steps, names) for label, (task, steps) in TASKS.items()}
    table: list[dict[str, object]] = []
    for name in (BASE, *names, LIMIT):
        row: dict[str, object] = {"strategy": name}
        for label, measured in found.items():
            one, limit = measured[name], measured[LIMIT]
            row[f"{label}, ms"] = f"{one.step_ms:.0f}"
            row[f"{label}, share"] = f"{limit.step_ms / one.step_ms:.2f}"
        table.append(row)
    legend = (
        f"Byte-level transformer of 470,000 parameters, AdamW, 4 processes on one machine behind {LINK} links, batches of 8 "
        f"(short steps) and 32 windows of 64 bytes (long steps), {len(SEEDS)} seeds. ms: of a step. share: of the step rate of "
        "silent(), which never communicates, in the same comparison. All processes share the machine's cores, "
        "so that encoding costs time that a worker with a core of its own would not notice."
    )
    report("frontier_rates", "Rates of the frontier's strategies", table, legend)


if __name__ == "__main__":
    main()
