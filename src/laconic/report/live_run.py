"""A run while it goes on, from another terminal."""

import difflib
import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from laconic.report.meter_records import RankRecord, files_of, read, worst
from laconic.report.terminal import human

RECENT_STEPS, SILENT_SECONDS, WAIT_SECONDS = 50, 15, 60.0
LEGEND = (
    f"Means of about the last {RECENT_STEPS} steps. bytes/step: what a rank put on the cable, counted. waiting: share of the "
    "time in which the training thread stood still for a collective. encoding: share in which exchanges encoded and decoded. "
    f"state: silent, if no step has come for {SILENT_SECONDS} s."
)
SYNC_LEGEND = (
    " last sync: norm of this rank's delta and of the mean, cosine between the ranks' deltas, drift (distance of the replicas "
    "from their mean, root mean square)."
)
LAYERS_LEGEND = " lost: ||x - sent|| / ||x||, of the three layers that lose most."


def watch(folder: Path, console: Console, *, once: bool = False, wait_seconds: float | None = None) -> None:
    """Show how a run stands until it ends, or until Ctrl-C; `once`: now.

    `wait_seconds` is how long a run that has not begun is waited for; None: without end in a terminal, where somebody sees
    it, and for a minute elsewhere.
    """
    if once:
        console.print(picture(read(folder)))
        return
    if not files_of(folder):
        if wait_seconds is None and not console.is_terminal:
            wait_seconds = WAIT_SECONDS
        _await(folder, console, wait_seconds)
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            records = read(folder)
            live.update(picture(records))
            if records and all(record.end is not None for record in records):
                return
            time.sleep(0.5)


def _await(folder: Path, console: Console, seconds: float | None) -> None:
    """Come back when a run has begun to write there; a ValueError after `seconds`.

    Not in the live picture: that is shown in a terminal alone, and a name that is misspelt would be waited for unseen.
    """
    what = "is empty of records" if folder.is_dir() else "does not exist yet"
    others = _runs_beside(folder)
    beside = f" Beside it there is {', '.join(map(str, others))}." if others else ""
    length = "" if seconds is None else f" {seconds:g} s"
    console.print(
        f"{folder} {what}; waiting{length} for a run to write there: laconic run --record {folder} ..., or "
        f"laconic.Meter(run, {str(folder)!r}) in a script.{beside} Ctrl-C ends the wait.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    begun = time.monotonic()
    while not files_of(folder):
        if seconds is not None and time.monotonic() - begun >= seconds:
            raise ValueError(f"no run has written into {folder} within {seconds:g} s; --wait SECONDS waits longer.{beside}")
        time.sleep(0.5 if seconds is None else min(0.5, seconds))


def _runs_beside(folder: Path) -> list[Path]:
    """Folders with records whose name is like this one's, the most alike first."""
    try:
        runs = {one.name: one for one in folder.absolute().parent.iterdir() if one.is_dir() and files_of(one)}
    except OSError:
        return []
    return [folder.with_name(name) for name in difflib.get_close_matches(folder.name, runs, 3, 0.5)] if folder.name else []


def picture(records: list[RankRecord]) -> Group:
    """A line a rank, the last sync, and the layers that lose most."""
    if not records:
        return Group(Text("the run has just begun"))
    elastic = [record for record in records if "worker" in record.start]
    first = max(records, key=lambda record: len(record.syncs)) if elastic else records[0]
    count, name = (len(elastic), "worker") if elastic else (first.start["world"], "rank")
    who = f"{count} {name}{'' if count == 1 else 's'}"
    title = f"{first.strategy}, {who}, {first.start['parameters']:,} parameters"
    table = Table(title=escape(title))
    for place, name in enumerate(
        ("worker" if elastic else "rank", "step", "steps/s", "bytes/step", "waiting", "encoding", "state")
    ):
        table.add_column(name, justify="right" if 0 < place < 6 else "left")
    for record in records:
        table.add_row(*_cells(record))
    lines = [Text(line, style="dim") for line in (_workers(elastic), _sync(first), _layers(first)) if line]
    legend = LEGEND + (SYNC_LEGEND if first.syncs else "") + (LAYERS_LEGEND if first.layers else "")
    return Group(table, *lines, Text(legend, style="dim italic"))


def _cells(record: RankRecord) -> list[str]:
    last = record.recent(RECENT_STEPS)
    seconds = record.mean("seconds", last)
    if seconds is None:
        return [record.name, str(record.start["step"]), "", "", "", "", _state(record)]
    sent, waited, worked = (record.mean(key, last) for key in ("wire_bytes", "wait_seconds", "work_seconds"))
    return [
        record.name,
        str(record.steps[-1]["step"]),
        f"{1 / seconds:.1f}",
        human(sent),
        "" if waited is None else f"{waited / seconds:.0%}",
        "" if worked is None else f"{worked / seconds:.0%}",
        _state(record),
    ]


def _state(record: RankRecord) -> str:
    if record.end is not None:
        return "failed" if record.end.get("failure") else "ended"
    last = record.steps[-1]["time"] if record.steps else record.start["time"]
    silent = time.time() - last
    restarted = f", started {record.starts} times" if record.starts > 1 else ""
    return (f"silent for {silent:.0f} s" if silent > SILENT_SECONDS else "going") + restarted


def _sync(record: RankRecord) -> str:
    if not record.syncs:
        return ""
    last = record.syncs[-1]
    parts = [
        f"{key.replace('_', ' ')} {last[key]:.3g}" for key in ("norm", "mean_norm", "cosine", "drift") if last[key] is not None
    ]
    return f"last sync, step {last['step']}: {', '.join(parts)}"


def _workers(records: list[RankRecord]) -> str:
    """Who took part in the newest sync, how much each counted, and what has become of the others."""
    rows = sorted((row for record in records for row in record.workers), key=lambda row: float(row["time"]))
    made = [row for row in rows if row["dropped"] is None]
    if not made:
        return ""
    last = made[-1]
    there = ", ".join(f"{name} (weight {weight:.2f})" for name, weight in sorted(last["weights"].items()))
    by_version = {row["version"]: row for row in made}.values()  # each worker has a row of it
    counts = {what: sum(len(row[what]) for row in by_version) for what in ("joined", "lost", "left")}
    dropped = max(sum(row["dropped"] is not None for row in record.workers) for record in records)
    changes = ", ".join(f"{number} {what}" for what, number in counts.items())
    return f"there at step {last['step']}: {there or 'one worker'}; since the start {changes}; {dropped} syncs dropped"


def _layers(record: RankRecord) -> str:
    if not record.layers:
        return ""
    step, found = record.layers[-1]["step"], worst(record, 3)
    if not found or found[0][1] == 0:
        return f"lost in step {step}: nothing"
    return f"lost in step {step}: " + ", ".join(
        f"{name} {'(not finite)' if error is None else format(error, '.2%')}" for name, error in found
    )
