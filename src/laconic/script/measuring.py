"""`laconic run --advise`: times the first steps of a script that stays as it is, writes what was found, and ends the script."""

import atexit
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.cost.step_timer import StepTimer
from laconic.script.messages import log

VERSION = 1
STEPS, FEWEST, LONGEST_SECONDS = 10, 3, 20.0  # timed steps: so many, or at least so few once it takes as long as that


class Measuring:
    """Watches the optimizer that makes the first step in this process, and the model that it is over."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.status: Any = None  # that the script asked for by sys.exit
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self._timer: StepTimer | None = None
        self._began, self._written = 0.0, False
        self._hook = register_optimizer_step_post_hook(self._stepped)
        atexit.register(self.finish)

    def fail(self, error: BaseException) -> None:
        """The script failed: what was timed is not for use."""
        self._written = True

    def finish(self) -> None:
        """The script has ended by itself; what was timed until then may be enough."""
        if not self._written and self._timer is not None and self._timer.timed:
            self._write()

    def stop(self) -> None:
        """Watch no further."""
        self._hook.remove()
        atexit.unregister(self.finish)
        if self._timer is not None:
            self._timer.stop()

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._timer is None:
            self._optimizer, self._model = optimizer, model_of(optimizer)
            self._timer, self._began = StepTimer(self._model, [optimizer]), time.perf_counter()
        if optimizer is not self._optimizer:
            return
        self._timer.tick()
        long = time.perf_counter() - self._began > LONGEST_SECONDS
        if self._timer.timed < (FEWEST if long else STEPS):
            return
        if not self._written:
            self._write()
            log(f"{self._timer.timed} steps are timed: the script ends here, with exit code 0")
        raise SystemExit(0)  # again in the next step, if the script catches everything

    def _write(self) -> None:
        """Whole, or not at all."""
        assert self._timer is not None
        assert self._model is not None
        assert self._optimizer is not None
        compute = self._timer.compute()
        assert compute is not None
        self._written = True
        module = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        numbers: Counter[str] = Counter()
        for parameter in trained.values():
            numbers[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
        found = {
            "version": VERSION,
            "compute": [compute.forward, compute.backward, compute.optimizer],
            "parameters": {name: list(parameter.shape) for name, parameter in trained.items()},
            "dtype": numbers.most_common(1)[0][0],
            "optimizer": "adam" if "betas" in self._optimizer.defaults else "sgd",
        }
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(self._file)


def model_of(optimizer: Optimizer) -> nn.Module:
    """The outermost module that has this optimizer's parameters: what the script calls.

    >>> from torch.optim import SGD
    >>> inner = nn.Linear(2, 2)
    >>> outer = nn.Sequential(inner, nn.ReLU())
    >>> model_of(SGD(inner.parameters(), lr=0.1)) is outer
    True
    """
    ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    having = [module for module in _modules() if any(id(parameter) in ours for parameter in module.parameters())]
    if not having:
        loose = nn.Module()
        loose.parameters_of_optimizer = nn.ParameterList(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )
        return loose
    return max(having, key=lambda module: len(list(module.modules())))


def _modules() -> Iterator[nn.Module]:
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):  # `isinstance` asks some proxies what they stand for, and they import it
            yield thing
