"""Reading a checkpoint: checked in full before anything is changed."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from laconic.checkpoint import manifest
from laconic.checkpoint.contents import check_own, live_engine, set_random, whole
from laconic.checkpoint.packing import keys, skeleton, unpack
from laconic.checkpoint.redeal import merge
from laconic.checkpoint.shards import Shards, own_parts, without_uncut
from laconic.ranks.agreement import agree
from laconic.run import resume
from laconic.run.engine import Engine
from laconic.run.run import Run

ADDED = ("params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")  # by schedulers, to groups


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    path: Path
    step: int
    extra: dict[str, Any]  # what this rank gave to `save`; after a change of the world's size, what old rank r mod N gave


def latest(path: str | Path) -> Path | None:
    """The newest whole checkpoint in a directory; one that misses a file, or a part of one, is passed over.

    One of another version of laconic is an error: a training that began anew instead would replace it.
    """
    return next((folder for folder in reversed(manifest.checkpoints(Path(path))) if manifest.problem(folder) is None), None)


def load(
    path: str | Path,
    *,
    run: Run,
    model: nn.Module | None = None,
    optimizer: Optimizer | list[Optimizer] | None = None,
    strict: bool = True,
) -> Loaded:
    """Go on where `save` was called; all ranks together, before the first step.

    `path` is a checkpoint, or a directory of them: the newest whole one then. Checksums are verified and shapes compared
    before anything is changed. A checkpoint of another strategy is refused, or, with `strict=False`, loaded as if the run had
    been by the other strategy until now and is swapped here. One of another number of ranks is re-dealt.
    """
    engine = live_engine(run, "load")
    group, device = engine.group, engine.device
    with engine.during("loading a checkpoint"):
        tree: dict[str, Any] = {}
        problem: Exception | None = None
        folder, facts = Path(path), None
        try:
            check_own(engine, model, optimizer)
            folder = _chosen(Path(path))
            facts = manifest.read(folder)
            torn = manifest.missing(folder, facts)
            if torn is not None:
                raise ValueError(f"{folder} is not whole: {torn}")
            names = sorted(facts.files)
            manifest.verify(folder, {name: facts.files[name] for name in names[group.rank :: group.world]})
        except (ValueError, OSError) as error:
            problem = error
        agree([f"checkpoint {folder.name}"], problem, group, device)
        assert facts is not None
        try:
            tree = _tree(folder, facts, engine)
            check(tree, engine, strict)
        except (Exception, dcp.CheckpointException) as error:  # whatever it is, no rank may wait for this one
            problem = error if isinstance(error, ValueError) else ValueError(f"{folder} can't be read: {_words(error)}")
        agree([], problem, group, device)
        apply(tree, engine, strict)
    return Loaded(folder, facts.step, tree["extra"])


def _chosen(path: Path) -> Path:
    if (path / manifest.FILE).exists():
        return path
    found = latest(path)
    if found is None:
        there = ", ".join(f"{folder.name} ({manifest.problem(folder)})" for folder in manifest.checkpoints(path)) or "nothing"
        raise ValueError(f"{path} has no whole checkpoint; there is {there}")
    return found


def _tree(folder: Path, facts: manifest.Manifest, engine: Engine) -> dict[str, Any]:
    """This rank's tree: its own, or, of another number of islands or shards, what it gets of what the old ranks had.

    Whatever has a number for each of a sharded parameter's is read as this rank's shard of it now, however it was cut then.
    """
    metadata, shards = dcp.FileSystemReader(folder).read_metadata(), Shards(engine)
    old_world, old_shards, ranks, rank = facts.world_size, facts.shards, engine.ranks, engine.group.rank

    def of(old: int) -> dict[str, Any]:
        name = f"rank{old}/skeleton"
        bones = skeleton(_read(folder, metadata, {name: ()}, shards)[name])
        tree: dict[str, Any] = unpack(bones, _read(folder, metadata, keys(bones), shards))
        return tree

    if (old_world, old_shards) == (engine.group.world, ranks.shards):
        tree = of(rank)
        return {**tree, "run": own_parts(tree["run"])}
    lost: list[str] = []
    trees = [of(island * old_shards + ranks.shard % old_shards) for island in range(old_world // old_shards)]
    if old_shards != ranks.shards:
        for tree in trees:
            tree["run"], lost = without_uncut(tree["run"], dict(engine.module.named_parameters()))
    tree = trees[ranks.island] if len(trees) == ranks.islands else merge(trees)
    tree["run"] = {**own_parts(tree["run"]), "rank": rank}
    if lost:
        warnings.warn(
            f"the checkpoint is of {old_shards} shards, and here are {ranks.shards}: {', '.join(map(repr, lost))} of a "
            "compressor is of a shard as a whole, and begins anew",
            stacklevel=4,
        )
    extra = of(rank % old_world)["extra"] if old_shards != ranks.shards else trees[rank % len(trees)]["extra"]
    return {**tree, "extra": extra, "random": None}


def _read(folder: Path, metadata: Metadata, names: Mapping[str, tuple[str, ...]], shards: Shards) -> dict[str, Tensor]:
    """Tensors by name, each with its place in the tree."""
    tensors: dict[str, Any] = {}
    for name, path in names.items():
        facts = metadata.state_dict_metadata[name]
        assert isinstance(facts, TensorStorageMetadata)
        tensors[name] = shards.blank(path, facts.size, facts.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads for itself
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def check(tree: Mapping[str, Any], engine: Engine, strict: bool) -> None:
    """Refuse what doesn't fit, before anything is changed."""
    other = resume.respelt(engine, tree["run"])["strategy"] != str(engine.strategy)
    if strict and other and not resume.is_of_this_auto(engine, tree["run"]):
        raise ValueError(
            f"the checkpoint is of {tree['run']['strategy']}, attached is {engine.strategy}; attach the same, or load with "
            "strict=False to swap here"
        )
    _check_model(tree, engine)
    if whole(tree):
        _check_optimizers(tree, engine)
    if (tree["scaler"] is None) != (engine.scaler is None):
        raise ValueError(f"the checkpoint has {'no ' if tree['scaler'] is None else 'a '}GradScaler, and the run the reverse")
    if engine.scaler is not None and engine.scaler.is_enabled() and not tree["scaler"]:
        raise ValueError(
            "the checkpoint's GradScaler was disabled and has no scale to go on with, and the run's is enabled; "
            "attach with GradScaler(enabled=False), as it was saved"
        )
    resume.check_state(engine, tree["run"], strict=strict)


