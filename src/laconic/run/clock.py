"""The run's clock: it counts attempted optimizer steps, without asking anybody."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Clock:
    """Counts optimizer steps; with several optimizers, a step is done when each of them has made one.

    Optimizers that share parameters count as one, of which any makes the step: a script that goes on with another optimizer
    may keep the old one, and one that has all parameters of several stands for all of them.

    A GradScaler that finds an overflow skips `optimizer.step()`, and it may do so on one rank alone. Where a scaler is
    given, the clock therefore counts calls of `scaler.step`, whether or not they came through: ranks stay in step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None, tick: Callable[[], None]) -> None:
        self.step = 0
        self._tick = tick
        self._kin: dict[int, int] = {}  # by an optimizer's id: that of the first one that it shares parameters with
        self._ahead: dict[int, int] = {}  # steps made beyond the clock's
        self._owner: dict[int, int] = {}  # of each parameter, by ids
        self._handles: list[RemovableHandle] = []
        self.scaling = False  # inside a `scaler.step` that counts already
        self._scaler_step: _ScalerStep | None = None
        for optimizer in optimizers:
            self.add(optimizer)
        if scaler is not None:
            self._scaler_step = _ScalerStep.of(scaler)
            self._scaler_step.clocks.append(self)

    def add(self, optimizer: Optimizer) -> None:
        """Count this one's steps, too."""
        parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        first = next((self._owner[one] for one in parameters if one in self._owner), id(optimizer))
        mine = set(parameters)
        left = {owner for one, owner in self._owner.items() if one not in mine}
        for covered in set(self._ahead) - left - {first}:  # nobody has to step these any more
            del self._ahead[covered]
            self._kin = {one: first if kin == covered else kin for one, kin in self._kin.items()}
            self._owner = {one: first if owner == covered else owner for one, owner in self._owner.items()}
        self._kin[id(optimizer)] = first
        self._ahead.setdefault(first, 0)
        for one in parameters:
            self._owner.setdefault(one, first)
        self._handles.append(optimizer.register_step_post_hook(self._stepped))

    @property
    def between(self) -> bool:
        """Whether some optimizers have made the next step and others have not."""
        return any(self._ahead.values())

    @property
    def ahead(self) -> list[int]:
        """Steps that each optimizer has made beyond the clock's."""
        return list(self._ahead.values())

    def set(self, step: int, ahead: Sequence[int]) -> None:
        """Go on from here."""
        self.step = step
        if len(ahead) == len(self._ahead):  # else there are other optimizers now
            self._ahead = dict(zip(self._ahead, ahead, strict=True))

    def stop(self) -> None:
        """Count no further, and leave optimizers and scaler as they were."""
        for handle in self._handles:
            handle.remove()
        if self._scaler_step is not None:
            self._scaler_step.drop(self)
            self._scaler_step = None

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it counts this one's steps."""
        return id(optimizer) in self._kin

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self.scaling:
            self.count(optimizer)

    def count(self, optimizer: Optimizer) -> None:
        """It has made a step, or its scaler has skipped it."""
        self._ahead[self._kin[id(optimizer)]] += 1
        if all(self._ahead.values()):
            for key in self._ahead:
                self._ahead[key] -= 1
            self.step += 1
            self._tick()


class _ScalerStep:
    """Stands for a GradScaler's `step`, which has no hooks of its own, while clocks count its calls.

    One scaler may serve several runs: two models that are trained in turns share one as a rule.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.clocks: list[Clock] = []
        self._scaler, self._step = scaler, scaler.step

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler) -> "_ScalerStep":
        """The scaler's, put in its place now if it is the first time."""
        present = vars(scaler).get("step")
        if not isinstance(present, cls):
            present = cls(scaler)
            scaler.step = present  # type: ignore[method-assign]
        return present

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        counting = [clock for clock in self.clocks if clock.knows(optimizer)]
        for clock in counting:  # of a wrapper around one of theirs, the inner step is what counts
            clock.scaling = True
        try:
            loss = self._step(optimizer, *args, **kwargs)
        finally:
            for clock in counting:
                clock.scaling = False
        for clock in counting:
            clock.count(optimizer)
        return loss

    def drop(self, clock: "Clock") -> None:
        """This one counts no further; after the last one, the scaler is as it was."""
        self.clocks.remove(clock)
        if not self.clocks:
            vars(self._scaler).pop("step", None)
