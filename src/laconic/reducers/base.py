"""What a reducer is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Self

import torch
from torch import Tensor

from laconic.bucket import Bucket
from laconic.wire import Exchange


def checked(reducer: object, name: str) -> "Reducer":
    """Refuse what can't be a part of a strategy: its text must say all that makes it differ from another."""
    if not isinstance(reducer, Reducer):
        raise TypeError(f"{name} must be a Reducer such as Cast('bf16'), got {reducer!r}")
    if not is_dataclass(reducer):
        raise TypeError(f"{type(reducer).__name__} must be a frozen dataclass: put @dataclass(frozen=True) above it")
    return reducer


def checked_steps(steps: object, name: str) -> int:
    """Refuse what is no number of steps."""
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"{name} must be a whole number of steps, got {steps!r}")
    if steps < 0:
        raise ValueError(f"{name} must be 0 or more steps, got {steps}")
    return steps


def checked_rank(rank: object, min_compression_rate: object) -> None:
    """Refuse what is no rank, and a rate that would never or always compress."""
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a whole number, at least 1, got {rank!r}")
    if not isinstance(min_compression_rate, int | float) or min_compression_rate <= 0:
        raise ValueError(f"min_compression_rate must be above 0, got {min_compression_rate!r}")


def checked_ratio(ratio: object) -> float:
    """Refuse what is no share of the entries."""
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1 (all entries), got {ratio!r}")
    return ratio


def finite(tensor: Tensor) -> Tensor:
    """Whether all numbers are finite, as a tensor: in one pass, without a copy, without asking the device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()


class Reducer(ABC):
    """How a bucket is averaged over the ranks: a frozen dataclass of hyperparameters, and one generator.

    `reduce` yields collectives and returns the mean. It does no I/O, knows no process group, and never reads a value into
    Python, so that the same lines run in DDP's backward, in `simulate` and, on meta tensors, in `predict`. Its memory is in
    `bucket.slots`, written by the function that it returns as `finish`.
    """

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Exchange:
        """Average `bucket.flat` over the group."""

    @classmethod
    def examples(cls) -> Iterator[Self]:
        """Instances worth trying: the law tests and benchmarks run every one of them."""
        yield cls()
