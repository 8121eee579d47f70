"""ZeRO's sharded optimizer steps in backward.

What differs from torch:
- They work on gloo: no collective leaves from a callback, so none leaves in another order on another rank
  (tests/compat/test_zero.py::test_as_stepping_after_backward).
- They work in a process group that doesn't begin with rank 0 (::test_in_a_subgroup).
- Parameters keep their storage and their memory format (::test_channels_last).
- Learning-rate schedulers on `zero` have an effect (tests/compat/test_edges.py::test_zero_with_a_learning_rate_that_changes),
  and `find_unused_parameters=True` works
  (tests/compat/test_edges.py::test_zero_with_unused_parameters).
- New parameters travel in one all-gather of all shards at the end of backward, where torch broadcasts bucket by bucket. The
  interleaved hook differs from the other one in when the optimizer computes: bucket by bucket, as their futures are done.

As in torch, the first two backwards (three with a static graph) update nothing: DDP's buckets, which decide who owns what, are
not final before.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.zero import ZeroShards
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Rounds, complete
from laconic.comm.flat_tensors import local, stored
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.compat._hooks import gradients
from laconic.local.parameter_averaging import CHUNK_BYTES

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A hook that averages by `hook`, and in the last bucket of a backward makes the step of a sharded optimizer.

    Each bucket belongs to a rank, which steps its parameters; then all ranks get the new ones. Call no `zero.step()`.

    Bytes: those of `hook`, and (N-1) * the largest shard for the parameters.

    Memory: this rank's shard of the optimizer's state.

    Paper: Rajbhandari et al. 2019, arXiv:1910.02054.

    Not: the first two backwards, three with a static graph, update nothing, as in torch.

    Arguments:
      `hook`: the hook that averages, ours or your own.
      `ddp`: the DDP that it is registered with.
      `zero`: a ZeroRedundancyOptimizer over the DDP's parameters, built with `overlap_with_ddp=True`.
      `shard_buckets`: whether a bucket may belong to several ranks. Default False.

    A `zero` without `overlap_with_ddp=True` is a ValueError.

    >>> import torch
    >>> from torch.distributed.optim import ZeroRedundancyOptimizer
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import allreduce_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    >>> start = ddp.module.weight.detach().clone()
    >>> zero = ZeroRedundancyOptimizer(
    ...     ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.125
    ... )
    >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    >>> for batch in torch.ones(4, 8, 4):  # the third and the fourth update
    ...     zero.zero_grad()
    ...     ddp(batch).sum().backward()
    >>> (start - ddp.module.weight.detach())[0].round()
    tensor([2., 2., 2., 2.])
    >>> torch.distributed.destroy_process_group()
    """
    return _with_zero(hook, ddp, zero, shard_buckets, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """As `hook_with_zero_step`, with the optimizer's computation for a bucket as soon as the bucket's gradients are there.

    Bytes: those of `hook`, and (N-1) * the largest shard for the parameters.

    Memory: this rank's shard of the optimizer's state.

    Paper: Rajbhandari et al. 2019, arXiv:1910.02054.

    Not: the first two backwards, three with a static graph, update nothing, as in torch.

    Arguments:
      `hook`: the hook that averages, ours or your own.
      `ddp`: the DDP that it is registered with.
      `zero`: a ZeroRedundancyOptimizer over the DDP's parameters, built with `overlap_with_ddp=True`.
      `shard_buckets`: whether a bucket may belong to several ranks. Default False.

    A `zero` without `overlap_with_ddp=True` is a ValueError.

    >>> import torch
    >>> from torch.distributed.optim import ZeroRedundancyOptimizer
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.ddp_zero_hook import (
    ...     hook_with_zero_step_interleaved,
    ... )
    >>> from laconic.compat.ddp_comm_hooks.default_hooks import allreduce_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    >>> start = ddp.module.weight.detach().clone()
    >>> zero = ZeroRedundancyOptimizer(
    ...     ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.125
    ... )
    >>> ddp.register_comm_hook(
    ...     None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero)
    ... )
    >>> for batch in torch.ones(4, 8, 4):  # the third and the fourth update
    ...     zero.zero_grad()
    ...     ddp(batch).sum().backward()
    >>> (start - ddp.module.weight.detach())[0].round()
    tensor([2., 2., 2., 2.])
    >>> torch.distributed.destroy_process_group()
    """
    return _with_zero(hook, ddp, zero, shard_buckets, interleaved=True)


def _with_zero(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]],
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool,
    interleaved: bool,
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    if not ZeroShards.steps_in_backward(zero):
        raise ValueError("zero steps in backward only if it is built with ZeroRedundancyOptimizer(..., overlap_with_ddp=True)")
    shards = _Shards(ddp, zero, shard_buckets)

    def zero_step_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ready = shards.ready(bucket)
        future = hook(state, bucket)
        if not ready:
            return future
        if interleaved:

            def step(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
                shards.step([(bucket, done.value())])
                return done.value()

            future = future.then(step)
        shards.pending.append((bucket, future))
        if bucket.is_last():
            pending, shards.pending = shards.pending, []
            averaged = [(each, future.wait()) for each, future in pending]
            if not interleaved:
                shards.step(averaged)
            shards.share()
        return future

    return zero_step_hook


class _Shards:
    """Who owns which parameters, and how the new ones get to everybody."""

    def __init__(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool) -> None:
        self.pending: list[tuple[dist.GradBucket, torch.futures.Future[Tensor]]] = []
        self._ddp, self._zero = weakref.ref(ddp), zero
        self._shards = ZeroShards(zero, shard_buckets)
        self._group = TorchGroup(zero.process_group)
        self._lock = threading.Lock()  # interleaved, gradients may arrive in several threads at a time

    def ready(self, bucket: dist.GradBucket) -> bool:
        """Whether shards are dealt. They are at the second backward after DDP has settled its buckets."""
        ddp = self._ddp()
        assert ddp is not None, "its backward is running"
        if bucket.index() == 0:
            self.pending = []  # of a backward that failed
        return self._shards.dealt(ddp, bucket)

    def step(self, averaged: list[tuple[dist.GradBucket, Tensor]]) -> None:
        """Step this rank's share of some buckets."""
        found = {
            id(parameter): gradient
            for bucket, flat in averaged
            for parameter, gradient in zip(bucket.parameters(), gradients(bucket, flat), strict=True)
        }
        with self._lock:
            mine = self._zero.optim.param_groups[0]["params"]
            wanted: list[Tensor | None] = [found.get(id(parameter)) for parameter in mine]
            if any(gradient is not None for gradient in wanted):
                settings = self._zero.optim.defaults  # torch's functional optimizers read these and not their group's
                settings.update({key: value for key, value in self._zero.param_groups[0].items() if key in settings})
                self._shards.step(wanted)

    def share(self) -> None:
        """Give this rank's parameters to all, and take theirs."""
        shards = self._shards.of_ranks
        for dtype, device in dict.fromkeys((p.dtype, p.device) for shard in shards for p in shard):
            complete(
                _gather([[p for p in s if (p.dtype, p.device) == (dtype, device)] for s in shards], self._group),
                self._group,
                Ledger(),
            )


@torch.no_grad()
def _gather(shards: list[list[Tensor]], group: TorchGroup) -> Rounds[None]:
    """Every rank's shard to all the others, a few MiB at a time.  Bytes: (N-1) * the largest shard."""
    flats = [[_flat(parameter) for parameter in shard] for shard in shards]
    like = next(flat for shard in flats for flat in shard)
    longest = max(sum(flat.numel() for flat in shard) for shard in flats)
    room = CHUNK_BYTES // like.element_size()
    for start in range(0, longest, room):
        size = min(room, longest - start)
        message = like.new_zeros(size)
        for piece, part in _overlaps(flats[group.rank], start, size):
            message[part] = piece
        rows = yield AllGather(message)
        for rank, row in enumerate(rows):
            if rank != group.rank:
                for piece, part in _overlaps(flats[rank], start, size):
                    piece.copy_(row[part])
    for shard, pieces in zip(shards, flats, strict=True):
        for parameter, flat in zip(shard, pieces, strict=True):
            if stored(local(parameter)) is None:  # it has gaps in memory, and was copied
                local(parameter).copy_(flat.view(parameter.shape))


def _flat(parameter: Tensor) -> Tensor:
    view = stored(local(parameter))
    return local(parameter).flatten() if view is None else view


def _overlaps(flats: list[Tensor], start: int, size: int) -> list[tuple[Tensor, slice]]:
    """The pieces of a shard that lie in [start, start + size), each with its place there."""
    found, position = [], -start
    for flat in flats:
        first, last = max(position, 0), min(position + flat.numel(), size)
        if first < last:
            found.append((flat[first - position : last - position], slice(first, last)))
        position += flat.numel()
    return found
