"""Outer optimizers: what is done with the mean of the replicas' deltas."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

Groups = Sequence[dict[str, Any]]
"""Parameter groups, as torch.optim has them: the anchors, grouped as the inner optimizers group their parameters."""


class Outer(ABC):
    """Builds a torch optimizer over the anchor; its gradient is the mean of anchor - parameters.

    Derive a frozen dataclass from it and write `build`. The optimizer is stepped once a sync, over all parameters that the
    sync was of; the others have no gradient then. With the class attribute `needs_rate = True`, the optimizer finds the inner
    learning rate of each group in `group["rate"]`.

    Memory: what the optimizer keeps in its state, once for each number of the anchor.

    Not: an optimizer whose `step` needs a closure.

    >>> from dataclasses import dataclass
    >>> import torch, laconic
    >>> @laconic.register
    ... @dataclass(frozen=True)
    ... class Heavy(laconic.Outer):
    ...     momentum: float = 0.5
    ...
    ...     def build(self, groups):
    ...         return torch.optim.SGD(list(groups), lr=1.0, momentum=self.momentum)
    >>> str(laconic.diloco(64, outer=Heavy(0.8)))
    'diloco(period=64, outer=Heavy(momentum=0.8))'
    """

    needs_rate: bool = False  # whether each group needs the inner learning rate, as group["rate"]

    @abstractmethod
    def build(self, groups: Groups) -> Optimizer:
        """The optimizer over these `groups`: anchors, grouped as the inner optimizers group their parameters."""


@dataclass(frozen=True)
class Adopt(Outer):
    """Take the mean of the replicas as it is, or go `lr` of the way.

    Maths: anchor <- anchor - lr * mean delta.

    Memory: none.

    Arguments:
      `lr`: how far to go, above 0; with 1 the anchor becomes the mean of the replicas. Default 1.0.

    >>> import laconic
    >>> str(laconic.diloco(outer_lr=1.0, outer_momentum=0.0))
    'diloco(outer_lr=1.0, outer_momentum=0.0)'
    """

    lr: float = 1.0

    def __post_init__(self) -> None:
        _positive(self.lr, "lr")

    def build(self, groups: Groups) -> Optimizer:
        return SGD(list(groups), lr=self.lr)


@dataclass(frozen=True)
class Nesterov(Outer):
    """torch.optim.SGD(nesterov=True) on the mean delta: the outer optimizer of DiLoCo.

    Maths: m <- momentum * m + delta;  anchor <- anchor - lr * (delta + momentum * m). In the long run a steady delta is
    taken lr / (1 - momentum) times.

    Memory: n numbers, for an anchor of n.

    Paper: Douillard et al. 2023, arXiv:2311.08105.

    Arguments:
      `lr`: the learning rate of the outer step, above 0. Default 0.7.
      `momentum`: above 0 and below 1. Default 0.9.

    >>> import laconic
    >>> str(laconic.diloco(500, outer=laconic.Nesterov(0.7, 0.9)))
    'diloco(period=500, outer=Nesterov())'
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _positive(self.lr, "lr")
        _momentum(self.momentum, "momentum", above_zero=True)

    def build(self, groups: Groups) -> Optimizer:
        return SGD(list(groups), lr=self.lr, momentum=self.momentum, nesterov=True)


@dataclass(frozen=True)
class SlowMo(Outer):
    """Slow momentum in units of the inner learning rate.

    Maths: u <- beta * u + delta / rate;  anchor <- anchor - alpha * rate * u, with the inner optimizer's current rate. Kept
    as v = rate * u, which needs no division by a rate that has decayed to zero.

    Memory: n numbers, for an anchor of n.

    Paper: Wang et al. 2019, arXiv:1910.00643.

    Arguments:
      `beta`: the decay of the slow momentum, at least 0 and below 1. Default 0.5.
      `alpha`: how far the anchor goes by it, above 0. Default 1.0.

    >>> import laconic
    >>> str(laconic.slowmo(24, outer=laconic.SlowMo(beta=0.7)))
    'slowmo(period=24, outer=SlowMo(beta=0.7))'
    """

    beta: float = 0.5
    alpha: float = 1.0
    needs_rate = True

    def __post_init__(self) -> None:
        _momentum(self.beta, "beta")
        _positive(self.alpha, "alpha")

    def build(self, groups: Groups) -> Optimizer:
        return _SlowMomentum(list(groups), {"lr": self.alpha, "momentum": self.beta, "rate": 1.0})


