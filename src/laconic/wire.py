"""The wire: collectives, the exchanges made of them, and the drivers that run them.

An exchange is a generator. It yields a collective, is sent the answer, and in the end returns what it worked out:

    def reduce(bucket):
        mean = yield AllReduce(bucket.flat)
        return Reduced(mean)

Whoever holds the generator decides how the collectives happen. Here, `Flight` sends them through a `Group`; `dryrun.py`
runs all ranks in one process, or one rank on meta tensors. This is the only file that launches collectives, and what bytes
they cost is said here and nowhere else.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

# How long a rank waits for a collective before it asks whether a peer is still there.
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Answer: the mean over the group, in the tensor that was handed in. Each rank multiplies by 1/N, then all are summed."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class AllGather:
    """Answer: every rank's tensor, as one of shape (world, *shape)."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Row r of a (world, n) tensor goes to rank r. Answer: (world, n), where row r came from rank r."""

    tensor: Tensor


Collective: TypeAlias = AllReduce | AllGather | AllToAll
Answer = TypeVar("Answer")
Rounds: TypeAlias = Generator[Collective, Tensor, Answer]


def _nothing() -> None:
    """Nothing to remember, nothing left to do."""


class Reduced(NamedTuple):
    """What a reducer's exchange returns."""

    mean: Tensor  # the same bits on every rank of the group; to be read after `finish`
    error: Tensor | None = None  # input - what the peers decoded from this rank; None: nothing was lost, or nobody asked
    # Called once the whole step has landed and the error has been taken: writes the reducer's memory, and may complete the
    # mean, even in the error's place, so that no more than one of the two ever takes room.
    finish: Callable[[], None] = _nothing
    # Whether the mean is finite, a scalar on its device: from a reducer that knows it more cheaply than by looking, or whose
    # mean is complete only after `finish`. Before `finish` is called it becomes, in place, whether those of all buckets
    # of the step are: a GradScaler skips the step as a whole, and then no memory may have moved.
    good: Tensor | None = None


Exchange: TypeAlias = Rounds[Reduced]


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


def traffic(collective: Collective, world: int) -> Traffic:
    """What one collective costs one rank; a fraction of a byte is rounded up."""
    payload = _nbytes(collective.tensor)
    match collective:
        case AllReduce():
            sent = 2 * (world - 1) * payload
        case AllToAll():
            sent = (world - 1) * payload
        case AllGather():
            sent = (world - 1) * payload * world
    return Traffic(payload, -(-sent // world), 1)


def _nbytes(tensor: Tensor) -> int:
    # A sparse tensor has indices and values, and may have entries twice.
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


@dataclass
class Ledger:
    """Counts every collective: totals alone, so that it takes the same room after a step and after a million."""

    kinds: dict[str, Traffic] = field(default_factory=dict)  # by kind of collective
    wait_seconds: float | None = 0.0  # time the thread stood still; None: unknown, because waiting doesn't block the host there
    work_seconds: float = 0.0  # in which exchanges encoded and decoded, on the host

    @property
    def total(self) -> Traffic:
        return sum(self.kinds.values(), Traffic())

    def launch(self, collective: Collective, world: int) -> None:
        """A collective leaves."""
        kind = type(collective).__name__
        self.kinds[kind] = self.kinds.get(kind, Traffic()) + traffic(collective, world)

    def wait(self, seconds: float | None) -> None:
        """The thread stood still so long for one; None: nobody knows."""
        if seconds is None or self.wait_seconds is None:
            self.wait_seconds = None
        else:
            self.wait_seconds += seconds


class CommunicationError(RuntimeError):
    """A collective failed: a peer has gone, or took longer than the process group's timeout."""


def is_lost(error: BaseException) -> bool:
    """Whether it says that a collective failed: torch's backends raise plain RuntimeErrors, or DistErrors."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


class Handle(Protocol):
    """A collective in the air."""

    def wait(self) -> Tensor: ...

    def future(self) -> Future[Tensor]:
        """For those who can't wait."""
        ...

    def settle(self, seconds: float) -> bool:
        """Wait for the end without caring for the answer; False: it is still in the air."""
        ...


class Group(Protocol):
    """A process group seen from above. Size and rank are read at every exchange: a later group may change them."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def launch(self, collective: Collective) -> Handle: ...


class TorchGroup:
    """A `torch.distributed` process group.

    `worry` is called each time a wait has lasted `PATIENCE_SECONDS`; it may raise to end the wait.
    """

    def __init__(self, process_group: dist.ProcessGroup, worry: Callable[[], None] = _nothing) -> None:
        self.process_group = process_group
        self.worry = worry

    @property
    def members(self) -> list[int]:
        """The global ranks, by rank in this group: what a person calls them."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world(self) -> int:
        return self.process_group.size()

    def launch(self, collective: Collective) -> Handle:
        tensor, group = collective.tensor, self.process_group
        match collective:
            case AllReduce():
                # 1/N first and by multiplication, as DDP without a hook does: no overflow of the sum, and its very bits.
                answer = tensor.mul_(1 / self.world)
                work = dist.all_reduce(answer, group=group, async_op=True)
            case AllGather():
                answer = blank(collective, self.world)
                work = dist.all_gather_single(_as_bytes(answer), _as_bytes(tensor), group=group, async_op=True)
            case AllToAll():
                answer = blank(collective, self.world)
                work = dist.all_to_all_single(_as_bytes(answer), _as_bytes(tensor), group=group, async_op=True)
        return _TorchHandle(work, collective, answer, self.worry)


@dataclass(slots=True)
class _TorchHandle:
    work: dist.Work
    collective: Collective  # keeps what is being sent alive
    answer: Tensor
    worry: Callable[[], None]

    def wait(self) -> Tensor:
        if self.answer.device.type != "cpu":
            self.work.wait()  # orders the stream, doesn't block the host: a timeout would have nothing to measure
            return self.answer
        while not self.settle(PATIENCE_SECONDS):
            self.worry()
        self.work.wait()
        return self.answer

    def future(self) -> Future[Tensor]:
        answer = self.answer
        return self.work.get_future().then(lambda done: done.value()[0] if answer.is_sparse else answer)

    def settle(self, seconds: float) -> bool:
        try:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))  # to torch, zero means for ever
        except RuntimeError:  # too slow, or failed; a failure is raised again by the next wait
            return self.work.is_completed()
        return True


