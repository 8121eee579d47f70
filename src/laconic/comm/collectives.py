"""Collectives: what an exchange yields. Each says itself what it costs, how it is launched and what its answer looks like.

This is the only file that launches collectives, and what bytes they cost is said here and nowhere else. Another kind is one
more class.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._torch.tensors import sparse_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and collectives of one rank.

    `payload_bytes` is what the rank handed to collectives, `wire_bytes` the least that it must put on the cable for them:
    all-reduce 2(N-1)/N * M, all-to-all (N-1)/N * M, all-gather (N-1) * m.
    """

    payload_bytes: int = 0
    wire_bytes: int = 0
    collectives: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
            self.collectives + other.collectives,
        )

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.payload_bytes - other.payload_bytes,
            self.wire_bytes - other.wire_bytes,
            self.collectives - other.collectives,
        )


@dataclass(frozen=True, slots=True)
class Collective(ABC):
    """One collective: a tensor that this rank hands in, and an answer that comes back."""

    tensor: Tensor

    @property
    def kind(self) -> str:
        """What a person calls it."""
        return type(self).__name__

    @property
    def payload_bytes(self) -> int:
        """Bytes that this rank hands in."""
        return sparse_bytes(self.tensor) if self.tensor.is_sparse else self.tensor.nbytes

    def traffic(self, world: int) -> Traffic:
        """What it costs one rank; a fraction of a byte is rounded up."""
        return Traffic(self.payload_bytes, -(-self.sent(world) // world), 1)

    @abstractmethod
    def sent(self, world: int) -> int:
        """The bytes that all `world` ranks together put on the cable."""

    @abstractmethod
    def blank(self, world: int) -> Tensor:
        """An answer of the right shape and no meaning: room for a real one, the meta one, the one of an empty tensor."""

    @abstractmethod
    def launch(self, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        """Start it; the answer holds its numbers once the work is done."""

    @abstractmethod
    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The answers of all ranks, out of what they hand in: for runs of all ranks in one process."""


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """Answer: the mean over the group, in the tensor that was handed in. Each rank multiplies by 1/N, then all are summed."""

    def sent(self, world: int) -> int:
        return 2 * (world - 1) * self.payload_bytes

    def blank(self, world: int) -> Tensor:
        return self.tensor

    def launch(self, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        # 1/N first and by multiplication, as DDP without a hook does: no overflow of the sum, and its very bits.
        answer = self.tensor.mul_(1 / group.size())
        return _work(dist.all_reduce(answer, group=group, async_op=True)), answer

    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            tensor.mul_(1 / len(tensors))
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return [tensor.copy_(total) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """Answer: every rank's tensor, as one of shape (world, *shape)."""

    def sent(self, world: int) -> int:
        return (world - 1) * self.payload_bytes * world

    def blank(self, world: int) -> Tensor:
        return self.tensor.new_empty((world, *self.tensor.shape))

    def launch(self, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        answer = self.blank(group.size())
        work = dist.all_gather_single(_as_bytes(answer), _as_bytes(self.tensor), group=group, async_op=True)
        return _work(work), answer

    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors)) for _ in tensors]


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """Row r of a (world, n) tensor goes to rank r. Answer: (world, n), where row r came from rank r."""

    def sent(self, world: int) -> int:
        return (world - 1) * self.payload_bytes

    def blank(self, world: int) -> Tensor:
        return torch.empty_like(self.tensor, memory_format=torch.contiguous_format)

    def launch(self, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        answer = self.blank(group.size())
        work = dist.all_to_all_single(_as_bytes(answer), _as_bytes(self.tensor), group=group, async_op=True)
        return _work(work), answer

    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(len(tensors))]


def _as_bytes(tensor: Tensor) -> Tensor:
    # Gloo refuses int16 and the float8 types, and nothing is computed on the way: so bytes travel as bytes.
    return tensor.contiguous().view(-1).view(torch.uint8)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
