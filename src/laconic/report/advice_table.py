"""An advice in a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laconic.report.advice_records import OWN_TASK, AdviceRecord, AdviceRow, seconds_text, share_text
from laconic.report.terminal import NAME_WIDTH as SHORT_NAME
from laconic.report.terminal import fitting

LONG_COMMAND = 100  # characters: a longer one is printed in two lines
NAME_WIDTH = 34  # characters: of a strategy, which may be folded

LEGEND = (
    "share: of the rate without communication. step: its predicted time, of which compute, encoding and decoding (with a "
    "probe also what sending takes from the compute of these hosts), and waiting for the network. bytes: what {sender} in a "
    "step, and in a day. memory: what each worker keeps beyond DDP's. After the warm-up, if the strategy has one."
)


def show(record: AdviceRecord, console: Console) -> None:
    """The verdict, the table, what is known of losses, the choice, and what it rests on."""
    console.print(record.verdict, style="bold", highlight=False, markup=False)
    names, *numbers = zip(columns(record), *(cells(row, record) for row in record.rows), strict=True)
    title: str | None = escape(record.title)
    for part in fitting(numbers, console.width - NAME_WIDTH + SHORT_NAME):
        table = Table(title=title)
        table.add_column(names[0], overflow="fold", min_width=NAME_WIDTH)
        for head, *_ in part:
            table.add_column(head, justify="right", no_wrap=True)
        for row, line in zip(record.rows, zip(names[1:], *(cells_ for _, *cells_ in part), strict=True), strict=True):
            style = "bold green" if row.strategy == record.choice else "dim" if row.refused else None
            table.add_row(*map(escape, line), style=style)
        console.print(table)
        title = None
    console.print(legend(record), style="dim", highlight=False, markup=False)
    console.print("\nWhat laconic's benchmarks saw of the loss:", highlight=False)
    for row in record.rows:
        console.print(f"- {row.strategy}: {row.loss}", style="dim", highlight=False, markup=False)
    console.print("\nThis rests on:", highlight=False)
    for sentence in record.assumptions:
        console.print(f"- {sentence}", style="dim", highlight=False, markup=False)
    console.print(f"\nchoice: {record.choice}", style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(record.reason, highlight=False, markup=False)
    console.print(f"\n{next_step(record)}", highlight=False, markup=False, soft_wrap=True)


def next_step(record: AdviceRecord) -> str:
    """What to do with the answer."""
    if not record.next_command:
        return f"next: nothing to change, {record.choice} is plain DDP"
    file = " (laconic new-task mine.py writes the file)" if f" {OWN_TASK} " in record.next_command else ""
    command = record.next_command
    if len(command) > LONG_COMMAND:
        command = command.replace(" -s ", " \\\n  -s ", 1)  # a shell takes it so
    return f"next, for its loss on your model{file}:\n{command}"


def columns(record: AdviceRecord) -> list[str]:
    """The heads of the table."""
    money = ["cost/day"] if _priced(record) else []
    return ["strategy", "share", "step", "compute", "encode", "wait", "bytes/step", "bytes/day", *money, "memory", "risk"]


def cells(row: AdviceRow, record: AdviceRecord) -> list[str]:
    """A row in words."""
    mark = f" ({row.refused})" if row.refused else ""
    money = [f"{row.cost_per_day:,.2f}" if row.cost_per_day is not None else ""] if _priced(record) else []
    return [
        row.strategy + mark,
        share_text(row.share),
        *(seconds_text(each) for each in (row.step_seconds, row.compute_seconds, row.work_seconds, row.waiting_seconds)),
        data_text(row.wire_bytes_per_step),
        data_text(row.wire_bytes_per_day),
        *money,
        data_text(row.extra_memory_bytes),
        row.risk_words,
    ]


def legend(record: AdviceRecord) -> str:
    """What the columns mean."""
    money = " cost: of all cables together." if _priced(record) else ""
    if record.one_host:
        sender = "a worker sends within this host"
    else:
        sender = "a node's cable carries" if record.per_node > 1 else "a worker's cable carries"
    return LEGEND.format(sender=sender) + money


def data_text(count: float) -> str:
    """Bytes as people write them.

    >>> data_text(0), data_text(5.2e9), data_text(9.81e13)
    ('0 B', '5.2 GB', '98.1 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _priced(record: AdviceRecord) -> bool:
    return any(row.cost_per_day is not None for row in record.rows)
