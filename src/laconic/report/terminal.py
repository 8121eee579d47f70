"""A comparison in a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laconic.report.comparison_records import Results
from laconic.report.summary import TOO_FAST, Row, rows
from laconic.report.verdict import ground, verdict

LEGEND = (
    "val loss: of the averaged model on held-out data, and against ddp(); diverged: it is no finite number. spread: of the "
    "loss, over seeds, or with one seed over the last looks of its curve. Bytes: what one worker must "
    "put on the cable in a step: counted, predicted on meta tensors, and as the kernel counted on its interface. "
    "step: of the timed ones, without the first five; bytes are of all; both include a strategy's warm-up. model: the same, as "
    "the cost model predicted it before the run. speed: against ddp(). limit: share of the step rate "
    "of silent(), which never communicates; noise: it came out faster than that, which is the machine's noise. to ddp loss: "
    "seconds until the final loss of ddp() with the same seed, to 0.1 %, is reached and kept."
)
NAME_WIDTH, FRAME = 20, 3  # characters: of a name, which may be folded; around a cell
EQUAL_TIME = (
    " Every strategy had the same time, and made as many steps as fitted in; schedules of the learning rate are stretched to "
    "them. equal steps: against ddp() after as many steps as all have made, from the curves; with a schedule, a run of "
    "more steps still has a higher rate there, so that it looks worse than it would at the end of as many."
)
ON_THE_LINK = (
    " on the link: PREDICTED, not measured, from the step without a limit, the bytes and the link's delay; and so are speed, "
    "limit and to ddp loss, which follow from it."
)

BETWEEN_ISLANDS = (
    " Bytes are between islands alone, of one worker; its island's cable carries those of all its workers, and kernel is a "
    "worker's share of that."
)


def show(results: Results, console: Console) -> None:
    """The table, in parts where the terminal is narrow, its legend and the verdict."""
    names, *numbers = zip(columns(results), *(cells(row, results) for row in rows(results)), strict=True)
    title: str | None = escape(f"{results.task}, {results.who}, link {results.link}")
    for part in fitting(numbers, console.width):
        table = Table(title=title)
        table.add_column(names[0], overflow="fold", min_width=NAME_WIDTH)
        for head, *_ in part:
            table.add_column(head, justify="right", no_wrap=True)
        for line in zip(names[1:], *(cells_ for _, *cells_ in part), strict=True):
            table.add_row(*map(escape, line))
        console.print(table)
        title = None
    console.print(f"{legend(results)}\n{ground(results)}", style="dim", highlight=False, markup=False)
    console.print(f"\n{verdict(results)}", highlight=False, markup=False)


def fitting(numbers: Sequence[Sequence[str]], width: int) -> list[list[Sequence[str]]]:
    """Columns in as many tables as it takes, each with the names in front, so that no number is cut or folded."""
    parts: list[list[Sequence[str]]] = []
    left = 0
    for column in numbers:
        needed = max(map(len, column)) + FRAME
        if not parts or needed > left:
            parts.append([])
            left = width - (NAME_WIDTH + FRAME + 1)
        parts[-1].append(column)
        left -= needed
    return parts


def columns(results: Results) -> list[str]:
    """The heads of the table; what a link would cost only where it could not be had."""
    timed = ["steps", "equal steps"] if results.seconds is not None else []
    names = [
        "strategy",
        "val loss",
        "vs ddp",
        "spread",
        *timed,
        "bytes/step",
        "predicted",
        "kernel",
        "step",
        "model",
        "speed",
        "limit",
    ]
    names.append("to ddp loss")
    return [*names, "on the link"] if results.link_note else names


def cells(row: Row, results: Results) -> list[str]:
    """A row in words."""
    found = [
        row.strategy,
        loss(row),
        f"{row.loss_ratio:.3f}" if row.loss_ratio is not None else "-",
        f"{row.loss_spread:.1%}" if row.loss_spread is not None else "-",
        *(_steps(row) if results.seconds is not None else []),
        human(row.bytes_per_step),
        human(row.predicted),
        human(row.kernel),
        f"{row.step_ms:.1f} ms",
        f"{row.model_ms:.1f} ms" if row.model_ms is not None else "",
        f"{row.speed:.2f}x" if row.speed else "",
        limit(row),
        reached(row),
    ]
    return [*found, f"{row.predicted_ms:.1f} ms" if row.predicted_ms is not None else ""] if results.link_note else found


def loss(row: Row) -> str:
    """The loss, or that there is none."""
    if row.loss is not None:
        return f"{row.loss:.4f}"
    return f"diverged ({row.diverged} of {row.seeds})" if row.seeds > 1 else "diverged"


def limit(row: Row) -> str:
    """The share of the rate without communication; nobody has more than all of it."""
    if not row.share:
        return ""
    return f"{row.share:.0%}" if row.share < TOO_FAST else "noise"


def _steps(row: Row) -> list[str]:
    return [f"{row.steps:.0f}", f"{row.at_equal_steps:.3f}" if row.at_equal_steps is not None else "-"]


def reached(row: Row) -> str:
    """When it came to ddp's loss, and with how many of the seeds, if not with all."""
    if row.to_base_loss is None:
        return "never" if row.compared else "-"
    return f"{row.to_base_loss:.1f} s" + (f" ({row.reached} of {row.compared})" if row.reached < row.compared else "")


def legend(results: Results) -> str:
    """What the columns mean."""
    islands = BETWEEN_ISLANDS if results.island_size > 1 else ""
    return LEGEND + islands + (EQUAL_TIME if results.seconds is not None else "") + (ON_THE_LINK if results.link_note else "")


def human(count: float | None) -> str:
    """Bytes as people write them."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
