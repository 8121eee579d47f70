"""The optimizers' memory: kept, averaged, reset, or made equal."""

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.agreement import gather_texts
from laconic.averaging import ParameterAverager
from laconic.wire import Ledger, TorchGroup, land

COUNTER = "step"  # torch's own name for what counts steps, and is no mean of anything


class Moments:
    """What some optimizers remember about named parameters.

    A parameter that never had a gradient on some rank has no memory there. So before anything is averaged, ranks compare
    the names of what they have.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, Tensor],
        ledger: Ledger,
        control: Ledger,
        device: torch.device,
    ) -> None:
        self._optimizers, self._ledger, self._control, self._device = optimizers, ledger, control, device
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def treat(self, policy: str, group: TorchGroup) -> None:
        """At a sync: "keep", "average", "reset", or "auto", which resets the momentum of SGD and keeps all else."""
        if policy == "average":
            self.average(group, None)
        elif policy in ("reset", "auto"):
            for _, state in self._states():
                for key, value in state.items():
                    if isinstance(value, Tensor) and (policy == "reset" or key == "momentum_buffer"):
                        value.zero_()

    def average(self, group: TorchGroup, keys: Sequence[str] | None) -> None:
        """The mean of what is remembered about single numbers, under these keys or all, where every rank has it."""
        mine = {name: value for name, key, value in self._tensors() if key != COUNTER and (keys is None or key in keys)}
        common = self._common(mine, group)
        if keys is not None and not common:
            warnings.warn(f"moments: no optimizer remembers {' or '.join(keys)} on every rank", stacklevel=2)
        ParameterAverager({name: mine[name] for name in common}, self._ledger).average(group)

    def equalise(self, group: TorchGroup) -> None:
        """Everything becomes equal: the mean of numbers, the largest of counters; what not all ranks have is forgotten."""
        common = self._common({name: value for name, _, value in self._tensors()}, group)
        for name, state in self._states():
            if any(isinstance(value, Tensor) and f"{name} {key}" not in common for key, value in state.items()):
                state.clear()
        # What a rank has just cleared, others may have parts of: the rest is compared once more.
        mine = {name: value for name, _, value in self._tensors()}
        common = self._common(mine, group)
        counted = {name: mine[name].round().long() for name in common if name.endswith(f" {COUNTER}")}
        ParameterAverager({name: counted.get(name, mine[name]) for name in common}, self._ledger).average(group)
        for name, count in counted.items():
            mine[name].copy_(count)

    def forget_bad(self, names: Sequence[str]) -> None:
        """These parameters went back to an anchor; memory that is not finite would spoil them at the next step."""
        for name, state in self._states():
            values = [value for value in state.values() if isinstance(value, Tensor)]
            if name.split()[1] in names and not all(bool(value.isfinite().all()) for value in values):
                state.clear()

    def _states(self) -> Iterator[tuple[str, dict[str, object]]]:
        """(number of the optimizer and name of the parameter, what it remembers)."""
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state.items():
                if id(parameter) in self._names:
                    yield f"{number} {self._names[id(parameter)]}", state

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(full name, key, tensor)."""
        for name, state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{name} {key}", key, value

    def _common(self, mine: Mapping[str, Tensor], group: TorchGroup) -> list[str]:
        everywhere = land(gather_texts("\n".join(mine), self._device), group, self._control)
        return sorted(set(mine).intersection(*(names.split("\n") for names in everywhere)))
