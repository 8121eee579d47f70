"""The compute of a step, timed while somebody else's loop runs as it is."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.cost.network import Network
from laconic.cost.step_time import Compute, Step, step_time

SKIPPED = 3  # steps that are not timed: DDP rebuilds its buckets after the first, and caches fill
PAUSE = 3.0  # times the median: no step of training takes so long
LEAST = 0.1  # of a backward is computing, whatever is taken off it
HALVINGS = 30


class StepTimer:
    """Times steps from `start` on, in their three parts; whoever counts the steps calls `tick` at the end of each.

    Backward is what lies between the end of the last forward and the first optimizer's step. All before it, since the step
    before, counts as forward: the loader, and all but the last part of an accumulated gradient. Where that order does not
    hold, only the whole is known: a closure runs forward and backward inside of the optimizer's step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._marks = _Marks()
        self._handles: list[RemovableHandle] = [model.register_forward_hook(self._marks.after_forward)]
        self._handles += [optimizer.register_step_pre_hook(self._marks.before_step) for optimizer in optimizers]
        self._began: float | None = None  # the step that is running; None: nothing is timed yet
        self.ticks = 0
        self._rows: list[Compute] = []
        self._waits: list[float] = []

    def tick(self, waited: float = 0.0) -> None:
        """A step is complete; for so many seconds of its backward, training stood still for other ranks."""
        ended, began = now(), self._began
        self.ticks += 1
        if began is not None and self.ticks > SKIPPED:
            self._rows.append(_less(self._marks.row(began, ended), waited))
            self._waits.append(waited)
        self._began = ended

    def stop(self) -> None:
        """Leave model and optimizers as they were."""
        for handle in self._handles:
            handle.remove()

    @property
    def timed(self) -> int:
        """Steps that are timed so far."""
        return len(self._rows)

    @property
    def waited(self) -> float:
        """Seconds of a timed step in which training stood still: the median."""
        return statistics.median(self._waits) if self._waits else 0.0

    def compute(self) -> Compute | None:
        """The means, and the standard deviation of a step; None: no step was timed.

        Means, not medians: where processes share cores, a step is either undisturbed or interrupted for a time slice, and both
        count. But a step that took far longer than most is left out: the loop had a pause in it, such as an evaluation.
        """
        if not self._rows:
            return None
        longest = PAUSE * statistics.median(row.seconds for row in self._rows)
        rows = [row for row in self._rows if row.seconds <= longest]
        parts = [(row.forward, row.backward, row.optimizer) for row in rows]
        forward, backward, optimizer = (statistics.fmean(column) for column in zip(*parts, strict=True))
        return Compute(forward, backward, optimizer, statistics.pstdev(row.seconds for row in rows))


class _Marks:
    """When things happened. Leads nowhere: a copied or pickled model takes its hooks along."""

    def __init__(self) -> None:
        self._forward_over: float | None = None
        self._backward_over: float | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, model: nn.Module, inputs: object, output: object) -> None:
        if torch.is_grad_enabled():
            self._forward_over, self._backward_over = now(), None

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._backward_over is None:
            self._backward_over = now()

    def row(self, began: float, ended: float) -> Compute:
        """The step between these two times."""
        forward, backward = self._forward_over, self._backward_over
        if forward is None or backward is None or not began <= forward <= backward <= ended:
            return Compute.of(ended - began)
        return Compute(forward - began, backward - forward, ended - backward)


def without_communication(found: Compute, steps: Sequence[Step], network: Network, *, waits_known: bool) -> Compute:
    """What a step takes without any communication, where it was timed under a strategy that sends `steps`.

    Encoding, decoding and what the hosts' work takes from training are taken off the backward, as the cost model has them.
    Where it is not known how long training waited, the backward is the one for which the model says what was measured.
    """
    if waits_known:
        return _less(found, step_time(steps, found, network).work)
    shortest, longest = LEAST * found.backward, found.backward
    for _ in range(HALVINGS):
        middle = (shortest + longest) / 2
        predicted = step_time(steps, replace(found, backward=middle), network)
        shortest, longest = (shortest, middle) if predicted.seconds > found.seconds else (middle, longest)
    return replace(found, backward=(shortest + longest) / 2)


def _less(row: Compute, seconds: float) -> Compute:
    return replace(row, backward=max(row.backward - seconds, LEAST * row.backward))


def now() -> float:
    """Seconds, when all that an accelerator was given is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
