"""Collectives: what an exchange yields. Each says itself what it costs, how it is launched and what its answer looks like.

This is the only file that launches collectives, and what bytes they cost is said here and nowhere else. Another kind is one
more class.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic._torch.tensors import sparse_bytes
from laconic.comm.lending import lend

# From so many bytes to one peer on, messages that cross are received first: see `_Crossing`. That costs an all-to-all of marks:
# 0.5 to 1.5 ms without a limit, 2 and 4 ranks on two cores. At 1 gbit, a message of this size takes 8 ms.
CROSSING_BYTES = 1 << 20
TAG = 0x1AC0  # of messages to one peer, apart from tag 0, which is a user's


class Work(Protocol):
    """What is outstanding, to torch: a `dist.Work`, or several as one."""

    def wait(self, timeout: timedelta = ..., /) -> bool: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and collectives of one rank.

    Two of them can be added, and taken from each other.

    Bytes: of `wire_bytes`, for N ranks and M bytes that each hands in: all-reduce 2(N-1)/N * M, all-to-all (N-1)/N * M,
    all-gather (N-1) * M.

    Not: what a backend adds: headers, and more than the least where its algorithm is not the best.

    Arguments:
      `payload_bytes`: bytes that the rank handed to collectives. Default 0.
      `wire_bytes`: the fewest bytes that it must put on the cable for them. Default 0.
      `collectives`: how many there were. Default 0.

    >>> from laconic import Traffic
    >>> Traffic(400, 600, 1) + Traffic(100, 75, 1)
    Traffic(payload_bytes=500, wire_bytes=675, collectives=2)
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
    """One collective: a tensor that this rank hands in, and an answer that comes back.

    A reducer yields them. For another kind, derive a frozen dataclass and write the four abstract methods.

    Arguments:
      `tensor`: what this rank hands in; of the same shape and dtype on all ranks.

    >>> import torch, laconic
    >>> for kind in (laconic.AllReduce, laconic.AllToAll, laconic.AllGather):
    ...     print(kind.__name__, kind(torch.ones(4, 100)).traffic(world=4).wire_bytes)
    AllReduce 2400
    AllToAll 1200
    AllGather 4800
    """

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
        """What it costs one of `world` ranks; a fraction of a byte is rounded up."""
        return Traffic(self.payload_bytes, -(-self.sent(world) // world), 1)

    @abstractmethod
    def sent(self, world: int) -> int:
        """The bytes that all `world` ranks together put on the cable."""

    @abstractmethod
    def blank(self, world: int) -> Tensor:
        """An answer among `world` ranks, of the right shape and no meaning: room for a real one, or that of an empty tensor."""

    @abstractmethod
    def launch(self, group: dist.ProcessGroup) -> tuple[Work, Tensor]:
        """Start it in the process `group`; the answer holds its numbers once the work is done."""

    @abstractmethod
    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The answers of all ranks, out of the `tensors` that they hand in: for runs of all ranks in one process."""


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """Answer: the mean over the group, in the tensor that was handed in.

    Maths: each rank multiplies by 1/N, then all are summed.

    Bytes: 2(N-1)/N * M, for N ranks and a tensor of M bytes.

    Arguments:
      `tensor`: what is averaged; it is overwritten.

    >>> import torch, laconic
    >>> def exchange(rank):
    ...     return (yield laconic.AllReduce(torch.tensor([rank, 10.0])))
    >>> laconic.simulate([exchange(0), exchange(1)])
    [tensor([ 0.5000, 10.0000]), tensor([ 0.5000, 10.0000])]
    """

    def sent(self, world: int) -> int:
        return 2 * (world - 1) * self.payload_bytes

    def blank(self, world: int) -> Tensor:
        return self.tensor

    def launch(self, group: dist.ProcessGroup) -> tuple[Work, Tensor]:
        # 1/N first and by multiplication, as DDP without a hook does: no overflow of the sum, and its very bits.
        answer = self.tensor if group.size() == 1 else self.tensor.mul_(1 / group.size())
        return group.allreduce([lend(answer)]), answer  # `dist.all_reduce` asks more than this call takes

    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            tensor.mul_(1 / len(tensors))
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return [tensor.copy_(total) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """Answer: every rank's tensor, as one of shape (world, *shape).

    Bytes: (N-1) * M, for N ranks and a tensor of M bytes: they grow with N.

    Arguments:
      `tensor`: this rank's row of the answer.

    >>> import torch, laconic
    >>> def exchange(rank):
    ...     return (yield laconic.AllGather(torch.tensor([rank, 10])))
    >>> laconic.simulate([exchange(0), exchange(1)])[0]
    tensor([[ 0, 10],
            [ 1, 10]])
    """

    def sent(self, world: int) -> int:
        return (world - 1) * self.payload_bytes * world

    def blank(self, world: int) -> Tensor:
        return self.tensor.new_empty((world, *self.tensor.shape))

    def launch(self, group: dist.ProcessGroup) -> tuple[Work, Tensor]:
        answer = self.blank(group.size())
        if group.size() == 2 and _crosses(self.tensor, self.payload_bytes):  # a ring of more never sends to whom it hears
            mine, rows = _as_bytes(self.tensor), _as_bytes(answer).view(2, -1)
            return _cross(group, mine.expand(2, -1), rows), answer
        work = dist.all_gather_single(_bytes_of(answer), _bytes_of(self.tensor), group=group, async_op=True)
        return _work(work), answer

    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(tensors)) for _ in tensors]


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """Row r of a (world, n) tensor goes to rank r. Answer: (world, n), where row r came from rank r.

    Bytes: (N-1)/N * M, for N ranks and a tensor of M bytes.

    Arguments:
      `tensor`: as many rows as there are ranks.

    >>> import torch, laconic
    >>> def exchange(rank):
    ...     return (yield laconic.AllToAll(torch.tensor([[10 * rank], [10 * rank + 1]])))
    >>> laconic.simulate([exchange(0), exchange(1)])[1]
    tensor([[ 1],
            [11]])
    """

    def sent(self, world: int) -> int:
        return (world - 1) * self.payload_bytes

    def blank(self, world: int) -> Tensor:
        return torch.empty_like(self.tensor, memory_format=torch.contiguous_format)

    def launch(self, group: dist.ProcessGroup) -> tuple[Work, Tensor]:
        answer, world = self.blank(group.size()), group.size()
        if world > 1 and _crosses(self.tensor, self.payload_bytes // world):
            return _cross(group, _as_bytes(self.tensor).view(world, -1), _as_bytes(answer).view(world, -1)), answer
        work = dist.all_to_all_single(_bytes_of(answer), _bytes_of(self.tensor), group=group, async_op=True)
        return _work(work), answer

    def answers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(len(tensors))]


