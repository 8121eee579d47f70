"""The optimizers' memory: kept, averaged, reset, or made equal."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.exchange import complete
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.local.parameter_averaging import ParameterAverager
from laconic.ranks.agreement import gather_texts

COUNTER = "step"  # torch's own name for what counts steps, and is no mean of anything


class Key(NamedTuple):
    """Where a tensor of an optimizer's memory is. Parameters and keys may have any name, with spaces too."""

    optimizer: int  # its number
    parameter: str  # its name
    key: str  # the optimizer's own, such as exp_avg


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
            for _, _, state in self._states():
                for key, value in state.items():
                    if isinstance(value, Tensor) and (policy == "reset" or key == "momentum_buffer"):
                        value.zero_()

    def average(self, group: TorchGroup, keys: Sequence[str] | None) -> None:
        """The mean of what is remembered about single numbers, under these keys or all, where every rank has it."""
        found = self._tensors()
        mine = {at: value for at, value in found.items() if at.key != COUNTER and (keys is None or at.key in keys)}
        common = self._common(mine, group)
        if keys is not None and not common:
            warnings.warn(f"moments: no optimizer remembers {' or '.join(keys)} on every rank", stacklevel=2)
        self._average({at: mine[at] for at in common}, group)

    def equalise(self, group: TorchGroup) -> None:
        """Everything becomes equal: the mean of numbers, the largest of counters; what not all ranks have is forgotten."""
        common = self._common(self._tensors(), group)
        for number, name, state in self._states():
            if any(isinstance(value, Tensor) and Key(number, name, key) not in common for key, value in state.items()):
                state.clear()
        # What a rank has just cleared, others may have parts of: the rest is compared once more.
        mine = self._tensors()
        common = self._common(mine, group)
        counted = {at: mine[at].round().long() for at in common if at.key == COUNTER}
        self._average({at: counted.get(at, mine[at]) for at in common}, group)
        for at, count in counted.items():
            mine[at].copy_(count)

    def forget_bad(self, names: Sequence[str]) -> None:
        """These parameters went back to an anchor; memory that is not finite would spoil them at the next step."""
        for _, name, state in self._states():
            values = [value for value in state.values() if isinstance(value, Tensor)]
            if name in names and not all(bool(value.isfinite().all()) for value in values):
                state.clear()

    def _states(self) -> Iterator[tuple[int, str, dict[str, object]]]:
        """(number of the optimizer, name of the parameter, what it remembers)."""
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state.items():
                if id(parameter) in self._names:
                    yield number, self._names[id(parameter)], state

    def _tensors(self) -> dict[Key, Tensor]:
        return {
            Key(number, name, key): value
            for number, name, state in self._states()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _common(self, mine: Mapping[Key, Tensor], group: TorchGroup) -> list[Key]:
        """What every rank has, in an order that all ranks have alike."""
        everywhere = complete(gather_texts(json.dumps(list(mine)), self._device), group, self._control)
        return sorted(set(mine).intersection(*({Key(*at) for at in json.loads(text)} for text in everywhere)))

    def _average(self, tensors: Mapping[Key, Tensor], group: TorchGroup) -> None:
        ParameterAverager({str(at): tensor for at, tensor in tensors.items()}, self._ledger).average(group)
