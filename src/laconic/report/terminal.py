"""A comparison in a terminal."""

from rich.console import Console
from rich.table import Table

from laconic.report.records import Results
from laconic.report.summary import Row, rows, verdict

LEGEND = (
    "val loss: of the averaged model on held-out data, and against ddp(). Bytes: what one worker must put on the cable in a "
    "step: counted, predicted on meta tensors, and as the kernel counted on its interface. step: timed steps, no warm-up. "
    "limit: share of the step rate of silent(), which never communicates. to ddp loss: seconds until ddp()'s final loss."
)


def show(results: Results, console: Console) -> None:
    """The table, its legend and the verdict."""
    table = Table(title=f"{results.task}, {results.workers} workers, link {results.link}")
    for name in (
        "strategy",
        "val loss",
        "vs ddp",
        "bytes/step",
        "predicted",
        "kernel",
        "step",
        "speed",
        "limit",
        "to ddp loss",
    ):
        first = name == "strategy"
        table.add_column(name, justify="left" if first else "right", overflow="fold", min_width=20 if first else None)
    for row in rows(results):
        table.add_row(*_cells(row))
    console.print(table)
    machine = f"{results.machine.get('cores')} cores, {results.machine.get('cpu')}"
    seeds = sorted({run.seed for run in results.runs})
    noise = [row.spread for row in rows(results) if row.spread is not None]
    spread = f"; step times vary by {max(noise):.0%} over seeds" if noise else "; one seed, so nothing is known of the noise"
    console.print(f"{LEGEND}\nMachine: {machine}. Seeds: {', '.join(map(str, seeds))}{spread}.", style="dim", highlight=False)
    if results.link_note:
        console.print(results.link_note, style="bold", highlight=False, markup=False)
    console.print(f"\n{verdict(results)}", highlight=False, markup=False)


def _cells(row: Row) -> list[str]:
    return [
        row.strategy.replace("[", "\\["),
        f"{row.loss:.4f}",
        f"{row.loss_ratio:.3f}" if row.loss_ratio else "",
        human(row.bytes_per_step),
        human(row.predicted),
        human(row.kernel),
        f"{row.step_ms:.1f} ms",
        f"{row.speed:.2f}x" if row.speed else "",
        f"{row.share:.0%}" if row.share else "",
        f"{row.to_base_loss:.1f} s" if row.to_base_loss is not None else "never",
    ]


def human(count: float | None) -> str:
    """Bytes as people write them."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
