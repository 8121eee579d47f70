"""Strategies side by side: one after the other, by the same workers behind the same link."""

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import laconic
from laconic.lab.link import KILLED, Link, refusal, start
from laconic.lab.step_time import delay_seconds, step_seconds, wire_seconds
from laconic.lab.worker import LINE_PREFIX
from laconic.report import comparison_records as records
from laconic.report.comparison_records import Record, Results
from laconic.report.live_comparison import Board

LOOKS, WARMUP = 8, 5
QUIET_SECONDS = 0.1  # without a byte on the cable, and nothing is outstanding any more


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

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"--workers must be at least 2, got {self.workers}: one alone has nobody to communicate with")

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
    return Results(
        _machine(),
        versions,
        comparison.task,
        comparison.workers,
        str(comparison.link),
        note,
        fingerprint=fingerprint(comparison.task, versions),
    )


def fingerprint(task: str, versions: Mapping[str, str]) -> str:
    """What makes a task another one: the text of its file, or for those built in, laconic and the library that they read."""
    if task.endswith(".py"):
        return f"sha256:{hashlib.sha256(Path(task).read_bytes()).hexdigest()}"
    return f"{task} of laconic {versions['laconic']} on Python {versions['python']}"


def resumed(results: Results, comparison: Comparison, out: Path) -> None:
    """Take over the runs of an interrupted comparison, if it was the same one."""
    before = records.read(out)
    there = (
        before.task,
        before.workers,
        before.link,
        before.link_note,
        {run.steps for run in before.runs} or {comparison.steps},
    )
    here = (results.task, results.workers, results.link, results.link_note, {comparison.steps})
    if there != here:
        raise ValueError(
            f"{out} is of {_words(*there)}, and asked is {_words(*here)}: not the same comparison; give another --out"
        )
    if before.fingerprint not in (None, results.fingerprint):
        raise ValueError(
            f"{results.task} is not what it was when {out} was made ({before.fingerprint}, now {results.fingerprint}): "
            "runs of two models don't compare; give another --out, or leave --resume away"
        )
    results.runs = before.runs


def compare(comparison: Comparison, results: Results, out: Path, board: Board) -> None:
    """Run what isn't there yet; the record is written after each run, and the first one renames a former comparison."""
    done = {(run.strategy, run.seed) for run in results.runs}
    for run in results.runs:
        if run.strategy in comparison.strategies:
            board.finish(run, ran=False)
    for record in train([job for job in comparison.jobs() if job not in done], comparison, results, board):
        if not results.runs and (moved := records.set_aside(out)):
            board.say(f"what was in {out} before is kept there as {' and '.join(moved)}")
        results.runs.append(record)
        results.write(out)
        board.finish(record)


def stopped(results: Results, out: Path) -> str:
    """What an interruption leaves."""
    if not results.runs:
        return "stopped before anything was finished"
    return f"stopped; what is finished is in {out}, and --resume goes on from there"


def _words(task: str, workers: int, link: str, note: str | None, steps: Iterable[int]) -> str:
    limit = f"{link}{' (not limited)' if note else ''}"
    return f"{task}, {workers} workers, link {limit}, {', '.join(map(str, sorted(steps)))} steps"


def train(jobs: Sequence[tuple[str, int]], comparison: Comparison, results: Results, board: Board) -> Iterator[Record]:
    """Have the workers train, one job after the other; a record each. The board hears how it goes."""
    if not jobs:
        return
    link = Link() if results.link_note else comparison.link
    common = {"task": comparison.task, "steps": comparison.steps, "looks": LOOKS, "warmup": WARMUP}
    orders = [
        {**common, "strategy": strategy, "seed": seed, "settle_seconds": settle_seconds(strategy, link)}
        for strategy, seed in jobs
    ]
    with TemporaryFile() as file:  # without a name, and so it goes with its last reader
        file.write(json.dumps(orders).encode())
        file.flush()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = start([sys.executable, "-m", "laconic.lab.worker"], comparison.workers, link, environment, file)
    assert process.stdout is not None
    try:
        for strategy, seed in jobs:
            board.begin(strategy)
            told = _listen(process, strategy, functools.partial(board.heard, strategy))
            yield _record(comparison, strategy, seed, told, limited=not results.link_note)
    finally:  # also on Ctrl-C: nothing is left
        process.kill()
        process.wait()
        process.stdout.close()


