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
    """What `load` has loaded.

    Fields:
      `path`: the checkpoint's directory.
      `step`: the attempted optimizer steps until it was saved.
      `extra`: what this rank gave to `save`; of a checkpoint of N ranks, N another number than now, what old rank r mod N gave.

    >>> import pathlib, laconic
    >>> laconic.checkpoint.Loaded(
    ...     pathlib.Path("checkpoints/step-00000042"), 42, {"epoch": 7}
    ... ).extra["epoch"]
    7
    """

    path: Path
    step: int
    extra: dict[str, Any]


def latest(path: str | Path) -> Path | None:
    """The whole checkpoint with the most steps in a directory, or None: there is none.

    One that lacks a file, or a part of one, is passed over with a warning. It reads manifests and sizes of files, and no
    checksums.

    Arguments:
      `path`: the directory that `save` was given; it may not exist.

    Where there are checkpoints and none of them is whole, it raises a ValueError; and so it does for one in the format of
    another version of laconic. A training that began anew instead would replace them.

    >>> import tempfile, laconic
    >>> laconic.checkpoint.latest(tempfile.mkdtemp())  # None
    """
    passed: list[str] = []
    for folder in reversed(manifest.checkpoints(Path(path))):
        problem = manifest.problem(folder)
        if problem is None:
            if passed:
                warnings.warn(f"{'; '.join(passed)}: passed over for {folder.name}", stacklevel=2)
            return folder
        passed.append(f"{folder} is not whole ({problem})")
    if passed:
        raise ValueError(f"{path} has no whole checkpoint: {'; '.join(passed)}. To begin anew, move them away")
    return None


def load(
    path: str | Path,
    *,
    run: Run,
    model: nn.Module | None = None,
    optimizer: Optimizer | list[Optimizer] | None = None,
    strict: bool = True,
) -> Loaded:
    """Go on where `save` was called; all ranks together, before the first step.

    Build model, optimizers and run as they were then, and load: on as many ranks, the run goes on to the same bits. On another
    number of ranks, what they had is dealt anew: replicas, residuals and outstanding deltas that differed become their mean
    over the old ranks, and random generators go on as they are. `docs/checkpoint.md` has the table.

    Bytes: on the network, digests, and the deltas that were outstanding once more. Each rank reads its own part and what is
    common from the disk.

    Memory: what is read, on the CPU. On another number of ranks, the states of all old ranks together.

    Not: DCP reads its `.metadata` by Python's pickle. Load only checkpoints that you trust.

    Arguments:
      `path`: a checkpoint; or a directory of them, for the newest whole one.
      `run`: what `laconic.attach` returned, still attached.
      `model`: the run's own, for those who want it checked. Default None: the run's own.
      `optimizer`: the run's own, or a list of them. Default None: the run's own.
      `strict`: True: a checkpoint of another strategy is refused. False: it is loaded as if the run had been by that strategy
        until now and were swapped here; a warning names what can't be used. Default True.

    All ranks raise a ValueError where one of them can't load: checksums, names, shapes, the kind of the optimizers and the
    communication state are verified before anything is changed.

    >>> import tempfile, torch, laconic
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "diloco(2)") as run:
    ...     path = laconic.checkpoint.save(folder, run=run, extra={"epoch": 7}).wait()
    ...     loaded = laconic.checkpoint.load(folder, run=run)
    >>> loaded.path == path, loaded.step, loaded.extra
    (True, 0, {'epoch': 7})
    >>> torch.distributed.destroy_process_group()
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
            damaged = manifest.damaged(folder, {name: facts.files[name] for name in names[group.rank :: group.world]})
            if damaged is not None:
                raise ValueError(f"{damaged}; {_instead(folder)}")
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
    if facts.world_size != group.world and group.rank == 0:
        warnings.warn(
            f"{folder} is of {facts.world_size} ranks, and here are {group.world}: how many steps an epoch has, the learning "
            f"rate's schedule and the place in your loader are yours to fit; run.step is {facts.step}",
            stacklevel=2,
        )
    return Loaded(folder, facts.step, tree["extra"])


def _chosen(path: Path) -> Path:
    if (path / manifest.FILE).exists():
        return path
    found = latest(path)
    if found is None:
        raise ValueError(f"{path} has no checkpoint; laconic.checkpoint.save writes folders called step-... there")
    return found


def _instead(folder: Path) -> str:
    """What to do where a checkpoint can't be used."""
    others = [
        other.name for other in manifest.checkpoints(folder.parent) if other != folder and manifest.problem(other) is None
    ]
    return f"move the folder away, and load goes on from {others[-1]}" if others else "there is no other whole one beside it"


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
