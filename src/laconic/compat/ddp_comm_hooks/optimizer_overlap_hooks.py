"""The optimizer runs in backward, on each bucket as soon as its future is done.

That is at once after `allreduce_hook` has averaged it; after the compressing hooks, when the last bucket has arrived.

What differs from torch:
- Gradients are taken from what the hook returned, in the parameters' own layout and dtype: hooks that return a new tensor
  (tests/compat/test_optimizer_overlap.py::test_a_hook_that_returns_a_new_tensor), channels_last (::test_channels_last) and the
  16-bit wrappers with Adam (::test_wrapped_in_sixteen_bits) give what stepping after backward gives.
- `_apply_optim_in_backward_hook` needs no accelerator, and parameters without an optimizer of their own get averaged gradients
  also without `gradient_as_bucket_view` (::test_optimizers_in_backward). At its first forward DDP registers torch's own hook if
  parameters have optimizers by then: to use this one, run a forward before you hand them out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._torch.ddp import averaged_parameters, leave_gradients
from laconic._torch.mixed_precision import optimizers_in_backward
from laconic._torch.tensors import at_end_of_backward
from laconic.compat._hooks import average, gradients
from laconic.reducers.exact import Exact

__all__: list[str] = []

_FUNCTIONAL_OPTIM_STEP_METHOD_NAME = "step_param"


class _OptimizerHookState:
    """A functional optimizer, and which parameters it is for; without `params`, for all."""

    def __init__(self, functional_optim: Any, params: Iterable[Tensor] | None = None) -> None:
        if not hasattr(functional_optim, _FUNCTIONAL_OPTIM_STEP_METHOD_NAME):
            raise ValueError(
                f"functional_optim must have a method step_param(parameter, gradient), got {type(functional_optim).__name__}; "
                "torch.distributed.optim has functional optimizers"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)


@dataclass
class _OptimInBackwardHookState:
    """Where the optimizers of a backward run, and whether its end has been arranged."""

    optim_stream: torch.Stream
    wait_for_optim_stream_enqueued: bool


def _apply_optim_in_backward_hook(
    gradient_is_bucket_view: bool,
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A hook that averages a bucket and steps the optimizers that `_apply_optimizer_in_backward` gave to its parameters.

    Its state is a weak reference to the DDP. The gradients of those parameters are None after the backward.
    """
    pending: list[torch.futures.Future[torch.Tensor]] = []

    def apply_optim_in_backward_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ddp: Any = state()

        def step(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            flat = future.value()
            for parameter, gradient in zip(bucket.parameters(), gradients(bucket, flat), strict=True):
                optimizers = optimizers_in_backward(parameter)
                if optimizers:
                    # With `gradient_as_bucket_view` .grad is this very memory, and DDP insists that it stays so.
                    if not gradient_is_bucket_view:
                        parameter.grad = gradient
                    for optimizer in optimizers:
                        optimizer.step()
                elif parameter.grad is not None and not gradient_is_bucket_view:
                    parameter.grad.copy_(gradient)  # DDP leaves it to us, see below
            return flat

        def finish() -> None:
            outstanding = pending.copy()
            pending.clear()  # also where one has failed: the next backward begins anew
            torch.futures.wait_all(outstanding)
            for parameter in averaged_parameters(ddp):
                if optimizers_in_backward(parameter) is not None:
                    parameter.grad = None

        if not pending:  # the first bucket of this backward
            leave_gradients(ddp)  # it then writes no gradients, so those we set to None stay so
            at_end_of_backward(finish)
        pending.append(average(None, bucket, Exact()).then(step))
        return pending[-1]

    return apply_optim_in_backward_hook


def _hook_then_optimizer(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
    optimizer_state: _OptimizerHookState,
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """`hook`, then the functional optimizer on what it returned.

    `ddp.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, _OptimizerHookState(functional_optim)))`
    """
    chosen = optimizer_state.params_to_optimize

    def hook_then_optimizer(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def step(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            flat = future.value()
            for parameter, gradient in zip(bucket.parameters(), gradients(bucket, flat), strict=True):
                if chosen is None or parameter in chosen:
                    optimizer_state.functional_optimizer.step_param(parameter, gradient)
            return flat

        return hook(state, bucket).then(step)

    return hook_then_optimizer
