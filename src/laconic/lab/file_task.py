"""A user's own task: a Python file, and what goes wrong in it."""

import importlib.util
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import laconic

HELD_OUT_SEED = 987654321
INSIDE = tuple(f"{Path(module.__file__).parent}{os.sep}" for module in (torch, laconic) if module.__file__)
FUNCTIONS = {"model": "", "optimizer": "model", "batches": "rank, world, seed", "loss": "model, batch"}


class TaskError(ValueError):
    """Something is wrong with a user's file; the message says all there is to know."""


class FileTask:
    """A Python file with `model`, `optimizer`, `batches`, `loss` and, if wanted, `evaluate`, `schedule` and `warm`.

    It may import modules from its own folder, as a script may.
    """

    warm_steps = 0

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise TaskError(f"there is no file {path}; make one with: laconic new-task {path}")
        self.name, self.path = path.name, path.resolve()
        self._module = _loaded(self.path)
        for name, arguments in FUNCTIONS.items():
            if not callable(getattr(self._module, name, None)):
                raise TaskError(f"{path} must define {name}({arguments})")

    def model(self) -> nn.Module:
        model = self._module.model()
        if not isinstance(model, nn.Module):
            raise self._wrong("model()", "a torch.nn.Module", model)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = self._module.optimizer(model)
        if not isinstance(optimizer, Optimizer):
            raise self._wrong("optimizer(model)", "a torch.optim.Optimizer", optimizer)
        return optimizer

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Any]:
        yield from self._module.batches(rank, world, seed)
        raise TaskError(f"batches(rank, world, seed) in {self.path} came to an end; let it go on for ever")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self._module.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._wrong("loss(model, batch)", "a tensor with one number, to call backward() on", loss)
        return loss

    def evaluate(self, model: nn.Module) -> float:
        """Without a function of the user's: the loss on batches of a seed that no run trains with."""
        if hasattr(self._module, "evaluate"):
            found = self._module.evaluate(model)
            try:
                return float(found)
            except (TypeError, ValueError, RuntimeError):
                raise self._wrong("evaluate(model)", "a number", found) from None
        batches = self._module.batches(0, 1, HELD_OUT_SEED)
        with torch.no_grad():
            losses = [float(self.loss(model, next(batches))) for _ in range(8)]
        return math.fsum(losses) / len(losses)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        if not hasattr(self._module, "schedule"):
            return None
        schedule = self._module.schedule(optimizer, steps)
        if schedule is not None and not callable(getattr(schedule, "step", None)):
            raise self._wrong("schedule(optimizer, steps)", "a learning-rate scheduler, with a step(), or None", schedule)
        found: LRScheduler | None = schedule
        return found

    def warm(self, model: nn.Module, optimizer: Optimizer) -> None:
        if hasattr(self._module, "warm"):
            self._module.warm(model, optimizer)

    def _wrong(self, function: str, wanted: str, got: object) -> TaskError:
        what = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, Tensor) else f"{type(got).__name__}: {got!r:.100}"
        return TaskError(f"{function} in {self.path} must return {wanted}, got {what}")


def blame(error: BaseException, path: str) -> str:
    """An error's traceback from the user's file on; without frames of torch or of laconic, which tell a user nothing.

    Where the file has no part in it, all of it; or the message, where laconic refuses something.
    """
    if isinstance(error, TaskError):
        return str(error)
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != path:
        frame = frame.tb_next
    if frame is None and isinstance(error, ValueError | TypeError) and _raised_in(error).startswith(INSIDE[-1]):
        return f"{type(error).__name__}: {error}"  # laconic says what is wrong with what it was given
    found = traceback.TracebackException(type(error), error, frame or error.__traceback__)
    inside = sum(_only_own_frames(one) for one in _chain(found)) if frame is not None else 0
    lines = "".join(found.format()).rstrip()
    return f"{lines}\n({inside} frames inside torch and laconic are left out)" if inside else lines


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def _chain(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _only_own_frames(error: traceback.TracebackException) -> int:
    """Leave frames out that lie in torch or laconic, if others are left; how many those were."""
    own = [one for one in error.stack if not one.filename.startswith((*INSIDE, "<frozen"))]
    inside = len(error.stack) - len(own) if own else 0
    if inside:
        error.stack = traceback.StackSummary.from_list(own)
    return inside


def _loaded(path: Path) -> Any:
    """The file as a module. Whatever ends it, also a sys.exit(), is the user's to see."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"laconic_task_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}", path)
    assert spec is not None, "it ends with .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except SyntaxError as error:
        raise TaskError(f"{path} can't be read:\n{''.join(traceback.format_exception_only(error)).rstrip()}") from None
    except BaseException as error:
        raise TaskError(f"{path} can't be imported:\n{blame(error, str(path))}") from None
    return module