@dataclass(frozen=True)
class OuterOptimizer(Outer):
    """Any torch optimizer class over the anchor, with its own options.

    Maths: the optimizer's, where the gradient is the mean of anchor - parameters. It is stepped once a sync.

    Memory: the optimizer's.

    Not: an optimizer that can't step by gradients alone: LBFGS needs a closure, SparseAdam sparse gradients.

    Arguments:
      `optimizer`: a class of torch optimizers.
      `options`: the optimizer's arguments by name, such as {"lr": 0.1}. Default {}.

    >>> import torch, laconic
    >>> outer = OuterOptimizer(torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9)})
    >>> str(laconic.diloco(64, outer=outer))
    "diloco(period=64, outer=OuterOptimizer(optimizer=torch.optim.adam:Adam, options={'betas': (0.5, 0.9), 'lr': 0.1}))"
    """

    optimizer: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind: object = self.optimizer  # from a text, it may be anything
        if not isinstance(kind, type) or not issubclass(kind, Optimizer):
            raise TypeError(f"optimizer must be a class of optimizers such as torch.optim.Adam, got {self.optimizer!r}")
        if not isinstance(self.options, Mapping):
            raise TypeError(f"options must be the optimizer's arguments by name, such as {{'lr': 0.1}}, got {self.options!r}")
        given = {str(key): value for key, value in self.options.items()}
        plain: dict[str, Any] = {key: value.item() if isinstance(value, Tensor) else value for key, value in given.items()}
        object.__setattr__(self, "options", dict(sorted(plain.items())))
        name = self.optimizer.__name__
        try:
            made = kind([torch.zeros(1, 1, requires_grad=True)], **plain)
        except (TypeError, ValueError) as error:
            raise type(error)(f"options don't fit {name}: {error}") from error
        made.param_groups[0]["params"][0].grad = torch.zeros(1, 1)
        try:
            made.step()
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise TypeError(f"{name} can't step by gradients alone, as an outer optimizer must: {error}") from error

    def __hash__(self) -> int:
        return hash((self.optimizer, *self.options))

    def build(self, groups: Groups) -> Optimizer:
        return self.optimizer(list(groups), **self.options)


class _SlowMomentum(Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for anchor in group["params"]:
                if anchor.grad is None:
                    continue
                state = self.state[anchor]
                before = state.get("rate", 0.0)
                if "momentum_buffer" in state:
                    state["momentum_buffer"].mul_(group["momentum"] * (group["rate"] / before if before else 1.0))
                    state["momentum_buffer"].add_(anchor.grad)
                else:
                    state["momentum_buffer"] = anchor.grad.clone()
                state["rate"] = group["rate"]
                anchor.sub_(state["momentum_buffer"], alpha=group["lr"])


def _positive(number: float, name: str) -> None:
    _number(number, name)
    if not number > 0:
        raise ValueError(f"{name} must be above 0, got {number!r}")


def _momentum(number: float, name: str, *, above_zero: bool = False) -> None:
    _number(number, name)
    if not 0 <= number < 1 or (above_zero and number == 0):
        raise ValueError(f"{name} must be {'above' if above_zero else 'at least'} 0 and below 1, got {number!r}")


def _number(number: object, name: str) -> None:
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise TypeError(f"{name} must be a number, got {number!r}")
