"""Strategies side by side: one after the other, each in workers of its own behind the same link."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.lab.link import Link, refusal, start
from laconic.lab.worker import WORD
from laconic.report.records import Record, Results

LOOKS, WARMUP = 8, 5


class WorkerError(RuntimeError):
    """A worker failed; the message has its traceback, once."""


@dataclass(frozen=True)
class Comparison:
    """What is asked."""

    task: str
    strategies: Sequence[str]
    workers: int = 4
    link: Link = Link()
    steps: int = 200
    seeds: Sequence[int] = (0,)

    def jobs(self) -> Iterator[tuple[str, int]]:
        """Seed by seed, so that a slow hour of the machine hits all strategies alike."""
        for seed in self.seeds:
            for strategy in self.strategies:
                yield strategy, seed


def begin(comparison: Comparison) -> Results:
    """An empty record: where and with what."""
    import torch

    from laconic import __version__

    note = refusal(comparison.link) if comparison.link.bits_per_second is not None else None
    versions = {"laconic": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return Results(_machine(), versions, comparison.task, comparison.workers, str(comparison.link), note)


def run_one(
    comparison: Comparison, results: Results, strategy: str, seed: int, progress: Callable[[dict[str, Any]], None]
) -> Record:
    """Train once; `progress` hears of every look at the loss."""
    job = {
        "task": comparison.task,
        "strategy": strategy,
        "seed": seed,
        "steps": comparison.steps,
        "looks": LOOKS,
        "warmup": WARMUP,
    }
    environment = {**os.environ, "LACONIC_JOB": json.dumps(job), "PYTHONUNBUFFERED": "1"}
    link = Link() if results.link_note else comparison.link
    process = start([sys.executable, "-m", "laconic.lab.worker"], comparison.workers, link, environment)
    looks: list[dict[str, Any]] = []
    end: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = []
    other: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if not line.startswith(WORD):
                other.append(line)
                continue
            facts = json.loads(line[len(WORD) :])
            if facts["kind"] == "look":
                looks.append(facts)
                progress(facts)
            elif facts["kind"] == "error":
                errors.append(facts)
            else:
                end = facts
        process.wait()
    finally:  # also on Ctrl-C: nothing is left
        process.kill()
        process.wait()
        process.stdout.close()
    if end is None or not looks:
        raise WorkerError(_explained(strategy, errors, other, process.returncode))
    return _record(comparison, strategy, seed, looks, end)


def _record(comparison: Comparison, strategy: str, seed: int, looks: list[dict[str, Any]], end: Mapping[str, Any]) -> Record:
    last = looks[-1]
    counted = last["bytes"] / comparison.steps
    kernel = None if last["kernel"] is None else last["kernel"] / last["timed"]
    wait = None if end["wait_seconds"] is None else end["wait_seconds"] / comparison.steps * 1e3
    return Record(
        strategy,
        seed,
        comparison.steps,
        last["loss"],
        last["seconds"],
        last["seconds"] / last["timed"] * 1e3,
        {"counted": counted, "predicted": end["predicted"] / comparison.steps, "kernel": kernel},
        wait,
        [[look["step"], look["seconds"], look["bytes"], look["loss"]] for look in looks],
    )


def _explained(strategy: str, errors: list[dict[str, Any]], other: list[str], code: int | None) -> str:
    """The first worker's own error; those of its peers, which only lost a connection, are left out."""
    own = [error for error in errors if "CommunicationError" not in error["text"] and "UnevenError" not in error["text"]]
    if own or errors:
        first = (own or errors)[0]
        return f"{strategy}: worker {first['rank']} failed:\n{first['trace']}"
    said = "".join(other[-20:]).strip()
    return f"{strategy}: a worker died (exit code {code})" + (f"; the last it said:\n{said}" if said else " and said nothing")


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}
