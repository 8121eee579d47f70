"""What a reducer is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

from laconic.bucket import Bucket
from laconic.wire import Exchange


class Reducer(ABC):
    """How a bucket is averaged over the ranks: a frozen dataclass of hyperparameters, and one generator.

    `reduce` yields collectives and returns the mean. It does no I/O, knows no process group, keeps its memory in
    `bucket.slots`, and never reads a value into Python, so that the same lines run in DDP's backward, in `simulate` and,
    on meta tensors, in `predict`.
    """

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Exchange:
        """Average `bucket.flat` over the group."""

    @classmethod
    def examples(cls) -> Iterator[Self]:
        """Instances worth trying: the law tests and benchmarks run every one of them."""
        yield cls()
