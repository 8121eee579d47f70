"""What a comparison writes down: results.json, version 1."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
FILE = "results.json"


@dataclass
class Record:
    """One strategy with one seed."""

    strategy: str
    seed: int
    steps: int
    val_loss: float  # of the averaged model, at the end
    seconds: float  # of the timed steps
    step_ms: float
    wire_bytes_per_step: dict[str, float | None]  # counted, predicted, kernel
    wait_ms: float | None  # a step, while the training thread stood still
    curve: list[list[float]]  # [step, seconds, bytes, loss]


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

    def write(self, folder: Path) -> None:
        """To a temporary name first: an interruption leaves the file before."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{FILE}.partial"
        with partial.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / FILE)


def read(folder: Path) -> Results:
    """What a comparison has written, or an error that says what is there instead."""
    file = folder / FILE
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {FILE}; is it the --out of a comparison?") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"{file} is not of version {VERSION} of laconic's results")
    try:
        return Results(**{**data, "runs": [Record(**run) for run in data["runs"]]})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
