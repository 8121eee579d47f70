"""ZeRO's sharded optimizer, where it steps in backward: which rank owns which parameters."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer, zero_redundancy_optimizer
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.ddp import has_rebuilt_buckets
from laconic._torch.private_names import part


class ZeroShards:
    """Which rank owns which parameters of a ZeroRedundancyOptimizer that steps in backward."""

    def __init__(self, zero: ZeroRedundancyOptimizer, shard_buckets: bool) -> None:
        self._zero, self._shard_buckets = zero, shard_buckets
        self._status = part(zero_redundancy_optimizer, "_OverlapStatus")

    @staticmethod
    def steps_in_backward(zero: ZeroRedundancyOptimizer) -> bool:
        """Whether it was built with `overlap_with_ddp=True`."""
        return bool(part(zero, "_overlap_with_ddp"))

    @property
    def of_ranks(self) -> list[list[Tensor]]:
        """The parameters of each rank."""
        shards: list[list[Tensor]] = part(part(self._zero, "_overlap_info"), "params_per_rank")
        return shards

    def dealt(self, ddp: DistributedDataParallel, bucket: dist.GradBucket) -> bool:
        """Whether shards are dealt when this bucket comes: from the second backward on after DDP has settled its buckets."""
        info = part(self._zero, "_overlap_info")
        settled, done = part(self._status, "DDP_HAS_REBUILT_BUCKETS"), part(self._status, "INITIALIZED")
        if bucket.index() == 0 and part(info, "status") == settled:
            self._deal()
        if info.status == done:
            return True
        # Where it must look for unused parameters, DDP never rebuilds its buckets.
        if has_rebuilt_buckets(ddp) or (ddp.find_unused_parameters and not ddp.static_graph):
            if bucket.index() == 0:
                info.params_per_bucket = []
            part(info, "params_per_bucket").append(bucket.parameters())
            if bucket.is_last():
                info.status = settled
        return False

    def _deal(self) -> None:
        zero: Any = self._zero  # torch hides most of its methods from type checkers
        info = zero._overlap_info
        info.shard_buckets = self._shard_buckets
        info.total_size = sum(parameter.numel() for bucket in info.params_per_bucket for parameter in bucket)
        info.status = part(self._status, "INITIALIZED")
        part(zero, "_clear_cache")()
        assert part(zero, "_bucket_assignments_per_rank"), "reading it deals the buckets"
        part(zero, "_partition_parameters")(part(info, "params_per_rank"))
        part(zero, "_init_local_optimizer")()

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step this rank's parameters by these gradients."""
        part(self._zero, "_local_step")(list(gradients))
