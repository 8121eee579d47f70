"""Gradients averaged over all ranks at first, then within each node.

What differs from torch:
- `subgroup=None` works without CUDA: ranks on one host, or under one torchrun agent, form a group. The groups are built at the
  first backward, on all ranks alike (tests/compat/test_post_local_sgd.py::test_the_default_subgroup_is_the_node).
- In the local phase DDP no longer overwrites buffers with rank 0's, nor waits for it (::test_buffers_stay_local).
- Under accumulation without `no_sync`, the warm-up counts optimizer steps (::test_the_warm_up_counts_optimizer_steps).
- A state can be pickled and read by `torch.load`; its groups are left out (::test_a_state_can_be_saved).
- The mean is times 1/N, as DDP's own, where torch's hook divides by N: the same bits where N is a power of two
  (::test_as_torch).
- A run that is resumed in its local phase learns of its DDP in the first backward: the first forward still takes rank 0's
  buffers.
- With `find_unused_parameters=True` DDP still compares over all ranks which parameters were used, as in torch.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist

from laconic._torch.process_groups import control_device
from laconic.comm.group import TorchGroup
from laconic.compat._bucket_owner import watch
from laconic.compat._hooks import Binding, completed
from laconic.ranks.agreement import agree
from laconic.ranks.groups import Groups
from laconic.ranks.islands import whole
from laconic.reducers.exact import Exact

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

logger = logging.getLogger(__name__)


class PostLocalSGDState:
    """When to stop averaging gradients over all ranks, and with whom afterwards; the state of `post_localSGD_hook`.

    `iter` is the number of steps so far. It can be pickled and read by `torch.load` as it is; its groups are left out.

    Arguments:
      `process_group`: all ranks, for the first `start_localSGD_iter` steps; None: the DDP's own.
      `subgroup`: the ranks that go on averaging gradients together; None: those on one node.
      `start_localSGD_iter`: steps at first in which all ranks average.
      `post_local_gradient_allreduce`: whether the subgroup averages gradients afterwards; False: nobody does. Default True.

    >>> from laconic.compat.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
    >>> PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100).iter
    0
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,  # noqa: N803  # torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter: int = 0
        self._groups: Groups | None = None
        self._binding: Binding | None = None
        self._sync_buffers = True
        logger.info("Local SGD will begin after %s iterations.", start_localSGD_iter)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count a step at its last bucket; the hook calls it.

        Arguments:
          `bucket`: the one that DDP has handed over.
        """
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD begins after %s iterations.", self.iter)

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("Process groups can't be saved: they are left out of the saved post-local SGD state.")
        names = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group, self.subgroup = dist.group.WORLD, None
        self.__dict__.update(state, _groups=None, _binding=None, _sync_buffers=True)
        logger.warning(
            "The loaded post-local SGD state averages over all ranks, then over those on its node; "
            "for other process groups, set its `process_group` and `subgroup`."
        )

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        binding = self._bound(bucket)
        if bucket.index() == 0:
            # A backward of the optimizer step that was counted already doesn't count again.
            binding.hook.step = self.iter if binding.watch.next_step() else max(self.iter - 1, 0)
        step = binding.hook.step
        local = step >= self.start_localSGD_iter
        if local and not self.post_local_gradient_allreduce:
            future = completed(bucket.buffer())
        else:
            future = binding.average(bucket, Exact(), self.subgroup if local else self.process_group)
        if step == self.iter:
            self.maybe_increase_iter(bucket)
        if bucket.is_last():
            binding.ddp.forward_sync_buffers = self._sync_buffers and self.iter < self.start_localSGD_iter
        return future

    def _bound(self, bucket: dist.GradBucket) -> Binding:
        watched = watch(bucket, self)
        if self._binding is None or self._binding.watch is not watched:
            self._binding = Binding(watched, {})
            self._sync_buffers = self._binding.ddp.forward_sync_buffers
        if self.subgroup is None and self.post_local_gradient_allreduce:
            everybody = self.process_group if self.process_group is not None else self._binding.ddp.process_group
            self.subgroup = self._node(everybody)
        return self._binding

    def _node(self, process_group: dist.ProcessGroup) -> dist.ProcessGroup:
        device = control_device(process_group)
        identity = agree(["post_localSGD_hook"], None, TorchGroup(process_group), device)
        self._groups = Groups(whole(process_group), identity, ["node"], None, device)
        return self._groups["node"].process_group


def post_localSGD_hook(  # noqa: N802  # torch's name
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average over all ranks in the first `state.start_localSGD_iter` steps, then within `state.subgroup` alone.

    Replicas then drift apart: average the parameters after `optimizer.step()` with a `PeriodicModelAverager` of the same
    warm-up, or by a `PostLocalSGDOptimizer`. `laconic.post_local_sgd(warmup, period)` is both as a strategy.

    Bytes: 2(N-1)/N * n * itemsize, with N the ranks of the group that averages in this step.

    Memory: none between steps.

    Paper: Lin et al. 2018, arXiv:1808.07217.

    Arguments:
      `state`: a `PostLocalSGDState`.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.post_localSGD_hook import (
    ...     PostLocalSGDState,
    ...     post_localSGD_hook,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100)
    >>> ddp.register_comm_hook(state, post_localSGD_hook)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> state.iter
    1
    >>> torch.distributed.destroy_process_group()
    """
    return state._average(bucket)


# What `torch.load` may build when it reads a checkpoint with its default weights_only=True.
torch.serialization.add_safe_globals([PostLocalSGDState, post_localSGD_hook])
