"""DistributedDataParallel: its hooks, its buckets, its phases, and its half in C++."""

from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.private_names import part


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The communication hooks that were registered, each with its state."""
    hooks: list[tuple[Any, Any]] = part(ddp, "_comm_hooks")
    return hooks


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether its bucket order is settled. DDP rebuilds its buckets once, before its second forward."""
    return bool(part(ddp, "_has_rebuilt_buckets"))


def has_learnt_graph(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP with a static graph has had its first backward, in which it learns the graph."""
    return bool(part(ddp, "_static_graph_delay_allreduce_enqueued"))


def has_run_forward(ddp: DistributedDataParallel) -> bool:
    """Whether a forward has run."""
    return bool(part(ddp, "_lazy_init_ran"))


def is_joined(ddp: DistributedDataParallel) -> bool:
    """Whether it runs inside `join`, where ranks may run out of batches."""
    return bool(part(ddp, "_join_config").enable)


def module_of(ddp: DistributedDataParallel) -> nn.Module | None:
    """Its module; None in one that is being built, or was built in vain."""
    module = part(ddp, "_modules").get("module")
    assert module is None or isinstance(module, nn.Module)
    return module


def averaged_parameters(ddp: DistributedDataParallel) -> list[Any]:
    """The parameters whose gradients it averages."""
    return list(part(ddp, "_module_parameters"))


def failed_in_buffers(error: BaseException) -> bool:
    """Whether an error comes from DDP's broadcast of buffers, which runs in its forward."""
    broadcast = part(DistributedDataParallel, "_sync_buffers").__code__
    return any(frame.f_code is broadcast for frame, _ in walk_tb(error.__traceback__))


def bucket_assignment(tensors: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
    """Tensors, by index, in the buckets that DDP makes of them; `limits` are the bytes of the first, second, ... bucket."""
    groups, _ = part(dist, "_compute_bucket_assignment_by_size")(list(tensors), list(limits))
    return [list(group) for group in groups]


def all_reduce_sum(ddp: DistributedDataParallel, bucket: dist.GradBucket) -> Any:
    """DDP's own all-reduce of a bucket, inside a hook: a future of the sum."""
    return part(ddp.reducer, "_run_allreduce_hook")(bucket)


def leave_gradients(ddp: DistributedDataParallel) -> None:
    """Have DDP write no gradients in this backward: those that were set to None stay so."""
    part(ddp.reducer, "_set_optimizer_in_backward")()


def fire_ready(ddp: DistributedDataParallel, indices: Sequence[int]) -> None:
    """Let DDP believe that a backward has made its gradients ready in this order, by DDP's own numbers of them."""
    reducer: Any = ddp.reducer

    def fire() -> None:
        for index in indices:
            part(reducer, "_autograd_hook")(index)

    part(reducer, "prepare_for_backward")([])
    apply: Any = _InBackward.apply
    apply(torch.ones(1, requires_grad=True), fire).sum().backward()
    # Since torch 2.15 a DDP may leave the end of a backward to the user's loop, which knows nothing of this one.
    if getattr(ddp, "require_manual_backward_finalization", False):
        part(ddp, "finalize_backward")()


class _InBackward(torch.autograd.Function):
    """Calls a function from inside a backward, which is where DDP can finish one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradients[0], None
