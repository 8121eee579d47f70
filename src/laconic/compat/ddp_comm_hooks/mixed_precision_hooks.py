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

from laconic._torch.ddp import all_reduce_sum
from laconic._torch.mixed_precision import end_forward, restore
from laconic._torch.tensors import at_end_of_backward
from laconic.compat._hooks import completed


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
    reduced = all_reduce_sum(ddp, bucket)
    with _on(stream):
        reduced.wait()
        mean = bucket.buffer().div_(ddp.process_group.size())
        parameter: Any  # with attributes that DDP gave it
        for parameter in bucket.parameters():
            restore(parameter)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.to(parameter.dtype)

    def finish() -> None:
        if stream.device.type != "cpu":
            torch.accelerator.current_stream().wait_stream(stream)
        for parameter in ddp.module.parameters():
            end_forward(parameter)
        hook_state.wait_for_stream_enqueued = False

    if not hook_state.wait_for_stream_enqueued:
        at_end_of_backward(finish)
        hook_state.wait_for_stream_enqueued = True
    return completed(mean)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    if stream.device.type == "cpu":  # there is but one, and it can't be entered
        yield
    else:
        with stream:
            yield
