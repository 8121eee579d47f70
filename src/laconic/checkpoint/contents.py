"""What a checkpoint holds: one rank's whole state as a tree, and which parts of it all ranks have alike."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.plan import unwrapped
from laconic.run import Run


def gather(run: Run, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """This rank's state. Tensors are not copied."""
    return {
        "model": bare(run.model).state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "run": run.state_dict(),
        "random": _random(),
        "extra": dict(extra or {}),
    }


def check_run(run: object, what: str) -> None:
    """Refuse what is no run, or one that is not at work."""
    if not isinstance(run, Run):
        raise TypeError(f"run must be what laconic.attach returned, got {type(run).__name__}")
    run.require_live(what)


def check_own(run: Run, model: nn.Module | None, optimizer: object) -> None:
    """Refuse a model or optimizers that are not the run's."""
    if model is not None and bare(model) is not bare(run.model):
        raise ValueError(f"this {type(model).__name__} is not the model that the run is attached to")
    given = [unwrapped(each) for each in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])]
    if optimizer is not None and [id(each) for each in given] != [id(each) for each in run.optimizers]:
        raise ValueError("these are not the optimizers that the run is attached to")


def bare(model: nn.Module) -> nn.Module:
    """A model without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def namer(run: Run, rank: int) -> Callable[[tuple[str, ...]], str]:
    """How the tensors of `gather` are called: what all ranks have alike is saved once, the rest under `rank{r}/`."""
    parameters = {name for name, _ in bare(run.model).named_parameters()}
    ignored = set(run.model.parameters_to_ignore) if isinstance(run.model, DistributedDataParallel) else set()

    def name(path: tuple[str, ...]) -> str:
        match path:
            case ("model", parameter):
                shared = run.lockstep and parameter in parameters - ignored
            case ("optimizers", *_):
                shared = run.lockstep and not ignored
            case ("run", "local", "deltas", "anchors" | "outer", *_):
                shared = True
            case _:
                shared = False
        return "/".join(path) if shared else "/".join((f"rank{rank}", *path))

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
