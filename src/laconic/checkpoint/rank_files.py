"""Each rank's own part of a checkpoint that somebody else writes: a framework, which saves one rank's model and optimizer.

    folder/step-00000042-1f0c9a3e/rank-00000-of-00002.pt    # a file a rank, written by it, to a disk that others need not see
    folder/step-00000042-1f0c9a3e/rank-00001-of-00002.pt

The name of the inner folder is the save's mark. Whoever writes the other part keeps the mark in it: a save that is killed
between the two parts leaves the former two, which still belong together.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.checkpoint.contents import gather_own, live_engine
from laconic.checkpoint.loading import apply, check
from laconic.checkpoint.redeal import merge
from laconic.checkpoint.shards import Shards, own_parts
from laconic.comm.exchange import complete
from laconic.comm.ledger import Ledger
from laconic.ranks.agreement import agree, gather_texts
from laconic.run.engine import Engine
from laconic.run.run import Run

FORMAT = 1
MARK = re.compile(r"step-\d{8,}-[0-9a-f]{8}")
FILE = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.pt")


def save(folder: Path, *, run: Run) -> str:
    """Write this rank's part below `folder`; all ranks together, between steps. Returns the mark of this save."""
    engine = live_engine(run, "save")
    with engine.during("saving a checkpoint"):
        group, device = engine.group, engine.device
        identity = agree([f"step {run.step}", f"strategy {run.strategy.compared}"], None, group, device)
        mark = f"step-{run.step:08d}-{identity[:8]}"
        problem: Exception | None = None
        try:
            facts = {"format": FORMAT, "world": group.world, "shards": engine.ranks.shards, "step": run.step}
            _write(folder / mark / _name(group.rank, group.world), {**facts, "tree": own_parts(gather_own(engine))})
        except Exception as error:  # whatever it is, no rank may wait for this one
            problem = error
        agree([], problem, group, device)
    return mark


def remove_others(folder: Path, mark: str) -> None:
    """The other part of this save is written: those of former saves under the same name are no longer needed."""
    for found in folder.iterdir():
        if found.name != mark and MARK.fullmatch(found.name):
            shutil.rmtree(found, ignore_errors=True)  # another rank may be at it, too


@dataclass(frozen=True)
class Loaded:
    """What `load` has done."""

    problem: str | None  # why nothing was loaded, the same on all ranks
    random: Mapping[str, Any] | None = None  # where this rank's generators were, for `set_random`; None: not known


def load(folder: Path, *, run: Run, mark: str | None = None) -> Loaded:
    """Go on where `save` was called; all ranks together.

    `mark` is that of the other part, where it is known; else it is the newest that all ranks have. The other part has been
    restored already. Random generators are left to the caller, who knows when the first batch begins. On another number of
    ranks, which must see all files then, what each had is dealt anew.
    """
    engine = live_engine(run, "load")
    with engine.during("loading a checkpoint"):
        group, device = engine.group, engine.device
        mine = [found.name for found in _marks(folder) if _served(found, engine) and mark in (None, found.name)]
        rows = [json.loads(row) for row in complete(gather_texts(json.dumps(mine), device), group, Ledger())]
        common = sorted(set.intersection(*map(set, rows)))
        if not common:
            lacking = [name for name, row in zip(group.names, rows, strict=True) if not row]
            who = "any rank" if len(lacking) == group.world else ", ".join(lacking) or "all ranks at once"
            return Loaded(f"{folder} has no {mark or 'part of a save'} for {who}, of {group.world}")
        tree: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            tree = _tree(folder / common[-1], engine)
            check(tree, engine, strict=False)
        except Exception as error:  # as above
            problem = error if isinstance(error, ValueError) else ValueError(f"{folder} can't be read: {error}")
        agree([], problem, group, device)
        with warnings.catch_warnings():
            if group.rank:
                warnings.filterwarnings("ignore", "the state is of")  # one rank says so
            apply({**tree, "random": None}, engine, strict=False)
    return Loaded(None, tree["random"])


def _name(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.pt"


def _marks(folder: Path) -> list[Path]:
    return [found for found in folder.iterdir() if MARK.fullmatch(found.name)] if folder.is_dir() else []


def _served(found: Path, engine: Engine) -> bool:
    """Whether this rank finds what it needs there: its own part, or those of all ranks of another number of them."""
    names = {file.name for file in found.iterdir()}
    worlds = {int(name[2]) for file in names if (name := FILE.fullmatch(file))}
    if _name(engine.group.rank, engine.group.world) in names:
        return engine.group.world in worlds
    return not engine.ranks.sharded and any(all(_name(rank, old) in names for rank in range(old)) for old in worlds)


def _tree(found: Path, engine: Engine) -> dict[str, Any]:
    """This rank's tree: its own, or, of another number of ranks, what it gets of what they had."""
    own = found / _name(engine.group.rank, engine.group.world)
    if own.exists():
        facts = _read(own)
        if facts["shards"] != engine.ranks.shards:
            raise ValueError(f"{own} is of islands of {facts['shards']} ranks, and here they are of {engine.ranks.shards}")
        tree: dict[str, Any] = _joined(facts["tree"], Shards(engine), ())
        return {**tree, "run": own_parts(tree["run"])}
    old = max(int(name[2]) for file in found.iterdir() if (name := FILE.fullmatch(file.name)))
    merged = merge([_read(found / _name(rank, old))["tree"] for rank in range(old)])
    return {**merged, "run": {**merged["run"], "rank": engine.group.rank}, "random": None}


def _joined(node: Any, shards: Shards, path: tuple[str, ...]) -> Any:
    """A tree in which this rank's shards are parts of the whole again."""
    if isinstance(node, torch.Tensor):
        return shards.joined(path, node)
    if isinstance(node, Mapping):
        return {key: _joined(value, shards, (*path, str(key))) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)([_joined(value, shards, (*path, str(place))) for place, value in enumerate(node)])
    return node


def _write(file: Path, contents: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        torch.save(contents, out)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def _read(file: Path) -> Any:
    """A rank's part, as plain data: a file can't make Python run anything."""
    facts = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else type(facts).__name__
        raise ValueError(f"{file} has the format {found!r}, and this laconic reads {FORMAT}")
    return facts
