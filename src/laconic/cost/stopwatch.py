"""The compute of a step, timed in its three parts while a loop runs as it is."""

import statistics
import time
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.cost.step_time import Compute


class Stopwatch:
    """Times forward, backward and optimizer of each step between `__enter__` and `__exit__`.

    Backward is what lies between the end of a forward and the optimizer's step, and so the loss is part of it. What lies
    between one step and the next forward, such as the loader, counts as forward: no bucket is ready then. Of several forwards
    in a step (gradient accumulation) only the last one's backward is one in which buckets travel.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._handles: list[RemovableHandle] = []
        self._ended: float | None = None  # the step before
        self._forward_over = self._backward_over = 0.0
        self.rows: list[Compute] = []

    def __enter__(self) -> Self:
        self._handles = [
            self._model.register_forward_hook(self._after_forward),
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self._ended = now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def compute(self) -> Compute:
        """The means, and the standard deviation of a step. At least one step must have been made.

        Means, not medians: where processes share cores, each step is either undisturbed or interrupted for a time slice, and
        both count.
        """
        if not self.rows:
            raise ValueError("no step was made, so there is nothing to tell of its compute")
        parts = [[row.forward, row.backward, row.optimizer] for row in self.rows]
        forward, backward, optimizer = (statistics.fmean(column) for column in zip(*parts, strict=True))
        return Compute(forward, backward, optimizer, statistics.pstdev(row.seconds for row in self.rows))

    def _after_forward(self, model: nn.Module, args: object, result: object) -> None:
        self._forward_over = now()

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._backward_over = now()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        ended = now()
        if self._ended is not None and self._ended <= self._forward_over <= self._backward_over:
            forward, backward = self._forward_over - self._ended, self._backward_over - self._forward_over
            self.rows.append(Compute(forward, backward, ended - self._backward_over))
        self._ended = ended


def now() -> float:
    """Seconds, when all that an accelerator was given is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
