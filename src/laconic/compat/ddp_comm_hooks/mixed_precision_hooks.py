"""Averaging in a lower precision for a DDP that keeps its parameters in two precisions.

DDP registers torch's own hook when it is built with `mixed_precision=`; this one is for code that calls the hook itself.

What differs from torch:
- It needs no accelerator (tests/compat/test_mixed_precision.py::test_parameters_and_gradients_come_back_in_fp32).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.utils import _free_storage

from laconic.compat._hooks import landed


@dataclass
class _AllreduceUpcastHookState:
    """A weak reference to the DDP, the stream on which full precision is brought back, and whether its end is arranged."""

    ddp_weakref: Any
    upcast_stream: torch.Stream
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in DDP's `reduce_dtype`; then put the full-precision parameters and gradients in place for the optimizer."""
    ddp = hook_state.ddp_weakref()
    precision, stream = ddp.mixed_precision, hook_state.upcast_stream
    if precision.param_dtype != precision.reduce_dtype:
        bucket.set_buffer(bucket.buffer().to(precision.reduce_dtype))
    reduced = ddp.reducer._run_allreduce_hook(bucket)
    with _on(stream):
        reduced.wait()
        mean = bucket.buffer().div_(ddp.process_group.size())
        parameter: Any  # with attributes that DDP gave it
        for parameter in bucket.parameters():
            parameter.data = parameter._fp_param
            _free_storage(parameter._mp_param)  # the next forward fills it again
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.to(parameter.dtype)

    def finish() -> None:
        if stream.device.type != "cpu":
            torch.accelerator.current_stream().wait_stream(stream)
        for parameter in ddp.module.parameters():
            # Hooks are installed anew in each forward; what needs no gradient has met none that brings it back.
            if hasattr(parameter, "_ddp_mp_hook_state"):
                parameter._ddp_mp_hook_state[1].remove()
                del parameter._ddp_mp_hook_state
            if not parameter.requires_grad and not hasattr(parameter, "_ddp_ignored"):
                parameter.data = parameter._fp_param
        hook_state.wait_for_stream_enqueued = False

    if not hook_state.wait_for_stream_enqueued:
        Variable._execution_engine.queue_callback(finish)
        hook_state.wait_for_stream_enqueued = True
    return landed(mean)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    if stream.device.type == "cpu":  # there is but one, and it can't be entered
        yield
    else:
        with stream:
            yield
