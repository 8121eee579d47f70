"""Anchors: where all replicas were after the last sync, and the outer optimizer that moves them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.local.trial_step import memory_after_a_step
from laconic.strategies.outer import Outer

InnerGroups = Sequence[tuple[Sequence[str], Callable[[], float]]]
"""Parameter names by the inner optimizers' groups, with what reads the learning rate of each."""


def anchor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Anchors of 16-bit parameters are kept in fp32, and so their deltas travel in fp32."""
    return dtype if dtype.itemsize >= 4 else torch.float32


class Anchors:
    """An anchor for each parameter, the same on all ranks, and an outer optimizer over all of them."""

    def __init__(self, parameters: Mapping[str, Tensor], outer: Outer, inner: InnerGroups, *, offload: bool) -> None:
        cpu = torch.device("cpu")
        self.by_name = {
            name: parameter.to(cpu if offload else parameter.device, anchor_dtype(parameter.dtype), copy=True)
            for name, parameter in parameters.items()
        }
        groups = [{"params": [self.by_name[name] for name in names], "rate": 1.0} for names, _ in inner]
        self._build = outer.build
        self._outer = outer.build(groups)
        self._memory_like: dict[tuple[torch.Size, torch.dtype], Mapping[str, object]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.by_name[name]

    def use_rates(self, rates: Sequence[float]) -> None:
        """The inner learning rates, group by group, for an outer optimizer that needs them."""
        if rates:
            for group, rate in zip(self._outer.param_groups, rates, strict=True):
                group["rate"] = rate

    def step(self, deltas: Mapping[str, Tensor]) -> None:
        """One step of the outer optimizer, on these mean deltas; anchors without one stay where they are."""
        try:
            for name, delta in deltas.items():
                self.by_name[name].grad = delta.to(self.by_name[name].device)
            self._outer.step()
        finally:
            for name in deltas:
                self.by_name[name].grad = None

    def memory_like(self, name: str) -> Mapping[str, object]:
        """What the outer optimizer keeps of this anchor from its first step on: tensors of that kind, and numbers."""
        anchor = self.by_name[name]
        known = self._memory_like.get((anchor.shape, anchor.dtype))
        if known is None:
            memory = memory_after_a_step(lambda trial: self._build([{"params": [trial], "rate": 1.0}]), anchor)
            known = {key: one.to("meta") if isinstance(one, Tensor) else one for key, one in memory.items()}
            self._memory_like[anchor.shape, anchor.dtype] = known
        return known

    def replicated(self) -> dict[str, Tensor]:
        """What is the same on all ranks, by what a person calls it."""
        found = {f"the anchor of {name}": anchor for name, anchor in self.by_name.items()}
        for name, anchor in self.by_name.items():
            memory = self._outer.state.get(anchor, {})
            found |= {f"the outer {key} of {name}": value for key, value in memory.items() if isinstance(value, Tensor)}
        return found

    def state(self) -> dict[str, Any]:
        """Plain data, by parameter name."""
        return {
            "anchors": dict(self.by_name),
            "outer": {name: dict(self._outer.state.get(anchor, {})) for name, anchor in self.by_name.items()},
            "outer_groups": [_plain(group) for group in self._outer.param_groups],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        for name, anchor in self.by_name.items():
            anchor.copy_(state["anchors"][name])
            self._outer.state[anchor] = {
                key: value.to(anchor.device, copy=True) if isinstance(value, Tensor) else value
                for key, value in state["outer"].get(name, {}).items()
            }
        for group, saved in zip(self._outer.param_groups, state["outer_groups"], strict=False):
            group.update(saved)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer counts for a whole group; parameters are known, and rates are set at each sync."""
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "rate") and isinstance(value, bool | int | float | str | Tensor | None)
    }
