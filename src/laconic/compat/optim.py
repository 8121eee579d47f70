"""An optimizer that averages its parameters after its steps.

What differs from torch:
- It is an optimizer in full: `step(closure)`, `defaults`, step hooks, copying (tests/compat/test_optimizer.py::test_closure,
  ::test_step_hooks, ::test_deepcopy).
- Learning-rate schedulers work after `load_state_dict`, too (::test_a_scheduler_after_loading).
- A GradScaler that finds an overflow on one rank skips that rank's update but neither the count nor the averaging: ranks stay
  in step (::test_a_scaler_that_skips_on_one_rank).
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from laconic._torch.optimizers import state_dict_hooks
from laconic.compat.model_averaging.averagers import ModelAverager

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(Optimizer):
    """An optimizer, and after each of its steps an averager of its parameters.

    Its `param_groups`, `state` and `defaults` are those of `optim`, so learning-rate schedulers and GradScalers work on it.
    `laconic.post_local_sgd(warmup, period)` is the same as a strategy, with the hook that it needs.

    Bytes: those of the averager.

    Memory: that of `optim`.

    Paper: Lin et al. 2018, arXiv:1808.07217.

    Arguments:
      `optim`: the optimizer that makes the steps.
      `averager`: a `ModelAverager` of `laconic.compat`, such as `PeriodicModelAverager`.

    >>> import torch
    >>> from laconic.compat.model_averaging.averagers import PeriodicModelAverager
    >>> from laconic.compat.optim import PostLocalSGDOptimizer
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> local = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> optimizer = PostLocalSGDOptimizer(
    ...     local, PeriodicModelAverager(period=4, warmup_steps=100)
    ... )
    >>> model(torch.ones(8, 4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state_dict()["step"]
    1
    >>> torch.distributed.destroy_process_group()
    """

    # A GradScaler then calls `step` in any case and leaves it to us to unscale and to skip.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None  # set by a GradScaler for one call of `step`, with `found_inf`
    found_inf: torch.Tensor

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}")
        if not hasattr(averager, "average_parameters") or not hasattr(averager, "step"):
            raise TypeError(f"averager must be a ModelAverager, got {type(averager).__name__}")
        self.__setstate__({"optim": optim, "averager": averager})

    # Not Optimizer.__init__: the parameters, their state and the defaults are those of `optim`, always.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of `optim`."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of `optim`."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of `optim`."""
        return self.optim.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optim: Optimizer = state["optim"]
        self.averager: ModelAverager = state["averager"]
        super().__setstate__({})  # gives it the hooks of an optimizer

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of `optim`, then the averager. A step that a GradScaler skips is counted and averaged, too.

        Arguments:
          `closure`: works out the loss anew and returns it, as in torch's optimizers. Default None.
        """
        loss = self._scaled_step(closure) if hasattr(self, "found_inf") else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    @torch.no_grad()
    def _scaled_step(self, closure: Callable[[], float] | None) -> float | None:
        """A GradScaler has left its scale and whether it saw an overflow."""
        if self.found_inf.item():
            return None
        if self.grad_scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(self.grad_scale.to(parameter.grad.device))
        return self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """That of `optim`.

        Arguments:
          `set_to_none`: whether gradients become None instead of zeros. Default True.
        """
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """That of `optim`. Add groups before the first averaging, on all ranks: ranks compare shapes once.

        Arguments:
          `param_group`: a dict with `params`, and settings of its own.
        """
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of `optim`, and under "step" how many steps the averager has counted."""
        for before in state_dict_hooks(self, "state_dict_pre"):
            before(self)
        state = {**self.optim.state_dict(), "step": self.averager.step}
        for after in state_dict_hooks(self, "state_dict_post"):
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, or from a plain state dict of `optim`, with a warning.

        Arguments:
          `state_dict`: the state; without "step", the averager counts from 0, warm-up included.
        """
        for before in state_dict_hooks(self, "load_state_dict_pre"):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        if "step" not in state_dict:
            warnings.warn("the state dict has no step of the averager: it counts from 0, warm-up included", stacklevel=2)
        self.averager.step = state_dict.get("step", 0)
        for after in state_dict_hooks(self, "load_state_dict_post"):
            after(self)
