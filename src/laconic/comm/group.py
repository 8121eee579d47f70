"""Groups: through whom collectives are launched, and what becomes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.comm.collectives import Collective, Work

# How long a rank waits for a collective before it asks whether its peers are still there.
POLL_SECONDS = 5.0


class CommunicationError(RuntimeError):
    """A collective failed: a peer has gone, or took longer than the process group's timeout.

    Its message names the collective, its bytes, and among which ranks it was.
    """


def is_lost(error: BaseException) -> bool:
    """Whether it says that a collective failed: torch's backends raise plain RuntimeErrors, or DistErrors."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


class Handle(Protocol):
    """A collective that is outstanding."""

    def wait(self) -> Tensor: ...

    def future(self) -> Future[Tensor]:
        """For those who can't wait."""
        ...

    def when_done(self, call: Callable[[], None]) -> None:
        """Have this called when it is done or has failed, by whatever thread finds out."""
        ...

    def settle(self, seconds: float) -> bool:
        """Wait for the end without caring for the answer; False: it is still outstanding."""
        ...


class Group(Protocol):
    """A process group seen from above. Size and rank are read at every exchange: a later group may change them."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def who(self) -> str:
        """What a person calls its ranks."""
        ...

    def check_peers(self) -> None:
        """Called each time a wait has lasted `POLL_SECONDS`; it may raise to end the wait."""
        ...

    def launch(self, collective: Collective) -> Handle: ...


def _nothing() -> None:
    """Nobody to ask."""


class TorchGroup:
    """A `torch.distributed` process group.

    `check_peers` is called each time a wait has lasted `POLL_SECONDS`; it may raise to end the wait. `places` says where global
    ranks are, where a number says too little.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        check_peers: Callable[[], None] = _nothing,
        places: Mapping[int, str] | None = None,
    ) -> None:
        self.process_group = process_group
        self._check_peers = check_peers
        self.places = places or {}

    @property
    def members(self) -> list[int]:
        """The global ranks, by rank in this group."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def names(self) -> list[str]:
        """What a person calls them: "rank 3", or "rank 3 (island 1, shard 1)"."""
        return [f"rank {rank} ({self.places[rank]})" if rank in self.places else f"rank {rank}" for rank in self.members]

    @property
    def who(self) -> str:
        return ", ".join(self.names) if self.places else f"{self.world} ranks"

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world(self) -> int:
        return self.process_group.size()

    def check_peers(self) -> None:
        self._check_peers()

    def launch(self, collective: Collective) -> Handle:
        work, answer = collective.launch(self.process_group)
        return _TorchHandle(work, collective, answer, self.check_peers)


@dataclass(slots=True)
class _TorchHandle:
    work: Work
    collective: Collective  # keeps what is being sent alive
    answer: Tensor
    check_peers: Callable[[], None]

    def wait(self) -> Tensor:
        if self.answer.device.type != "cpu":
            self.work.wait()  # orders the stream, doesn't block the host: a timeout would have nothing to measure
            return self.answer
        while not self.settle(POLL_SECONDS):
            self.check_peers()
        self.work.wait()
        return self.answer

    def future(self) -> Future[Tensor]:
        answer = self.answer

        def landed(done: Future[Any]) -> Tensor:
            value = done.value()  # raises where the collective failed
            first: Tensor = value[0] if answer.is_sparse else answer
            return first

        return self.work.get_future().then(landed)

    def when_done(self, call: Callable[[], None]) -> None:
        self.work.get_future().add_done_callback(lambda _: call())

    def settle(self, seconds: float) -> bool:
        try:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))  # to torch, zero means for ever
        except RuntimeError:  # too slow, or failed; a failure is raised again by the next wait
            return self.work.is_completed()
        return True