def _as_bytes(tensor: Tensor) -> Tensor:
    # Gloo refuses int16 and the float8 types, and nothing is computed on the way: so bytes travel as bytes.
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_of(tensor: Tensor) -> Tensor:
    """For a work alone."""
    return lend(_as_bytes(tensor))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def _crosses(tensor: Tensor, message_bytes: int) -> bool:
    # An accelerator's backend has both ways of its own, and hangs on sends and receives that are not grouped.
    return tensor.device.type == "cpu" and message_bytes >= CROSSING_BYTES


# Those that nobody has seen complete: gloo must find their memory when a peer is late, even if this rank has given up.
_outstanding: set["_Crossing"] = set()


@dataclass(frozen=True, slots=True, eq=False)
class _Crossing:
    """Rows to all peers and from all peers, received first; done when the marks that follow the rows have been exchanged.

    A gloo rank sends once its peer has said that it receives. Gloo's all-to-all sends to a peer and then says that it receives
    from it, over the same connection: of two ranks the later one finds its peer ready, and puts its word behind its whole
    message. So the peer begins when that has arrived, and the cable carries one direction at a time: 4 MB between two hosts
    behind 100 mbit took 310 ms, and 175 ms where both ranks say first that they receive.

    Sends and receives alone could not be waited for: in gloo, a wait for one that ends too early ends the whole group, and it
    has no future. Marks have both. One connection keeps the order, so a rank that has its peers' marks has their rows.
    """

    marks: dist.Work
    parts: list[dist.Work]
    tensors: tuple[Tensor, ...]

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        try:
            done = self.marks.wait() if timeout is None else self.marks.wait(timeout)
        except RuntimeError:
            if self.marks.is_completed():
                _outstanding.discard(self)
            raise
        self._collect()
        return done

    def is_completed(self) -> bool:
        return self.marks.is_completed()

    def get_future(self) -> Future[Any]:
        def collect(done: Future[Any]) -> Any:
            _outstanding.discard(self)
            value = done.value()  # raises where the marks failed: then nothing is waited for
            self._collect()
            return value

        return self.marks.get_future().then(collect)

    def _collect(self) -> None:
        _outstanding.discard(self)
        while self.parts:  # once each: gloo would wait for another message
            self.parts.pop().wait()


def _cross(group: dist.ProcessGroup, rows: Tensor, answer: Tensor) -> _Crossing:
    rank, world = group.rank(), group.size()
    peers = [(rank + distance) % world for distance in range(1, world)]  # so that not all send to the same one first
    parts = [_work(dist.irecv(answer[peer], group=group, group_src=peer, tag=TAG)) for peer in reversed(peers)]
    parts += [_work(dist.isend(rows[peer], group=group, group_dst=peer, tag=TAG)) for peer in peers]
    marks = torch.zeros(2, world, dtype=torch.uint8)
    work = _work(dist.all_to_all_single(lend(marks[0]), lend(marks[1]), group=group, async_op=True))
    answer[rank].copy_(rows[rank])
    crossing = _Crossing(work, parts, (rows, answer, marks))
    _outstanding.add(crossing)
    return crossing
