"""Strategies side by side: one after the other, by the same workers behind the same link."""

import functools
import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import laconic
from laconic.cost.link import Link
from laconic.lab import compiled, host_speeds, warm_start
from laconic.lab.link import refusal
from laconic.lab.workers import Workers
from laconic.report import comparison_records as records
from laconic.report.comparison_records import Record, Results
from laconic.report.live_comparison import Board
from laconic.strategies.parsing import saved

LOOKS, WARMUP = 8, 5
QUIET_SECONDS = 0.1  # without a byte on the cable, and nothing is outstanding any more


@dataclass(frozen=True)
class Comparison:
    """What is asked."""

    task: str
    strategies: Sequence[str]
    workers: int = 4
    link: Link = Link()
    steps: int = 200
    seeds: Sequence[int] = (0,)
    seconds: float | None = None  # of the timed steps of each run, instead of `steps`
    warm: int = 0  # steps of ddp() before every run, made once
    island_size: int = 1  # so many workers hold one model together, sharded, behind one link

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"--workers must be at least 2, got {self.workers}: one alone has nobody to communicate with")
        if self.islands * self.island_size != self.workers:
            raise ValueError(f"--workers must be a multiple of --island-size, got {self.workers} and {self.island_size}")
        if self.islands < 2:
            raise ValueError(
                f"--workers must be at least twice --island-size, got {self.workers} and {self.island_size}: "
                "one island alone has nobody to communicate with"
            )

    @property
    def islands(self) -> int:
        """Each has a model and a link of its own; where nothing is sharded, these are the workers."""
        return self.workers // self.island_size

    def jobs(self) -> Iterator[tuple[str, int]]:
        """Seed by seed, and with each seed another strategy first: a slow minute of the machine hits another one each time."""
        for place, seed in enumerate(self.seeds):
            turn = place * len(self.strategies) // max(1, len(self.seeds))
            for strategy in [*self.strategies[turn:], *self.strategies[:turn]]:
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
        seconds=comparison.seconds,
        warm=comparison.warm,
        island_size=comparison.island_size,
    )


def fingerprint(task: str, versions: Mapping[str, str]) -> str:
    """What makes a task another one: the text of its file, or for those built in, laconic and the library that they read."""
    if task.endswith(".py"):
        return f"sha256:{hashlib.sha256(Path(task).read_bytes()).hexdigest()}"
    return f"{task} of laconic {versions['laconic']} on Python {versions['python']}"


def resumed(results: Results, comparison: Comparison, out: Path) -> None:
    """Take over the runs of an interrupted comparison, if it was the same one."""
    before = records.read(out)
    former = {run.steps for run in before.runs} if before.seconds is None and before.runs else {comparison.steps}
    there = (before.task, before.who, before.link, before.link_note, former, before.seconds, before.warm)
    asked = {comparison.steps}
    here = (results.task, results.who, results.link, results.link_note, asked, results.seconds, results.warm)
    if there != here:
        raise ValueError(
            f"{out} is of {_words(*there)}, and asked is {_words(*here)}: not the same comparison; give another --out"
        )
    if before.fingerprint not in (None, results.fingerprint):
        raise ValueError(
            f"{results.task} is not what it was when {out} was made ({before.fingerprint}, now {results.fingerprint}): "
            "runs of two models don't compare; give another --out, or leave --resume away"
        )
    texts = {laconic.strategy(text).compared: text for text in comparison.strategies}
    for run in before.runs:
        try:
            run.strategy = texts.get(saved(run.strategy).compared, run.strategy)  # it may have been written in other words
        except ValueError:
            continue  # a reducer of the user's own that this comparison has not
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


def _words(task: str, who: str, link: str, note: str | None, steps: Iterable[int], seconds: float | None, warm: int) -> str:
    limit = f"{link}{' (not limited)' if note else ''}"
    length = f"{', '.join(map(str, sorted(steps)))} steps" if seconds is None else f"{seconds:g} seconds"
    return f"{task}, {who}, link {limit}, {length}" + (f", {warm} warm steps" if warm else "")


def train(jobs: Sequence[tuple[str, int]], comparison: Comparison, results: Results, board: Board) -> Iterator[Record]:
    """Have the workers train, one job after the other; a record each. The board is told how it goes."""
    if not jobs:
        return
    link = Link() if results.link_note else comparison.link
    seeds = {seed for _, seed in jobs}
    compiled.ensure([strategy for strategy, _ in jobs], board.say)
    starts = warm_start.ensure(comparison.task, comparison.warm, seeds, comparison.workers, results.fingerprint, board.say)
    probe = host_speeds.ensure(
        comparison.workers, comparison.island_size, cables=link.bits_per_second is not None, say=board.say
    )
    asked = [(one.bits_per_second, one.delay_seconds) for one in (link, comparison.link)]
    common = {"task": comparison.task, "looks": LOOKS, "warmup": WARMUP, "probe": str(probe), "links": asked}
    common |= {"steps": comparison.steps} if comparison.seconds is None else {"seconds": comparison.seconds}
    orders = [
        {
            **common,
            "strategy": strategy,
            "seed": seed,
            "start": starts.get(seed),
            "settle_seconds": settle_seconds(strategy, link),
        }
        for strategy, seed in jobs
    ]
    with Workers(orders, comparison.workers, link, island_size=comparison.island_size) as workers:
        for strategy, seed in jobs:
            board.begin(strategy)
            told = workers.told(strategy, functools.partial(board.heard, strategy))
            yield _record(strategy, seed, told, limited=not results.link_note)


def _record(strategy: str, seed: int, told: Mapping[str, list[dict[str, Any]]], *, limited: bool) -> Record:
    last, (end,) = told["look"][-1], told["end"]
    steps = last["step"]
    step_ms = last["seconds"] / last["timed"] * 1e3
    wait = None if end["wait_seconds"] is None else end["wait_seconds"] / last["timed"] * 1e3
    here_ms, asked_ms = end["expected_ms"]
    bytes_per_step = {
        "counted": last["bytes"] / steps,
        "predicted": end["predicted"] / steps,
        "kernel": None if last["kernel"] is None else last["kernel"] / steps,
    }
    return Record(
        strategy=strategy,
        seed=seed,
        steps=steps,
        val_loss=records.finite(last["loss"]),
        seconds=last["seconds"],
        step_ms=step_ms,
        predicted_step_ms=None if limited else asked_ms,
        expected_step_ms=here_ms,
        wire_bytes_per_step=bytes_per_step,
        wait_ms=wait,
        curve=[[look["step"], look["seconds"], look["bytes"], records.finite(look["loss"])] for look in told["look"]],
        pace=[row for part in told["pace"] for row in part["rows"]],
    )


def settle_seconds(strategy: str, link: Link) -> float:
    """How long a cable must be silent until nothing is outstanding: messages that wait for each other leave gaps."""
    return QUIET_SECONDS + 2 * link.delay_seconds if _stays_outstanding(strategy) else 0.0


def _stays_outstanding(strategy: str) -> bool:
    averaging = laconic.strategy(strategy).averaging
    return averaging is not None and averaging.deltas is not None and averaging.deltas.delay > 0


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}
