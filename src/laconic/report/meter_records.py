"""What a meter writes down: rank-R.jsonl, or worker-NAME.jsonl of an elastic run; version 1."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass
class RankRecord:
    """One rank's rows, by kind, as far as they are written."""

    start: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)  # a row a sync: who took part
    end: dict[str, Any] | None = None
    starts: int = 1  # more than one: it was started again, and went on
    world: int = 1  # ranks, as of the last start
    cycle: int = 1  # steps after which the strategy does the same again, as of the last start or swap
    strategies: list[str] = field(default_factory=list)  # one after another
    before: int = 0  # steps that were made by those before the last

    @property
    def strategy(self) -> str:
        return ", then ".join(self.strategies or [self.start["strategy"]])

    @property
    def rank(self) -> int:
        return int(self.start["rank"])

    @property
    def name(self) -> str:
        """What a person calls it: a rank's number, or a worker's name."""
        return str(self.start.get("worker", self.rank))

    @property
    def label(self) -> str:
        """The same in a sentence: "rank 3", or "worker a"."""
        return f"{'worker' if 'worker' in self.start else 'rank'} {self.name}"

    def goes_by(self, row: Mapping[str, Any]) -> None:
        """From here on, as a start or a swap says."""
        self.cycle = int(row.get("cycle", 1))
        if self.strategies[-1:] != [row["strategy"]]:
            self.strategies.append(row["strategy"])
            self.before = len(self.steps)

    def recent(self, steps: int) -> int:
        """How many of the last steps a mean of about so many is to be of: whole cycles; of a run that has ended, all.

        A strategy that sends once in 16 steps has sent three or four times in the last 50, as it happens. Steps by another
        strategy, before a swap, don't count.
        """
        if self.end is not None:
            return len(self.steps)
        made = len(self.steps) - self.before
        if made < self.cycle:
            return made
        cycles = -(-steps // self.cycle)
        return min(cycles, made // self.cycle) * self.cycle

    def mean(self, key: str, last: int = 0) -> float | None:
        """Of a number over the steps, or the last so many; None where it isn't known."""
        values = [row[key] for row in self.steps[-last:]]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None


def read(folder: Path) -> list[RankRecord]:
    """All ranks of a run, also of one that is still going; or an error that says what is there instead."""
    files = files_of(folder)
    if not files:
        raise ValueError(f"{folder} has no rank-0.jsonl; is it the folder that a run is recorded in?")
    records = [record for file in files if (record := _rank(file)) is not None]
    if any("worker" in record.start for record in records):  # who was here once, and may be again
        return records
    # A run on more ranks may have been recorded here before, or this one itself before it went on with fewer.
    return [record for record in records if record.rank < records[0].world]


def files_of(folder: Path) -> list[Path]:
    """Where they are; none: nobody has written yet."""
    ranks = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank-")))
    return sorted(folder.glob("worker-*.jsonl")) or ranks


def worst(record: RankRecord, count: int) -> list[tuple[str, float | None]]:
    """The layers that lost most in the last look, and how much of their norm; None: it was not finite."""
    layers = record.layers[-1]["layers"] if record.layers else {}
    errors = [(name, layer["error"]) for name, layer in layers.items()]
    return sorted(errors, key=lambda item: (item[1] is not None, -(item[1] or 0.0)))[:count]


def _rank(file: Path) -> RankRecord | None:
    record: RankRecord | None = None
    lines = file.read_text().split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end is still being written
        try:
            row = json.loads(line)
            kind = row["kind"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if '"kind": "start"' in lines[number][:20]:
                continue  # half a line: the process was killed while it wrote, and started again
            raise ValueError(f"{file}, line {number} is damaged: {error}") from error
        if kind == "start":
            if row.get("version") != VERSION:
                raise ValueError(f"{file} is of version {row.get('version')!r} of the meter's records; this reads {VERSION}")
            if record is None:
                record = RankRecord(row)
            else:
                record.starts, record.end = record.starts + 1, None
            record.world = int(row["world"])
            record.goes_by(row)
        elif record is None:
            raise ValueError(f"{file} doesn't begin with a start")
        elif kind == "end":
            record.end = row
        elif kind == "swap":
            record.goes_by(row)
        else:
            rows = {"step": record.steps, "sync": record.syncs, "layers": record.layers, "workers": record.workers}
            rows[kind].append(row)
    return record
