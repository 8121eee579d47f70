"""What a comparison writes down: results.json, version 1."""

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

VERSION = 1
FILE, PAGE = "results.json", "report.html"


@dataclass
class Record:
    """One strategy with one seed."""

    strategy: str
    seed: int
    steps: int
    val_loss: float | None  # of the averaged model, at the end; None: it is no finite number, the run diverged
    seconds: float  # of the timed steps
    step_ms: float
    predicted_step_ms: float | None  # over the link that was asked for, where it could not be had
    wire_bytes_per_step: dict[str, float | None]  # counted, predicted, kernel
    wait_ms: float | None  # a step, while the training thread stood still
    curve: list[list[float | None]]  # [step, seconds, bytes, loss]; the loss is None where it is no finite number
    pace: list[list[float | None]]  # of each timed step: its milliseconds, and those of waiting in it
    expected_step_ms: float | None = None  # what the cost model says of `step_ms`, before the run; older files have none


@dataclass
class Results:
    """A whole comparison."""

    machine: dict[str, Any]
    versions: dict[str, str]
    task: str
    workers: int
    link: str
    link_note: str | None  # why the link isn't limited as asked, if it isn't
    runs: list[Record] = field(default_factory=list)
    version: int = VERSION
    fingerprint: str | None = None  # of the task, so that runs of two of them never stand side by side; older files have none
    seconds: float | None = None  # that each run was given; None: all made as many steps
    warm: int = 0  # steps of ddp() in which every run begins
    command: str | None = None  # that made it, but for its seeds
    island_size: int = 1  # so many workers hold one model together, sharded, behind one link

    @property
    def who(self) -> str:
        """How many workers, in words."""
        if self.island_size == 1:
            return f"{self.workers} workers"
        return f"{self.workers // self.island_size} islands of {self.island_size} workers"

    def write(self, folder: Path) -> None:
        """To a temporary name first: an interruption leaves the file before. A page of fewer runs goes."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PAGE).unlink(missing_ok=True)
        write_whole(folder / FILE, _text(asdict(self)))


def set_aside(folder: Path) -> list[str]:
    """Make room for a new comparison: the one that is there, and its page, get a number. Their new names."""
    there = [folder / name for name in (FILE, PAGE) if (folder / name).exists()]
    for number in count(1):
        renamed = [file.with_stem(f"{file.stem}-{number}") for file in (folder / FILE, folder / PAGE)]
        if not any(file.exists() for file in renamed):
            break
    return [file.rename(file.with_stem(f"{file.stem}-{number}")).name for file in there]


def check_room(folder: Path) -> None:
    """Whether a record can be written there at all: to be known before the work, not after it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder, and {folder} is a file")
    try:
        made = [part for part in (folder, *folder.parents) if not part.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{FILE}.probe"
        try:
            write_whole(probe, " " * 1_000_000)
        finally:
            probe.unlink(missing_ok=True)
            for part in made:
                part.rmdir()
    except OSError as error:
        raise ValueError(
            f"nothing can be written into --out {folder} ({error.strerror or error}); give a folder that you can write to, "
            "with --out"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """The new file, or the one before: never half of one, also on a full disk."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def finite(data: Any) -> Any:
    """The same data with None for every NaN and infinity, for which JSON has no word.

    >>> finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    match data:
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {key: finite(value) for key, value in data.items()}
        case list() | tuple():
            return [finite(value) for value in data]
    return data


def _text(data: dict[str, Any]) -> str:
    """JSON with a row of numbers on a line of its own. Only there a bracket is followed by a newline: texts have none."""
    text = json.dumps(finite(data), indent=1, allow_nan=False)
    return re.sub(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text) + "\n"


def read(folder: Path) -> Results:
    """What a comparison has written, or an error that says what is there instead."""
    file = folder / FILE
    try:
        # Older files say NaN where the loss was none.
        data = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda word: None)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {FILE}; is it the --out of a comparison?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"{file} is not of version {VERSION} of laconic's results")
    try:
        return Results(**{**data, "runs": [_record(run) for run in data["runs"]]})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _record(data: dict[str, Any]) -> Record:
    """A run with all its numbers: what is missing would only be missed when the table is made."""
    record = Record(**data)
    missing = {"counted", "predicted", "kernel"} - record.wire_bytes_per_step.keys()
    if missing:
        raise KeyError(f"wire_bytes_per_step of {record.strategy} lacks {', '.join(sorted(missing))}")
    return record
