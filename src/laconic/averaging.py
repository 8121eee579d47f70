"""Averaging of parameters, in place."""

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.bucket import Bucket, flatten, local, pack, unflatten
from laconic.reducers.base import Reducer
from laconic.reducers.cast import DTYPES, Cast
from laconic.reducers.exact import Exact
from laconic.wire import AllGather, Exchange, Group, Ledger, Reduced, land

CHUNK_BYTES = 8 << 20


class ParameterAverager:
    """Replaces named tensors by their mean over the group; storage, memory format and dtype stay.

    Maths: fp32 by an all-reduce; 16-bit tensors travel in their own dtype and are summed in fp32, so that averaging
    identical replicas changes no bit. Of integers, such as the counters of BatchNorm, the largest is taken.
    Bytes: 2(N-1)/N * n * itemsize; of integers (N-1) * n * itemsize.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ledger: Ledger) -> None:
        self._names = list(tensors)
        self._tensors = [local(tensor) for tensor in tensors.values()]
        self._ledger = ledger

    @torch.no_grad()
    def average(self, group: Group) -> None:
        """All ranks of the group together."""
        for run in pack(self._tensors, CHUNK_BYTES):
            targets = [self._tensors[index] for index in run]
            names = [self._names[index] for index in run]
            flat, views = flatten(targets)
            bucket = Bucket(flat, views, names, [{} for _ in run], group.rank, group.world)
            mean = land(_exchange(bucket), group, self._ledger).mean
            for target, piece in zip(targets, unflatten(mean, targets), strict=True):
                target.copy_(piece)


def _exchange(bucket: Bucket) -> Exchange:
    dtype = bucket.flat.dtype
    if not dtype.is_floating_point:
        return _largest(bucket.flat)
    reducer: Reducer = next((Cast(name) for name, known in DTYPES.items() if known == dtype), Exact())
    return reducer.reduce(bucket)


def _largest(flat: Tensor) -> Exchange:
    return Reduced((yield AllGather(flat)).amax(0))