def _check_model(tree: Mapping[str, Any], engine: Engine) -> None:
    mine, saved = engine.module.state_dict(), tree["model"]
    for name in [*(mine if whole(tree) else ()), *saved]:
        if name not in saved or name not in mine:
            raise ValueError(f"{name!r} is in the {'model' if name in mine else 'checkpoint'} alone; is it another model's?")
        if isinstance(mine[name], Tensor) and mine[name].shape != saved[name].shape:
            raise ValueError(
                f"{name} has the shape {tuple(saved[name].shape)} in the checkpoint, {tuple(mine[name].shape)} here"
            )


def _check_optimizers(tree: Mapping[str, Any], engine: Engine) -> None:
    if len(tree["optimizers"]) != len(engine.optimizers):
        raise ValueError(f"the checkpoint has {len(tree['optimizers'])} optimizers, the run {len(engine.optimizers)}")
    for optimizer, state in zip(engine.optimizers, tree["optimizers"], strict=True):
        here = [len(group["params"]) for group in optimizer.param_groups]
        there = [len(group["params"]) for group in state["param_groups"]]
        if here != there:
            raise ValueError(f"the checkpoint's optimizer has groups of {there} parameters, this one of {here}")
        for group in state["param_groups"]:
            lacking, odd = optimizer.defaults.keys() - group.keys(), group.keys() - {*optimizer.param_groups[0], *ADDED}
            if lacking and odd:  # one alone may be another version of torch
                raise ValueError(
                    f"the checkpoint's optimizer has {', '.join(sorted(odd))} and no {', '.join(sorted(lacking))}; "
                    f"it was of another kind than {type(optimizer).__name__}"
                )


def apply(tree: Mapping[str, Any], engine: Engine, strict: bool) -> None:
    """Make the run what the tree says; all ranks together, after `check` has passed on all of them."""
    engine.module.load_state_dict(tree["model"], strict=whole(tree))
    engine.wrote()
    if whole(tree):
        for optimizer, state in zip(engine.optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    if engine.scaler is not None:
        engine.scaler.load_state_dict(tree["scaler"])
    resume.load_state(engine, tree["run"], strict=strict)
    if tree["random"] is not None:
        set_random(tree["random"])


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
