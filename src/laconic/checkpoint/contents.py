"""What a checkpoint holds: one rank's whole state as a tree, and which parts of it all ranks have alike."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.fsdp import is_dtensor
from laconic.run import resume
from laconic.run.arguments import unwrapped
from laconic.run.engine import Engine
from laconic.run.run import Run, engine_of


def gather(engine: Engine, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """This rank's state. Tensors are not copied."""
    return {
        "model": engine.module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
        "scaler": engine.scaler.state_dict() if engine.scaler is not None else None,
        "run": resume.state_of(engine),
        "random": _random(),
        "extra": dict(extra or {}),
    }


def gather_own(engine: Engine) -> dict[str, Any]:
    """This rank's state, without what all ranks have alike where somebody else saves it once: parameters, optimizers."""
    tree = gather(engine, None)
    if not engine.lockstep or (engine.ddp is not None and engine.ddp.parameters_to_ignore):
        return tree
    parameters = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    return {**tree, "model": {k: v for k, v in tree["model"].items() if k not in parameters}, "optimizers": None}


def whole(tree: Mapping[str, Any]) -> bool:
    """Whether a tree has all of the model and the optimizers; else somebody else has restored what all ranks have alike."""
    return tree["optimizers"] is not None


def live_engine(run: object, what: str) -> Engine:
    """The engine of a run; what is no run, or one that is not at work, is refused."""
    if not isinstance(run, Run):
        raise TypeError(f"run must be what laconic.attach returned, got {type(run).__name__}")
    engine = engine_of(run)
    engine.require_live(what)
    return engine


def check_own(engine: Engine, model: nn.Module | None, optimizer: object) -> None:
    """Refuse a model or optimizers that are not the run's."""
    if model is not None and bare(model) is not engine.module:
        raise ValueError(f"this {type(model).__name__} is not the model that the run is attached to")
    given = [unwrapped(each) for each in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])]
    if optimizer is not None and [id(each) for each in given] != [id(each) for each in engine.optimizers]:
        raise ValueError("these are not the optimizers that the run is attached to")


def bare(model: nn.Module) -> nn.Module:
    """A model without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def namer(engine: Engine) -> Callable[[tuple[str, ...], Tensor], str]:
    """How the tensors of `gather` are called: what all replicas have alike is saved once, the rest under `rank{r}/`.

    Of a sharded model, parts of a whole that islands have apart are saved under `island{i}/`. DCP gives all islands the first
    one's where they save under one name.
    """
    parameters = {name for name, _ in engine.module.named_parameters()}
    ignored = set(engine.ddp.parameters_to_ignore) if engine.ddp is not None else set()

    def name(path: tuple[str, ...], tensor: Tensor) -> str:
        match path:
            case ("model", parameter):
                shared = engine.lockstep and parameter in parameters - ignored
            case ("optimizers", *_):
                shared = engine.lockstep and not ignored
            case ("run", "local", "deltas", "anchors" | "outer", *_):
                shared = True
            case _:
                shared = False
        if engine.place.sharding is not None and not is_dtensor(tensor):
            shared = False  # a rank's own, whatever islands have alike
        owner = f"island{engine.ranks.island}" if is_dtensor(tensor) else f"rank{engine.group.rank}"
        return "/".join(path) if shared else "/".join((owner, *path))

    return name


def _random() -> dict[str, Any]:
    """Where the generators are that a training step may use."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        found["accelerator"] = torch.get_device_module().get_rng_state()
    return found


def set_random(state: Mapping[str, Any]) -> None:
    """Put the generators back."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["accelerator"])
