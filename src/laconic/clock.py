"""The run's clock: it counts attempted optimizer steps, without asking anybody."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Clock:
    """Counts optimizer steps; with several optimizers, a step is done when each of them has made one.

    A GradScaler that finds an overflow skips `optimizer.step()`, and it may do so on one rank alone. Where a scaler is
    given, the clock therefore counts calls of `scaler.step`, whether or not they came through: ranks stay in step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None, tick: Callable[[], None]) -> None:
        self.step = 0
        self._tick = tick
        self._ahead = {id(optimizer): 0 for optimizer in optimizers}  # steps made beyond the clock's
        self._scaler = scaler
        self._scaling = False
        self._handles = [optimizer.register_step_post_hook(self._stepped) for optimizer in optimizers]
        if scaler is not None:
            self._scaler_step = scaler.step
            scaler.step = self._scaled_step  # type: ignore[method-assign]  # GradScaler has no hooks of its own

    @property
    def between(self) -> bool:
        """Whether some optimizers have made the next step and others have not."""
        return any(self._ahead.values())

    def stop(self) -> None:
        """Count no further, and leave optimizers and scaler as they were."""
        for handle in self._handles:
            handle.remove()
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._scaling:
            self._count(optimizer)

    def _scaled_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._scaling = True
        try:
            loss = self._scaler_step(optimizer, *args, **kwargs)
        finally:
            self._scaling = False
        if id(optimizer) in self._ahead:
            self._count(optimizer)
        return loss

    def _count(self, optimizer: Optimizer) -> None:
        self._ahead[id(optimizer)] += 1
        if all(self._ahead.values()):
            for key in self._ahead:
                self._ahead[key] -= 1
            self.step += 1
            self._tick()
