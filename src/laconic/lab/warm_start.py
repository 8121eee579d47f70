"""Warm starts: a model that ddp() has trained for some steps, made once and kept, in which every strategy begins."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from laconic.cost.link import Link
from laconic.lab.workers import Workers


def folder() -> Path:
    """Where warm starts are kept between comparisons; a user may delete it at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic" / "warm"


def ensure(
    task: str, steps: int, seeds: Iterable[int], workers: int, fingerprint: str | None, say: Callable[[str], object]
) -> dict[int, str]:
    """The file of each seed; those that are not there yet are made now, without a link's limit. None for no steps."""
    if not steps:
        return {}
    facts = (task, fingerprint, _beside(task), steps, workers)
    found = {seed: _path(*facts, seed) for seed in sorted(seeds)}
    missing = {seed: path for seed, path in found.items() if not path.exists()}
    if missing:
        folder().mkdir(parents=True, exist_ok=True)
        jobs = [{"task": task, "seed": seed, "warm": steps, "save": str(path)} for seed, path in missing.items()]
        with Workers(jobs, workers, Link()) as made:
            for seed in missing:
                say(f"warm start, seed {seed}: {steps} steps of ddp() without a limit; kept in {folder()}")
                made.told(f"the warm start of seed {seed}", lambda facts: _pass_on(facts, say))
    return {seed: str(path) for seed, path in found.items()}


def _pass_on(facts: Mapping[str, object], say: Callable[[str], object]) -> None:
    if "line" in facts:
        say(f"warm start, worker {facts['rank']} prints: {facts['line']}")


def _beside(task: str) -> str:
    """The Python files in the folder of a user's task: it may import them."""
    files = sorted(Path(task).parent.glob("*.py")) if task.endswith(".py") else []
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _path(*facts: object) -> Path:
    import torch

    return folder() / f"{hashlib.sha256(repr((*facts, torch.__version__)).encode()).hexdigest()[:20]}.pt"