def blank(collective: Collective, world: int) -> Tensor:
    """An answer of the right shape and no meaning: room for a real one, the meta one, the one of an empty tensor."""
    tensor = collective.tensor
    match collective:
        case AllReduce():
            return tensor
        case AllToAll():
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        case AllGather():
            return tensor.new_empty((world, *tensor.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    # Gloo refuses int16 and the float8 types, and nothing is computed on the way: so bytes travel as bytes.
    return tensor.contiguous().view(-1).view(torch.uint8)


class Flight(Generic[Answer]):
    """One exchange with its current collective in the air."""

    def __init__(self, rounds: Rounds[Answer], group: Group, ledger: Ledger) -> None:
        self.launched = 0
        self.over = False
        self._rounds, self._group, self._ledger = rounds, group, ledger
        self._handle: Handle | None = None
        self._answer: Tensor | None = None
        self._result: Answer | None = None
        self._proceed(None)

    @property
    def result(self) -> Answer:
        assert self.over, "the exchange has not landed yet"
        return cast(Answer, self._result)

    def land(self) -> None:
        """Wait for the collective in the air, and go no further."""
        if self._handle is None:
            return
        start = time.perf_counter()
        with self._explained():
            self._answer = self._handle.wait()
        blocking = self._answer.device.type == "cpu"
        self._ledger.wait(time.perf_counter() - start if blocking else None)
        self._handle = None

    def step(self) -> bool:
        """Land the collective in the air and launch the next one; False once `result` is in."""
        if not self.over:
            self.land()
            self._proceed(self._answer)
        return not self.over

    def complete(self) -> Answer:
        """Go through all rounds that are left."""
        while self.step():
            pass
        return self.result

    def abandon(self, seconds: float) -> bool:
        """Forget the exchange; False: its collective is in the air even after so long, as a peer never launched its part."""
        self._rounds.close()
        return self._handle is None or self._handle.settle(seconds)

    def _proceed(self, answer: Tensor | None) -> None:
        self._answer = None  # the generator may now free what it was sent
        began = time.perf_counter()
        try:
            collective = next(self._rounds) if answer is None else self._rounds.send(answer)
            while collective.tensor.numel() == 0:  # nothing to say: not worth a message
                collective = self._rounds.send(blank(collective, self._group.world))
        except StopIteration as stop:
            self._result, self.over = stop.value, True
            return
        finally:
            self._ledger.work_seconds += time.perf_counter() - began
        self._ledger.launch(collective, self._group.world)
        self._sent = f"{type(collective).__name__} of {_nbytes(collective.tensor)} bytes among {self._group.world} ranks"
        with self._explained():
            self._handle = self._group.launch(collective)
        self.launched += 1

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise CommunicationError(f"{self._sent} failed: {error}") from error


def land(rounds: Rounds[Answer], group: Group, ledger: Ledger) -> Answer:
    """Run an exchange to its end and return its result."""
    return Flight(rounds, group, ledger).complete()