def _listen(
    process: "subprocess.Popen[str]", strategy: str, progress: Callable[[dict[str, Any]], None]
) -> dict[str, list[dict[str, Any]]]:
    """What the workers tell of one job, by kind, until they tell its end."""
    told: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("tick", "look", "pace", "error", "end")}
    other: list[str] = []
    for line in process.stdout or ():
        if not line.startswith(LINE_PREFIX):
            other.append(line)
            continue
        facts = json.loads(line[len(LINE_PREFIX) :])
        told[facts["kind"]].append(facts)
        if facts["kind"] == "end":
            return told
        if facts["kind"] in ("tick", "look"):
            progress(facts)
    raise WorkerError(_explained(strategy, told["error"], other, process.wait()))


def _record(
    comparison: Comparison, strategy: str, seed: int, told: Mapping[str, list[dict[str, Any]]], *, limited: bool
) -> Record:
    last, (end,) = told["look"][-1], told["end"]
    step_ms = last["seconds"] / last["timed"] * 1e3
    wait = None if end["wait_seconds"] is None else end["wait_seconds"] / last["timed"] * 1e3
    wire = wire_seconds(end["wire_bytes"], comparison.link)
    wire += delay_seconds(end["collectives"], comparison.workers, comparison.link)
    bytes_per_step = {
        "counted": last["bytes"] / comparison.steps,
        "predicted": end["predicted"] / comparison.steps,
        "kernel": None if last["kernel"] is None else last["kernel"] / comparison.steps,
    }
    return Record(
        strategy=strategy,
        seed=seed,
        steps=comparison.steps,
        val_loss=records.finite(last["loss"]),
        seconds=last["seconds"],
        step_ms=step_ms,
        predicted_step_ms=None if limited else predicted_ms(strategy, step_ms, wire * 1e3),
        wire_bytes_per_step=bytes_per_step,
        wait_ms=wait,
        curve=[[look["step"], look["seconds"], look["bytes"], records.finite(look["loss"])] for look in told["look"]],
        pace=[row for part in told["pace"] for row in part["rows"]],
    )


def predicted_ms(strategy: str, step_ms: float, wire_ms: float) -> float:
    """What a step that was measured without a limit would take over the link."""
    return step_seconds(step_ms, wire_ms, in_the_air=_in_the_air(strategy))


def settle_seconds(strategy: str, link: Link) -> float:
    """How long a cable must be silent until nothing is outstanding: messages that wait for each other leave gaps."""
    return QUIET_SECONDS + 2 * link.delay_seconds if _in_the_air(strategy) else 0.0


def _in_the_air(strategy: str) -> bool:
    averaging = laconic.strategy(strategy).averaging
    return averaging is not None and averaging.deltas is not None and averaging.deltas.delay > 0


def _explained(strategy: str, errors: list[dict[str, Any]], other: list[str], code: int | None) -> str:
    """The first worker's own error; those of its peers, which only lost a connection, are left out."""
    heard = ("CommunicationError", "PeerError", "UnevenError")
    own = [error for error in errors if not any(kind in error["text"] for kind in heard)]
    killed = [line.strip() for line in other if KILLED in line]
    if killed and not own:
        return f"{strategy}: {', '.join(killed)}"
    if own or errors:
        first = (own or errors)[0]
        return f"{strategy}: worker {first['rank']} failed:\n{first['trace']}"
    said = "".join(other[-20:]).strip()
    return f"{strategy}: a worker died (exit code {code})" + (f"; the last it said:\n{said}" if said else " and said nothing")


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}
