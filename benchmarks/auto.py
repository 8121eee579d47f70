"""`auto()` from its first step, with probing in its time: seconds until the loss that ddp() ends with, behind two links."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks.harness import report
from laconic.cost.link import parse
from laconic.lab.compare import Comparison, begin, compare
from laconic.report.comparison_records import Results
from laconic.report.live_comparison import Board
from laconic.report.summary import rows

TASK, WORKERS, STEPS, SEEDS, WARM = "bytes-gpt:500k", 4, 160, 3, 400
# auto(), auto() with all that may be chosen, and what turned out to be the fastest fixed choices of both classes.
STRATEGIES = {
    "none": ["ddp()", "auto()", "auto(risk='local')", "int8()", "local_adam(period=4, refresh=64, warmup=0)"],
    "100mbit": ["ddp()", "auto()", "auto(risk='local')", "int4()", "local_adam(period=16, refresh=128, warmup=0)"],
}


def measured(link: str) -> Results:
    """As `laconic compare` does it, at equal steps."""
    comparison = Comparison(TASK, STRATEGIES[link], WORKERS, parse(link), STEPS, range(SEEDS), warm=WARM)
    results = begin(comparison)
    if results.link_note:
        raise SystemExit(results.link_note)
    with TemporaryDirectory() as folder, Board(Console(file=io.StringIO()), comparison.strategies, "", SEEDS) as board:
        compare(comparison, results, Path(folder), board)
    return results


def main() -> None:
    """One table."""
    found: list[dict[str, object]] = []
    for link in STRATEGIES:
        for row in rows(measured(link)):
            reached = f"{row.to_base_loss:.1f}" if row.to_base_loss is not None else "never"
            found.append(
                {
                    "link": link,
                    "strategy": row.strategy,
                    "seconds to ddp()'s loss": reached,
                    "seeds that reached it": f"{row.reached} of {row.compared}",
                    "loss, against ddp()": f"{row.loss_ratio:.4f}" if row.loss_ratio is not None else "",
                    "kB a step": f"{row.bytes_per_step / 1e3:.0f}",
                }
            )
    legend = (
        f"{TASK}, {WORKERS} workers, {STEPS} steps from a model that ddp() has trained for {WARM}, {SEEDS} seeds. Timing "
        "begins after five steps. auto() trains as ddp() until it has timed ten steps, and probes for five seconds: both are "
        "in its time."
    )
    report("auto", "auto() beside ddp() and fixed choices", found, legend)


if __name__ == "__main__":
    main()
