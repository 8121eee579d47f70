"""The gradient hook: runs a reducer inside DDP's backward."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic import wire
from laconic.bucket import Bucket, Slot
from laconic.probe import Probe
from laconic.reducers.base import Reducer
from laconic.wire import CommunicationError, Flight, Group, Ledger, Reduced

# A bucket's next round leaves when the DEPTH-th bucket after it arrives. docs/ordering.md has the measurement.
DEPTH = 1


@dataclass(frozen=True)
class _Layout:
    key: tuple[int, ...]  # of which parameters, by id
    names: list[str]
    slots: list[Slot]


@dataclass
class _Airborne:
    flight: Flight[Reduced]
    future: Future[Tensor]
    expected: int  # collectives that this bucket took in the last exchange; 1 as long as nobody knows

    def more(self) -> bool:
        """Whether another collective is known to follow the one in the air."""
        return not self.flight.over and self.flight.launched < self.expected


class GradientHook:
    """Averages DDP's buckets by a reducer: first rounds at once, later rounds in one fixed order.

    A bucket's first collective leaves as soon as DDP has filled the bucket. Its later ones leave from here alone: the next
    when a later bucket arrives, the rest when the last bucket has arrived. Which one leaves when depends on bucket numbers
    only, never on what has landed, so the order is the same on all ranks whatever their speed. No memory is written before
    every bucket has arrived and every exchange is over: a backward that fails half-way leaves nothing behind.

    How many collectives an exchange has is known only when it ends. So each bucket is expected to take as many as in the
    exchange before; in the first exchange of a layout, later rounds wait for the last bucket.
    """

    def __init__(
        self,
        reducer: Reducer,
        group: Group,
        names: Mapping[int, str],
        memory: Mapping[str, Slot],
        ledger: Ledger,
        depth: int = DEPTH,
    ) -> None:
        self.reducer = reducer
        self.group = group  # read at every bucket; changed from outside, between steps
        self.step = 0  # the run's clock, set from outside
        self.scale: Callable[[], float | Tensor] = _one  # what the loss is multiplied by
        self.strategy = ""  # what a person calls it, in errors
        self.rounds = 0
        self.probe = Probe()
        self._names, self._memory, self._ledger = names, memory, ledger
        self._depth = depth
        self._layouts: list[_Layout] = []
        self._expected: list[int] = []
        self._air: list[_Airborne] = []
        self._last = -1  # DDP's number of the bucket that came last

    def use(self, reducer: Reducer, group: Group) -> None:
        """Average by another reducer, or with others, from the next backward on; all ranks together.

        What is expected is forgotten even if nothing is new here: a Release may be new on a rank that holds residuals, and
        not on others, and all ranks must expect alike.
        """
        self.reducer, self.group = reducer, group
        self._expected = [1] * len(self._layouts)

    def layout(self) -> list[list[str]]:
        """Parameter names, bucket by bucket, as of the last backward."""
        return [list(layout.names) for layout in self._layouts]

    def arrive(self, gradients: dist.GradBucket) -> Future[Tensor]:
        """DDP has filled a bucket; the future gets the mean."""
        index = gradients.index()
        if index <= self._last:
            self.settle()  # another backward
        self._last = index
        number = len(self._air)
        try:
            bucket = self._bucket(gradients, number)
            flight = Flight(self.probe.reduce(self.reducer, bucket), self.group, self._ledger)
            future = new_future(bucket.flat.device)
            self._air.append(_Airborne(flight, future, self._expected[number]))
            if gradients.is_last():
                self._finish()
            else:
                self._advance(number)
        except Exception as error:
            self._abandon(0)  # if a collective failed, there is no point in waiting for others of the same group
            where = f"{self.strategy or self.reducer}, step {self.step + 1}, averaging gradients of bucket {index}"
            if isinstance(error, CommunicationError):
                raise CommunicationError(f"{where}: {error}") from error
            error.add_note(f"laconic: {where}")
            raise
        return future

    @property
    def idle(self) -> bool:
        """Whether no bucket is in the air."""
        return not self._air

    def finish(self) -> None:
        """Land what is in the air: no further bucket will come."""
        if self._air:
            self._finish()

    def settle(self) -> None:
        """Forget the exchanges of a backward that never came to its end."""
        if not self._abandon(wire.PATIENCE_SECONDS):
            warnings.warn(
                "a backward failed while collectives were in the air, and a peer never launched its part of them; "
                "destroy the process group before you communicate again",
                stacklevel=2,
            )

    def _abandon(self, seconds: float) -> bool:
        air, self._air = self._air, []
        deadline = time.monotonic() + seconds
        landed = [airborne.flight.abandon(max(deadline - time.monotonic(), 0)) for airborne in air]
        return all(landed)

    def _advance(self, index: int) -> None:
        for earlier in self._air[: max(index - self._depth + 1, 0)][:: -self._depth]:
            if earlier.more():
                earlier.flight.step()

    def _finish(self) -> None:
        behind = self._air
        while behind := [airborne for airborne in behind if airborne.more()]:
            for airborne in behind:
                airborne.flight.step()
        for airborne in self._air:
            airborne.flight.land()
        flights = [airborne.flight for airborne in self._air]
        while flights:
            flights = [flight for flight in flights if flight.step()]
        _share_verdict([airborne.flight.result for airborne in self._air])
        for airborne in self._air:
            airborne.flight.result.finish()
            airborne.future.set_result(airborne.flight.result.mean)
        self._expected = [airborne.flight.launched for airborne in self._air]
        del self._layouts[len(self._air) :]
        self._air, self._last = [], -1
        self.rounds += 1

    def _bucket(self, gradients: dist.GradBucket, number: int) -> Bucket:
        flat = gradients.buffer()
        parameters = gradients.parameters()
        key = tuple(map(id, parameters))
        if number >= len(self._layouts) or self._layouts[number].key != key:
            # DDP rebuilds its buckets once, after the first backward.
            names = [self._names[id(parameter)] for parameter in parameters]
            self._layouts[number:] = [_Layout(key, names, [self._memory[name] for name in names])]
            self._expected[number:] = [1]
        elif gradients.is_last():
            del self._layouts[number + 1 :]
        layout, group = self._layouts[number], self.group
        return Bucket(
            flat,
            gradients.gradients(),
            layout.names,
            layout.slots,
            group.rank,
            group.world,
            self.step,
            self.rounds,
            self.scale(),
        )


def _share_verdict(results: Sequence[Reduced]) -> None:
    """One bucket that is not finite keeps the memory of all as it was."""
    verdicts = [result.good for result in results if result.good is not None]
    if len(verdicts) > 1:
        whole = torch.stack([verdict.to(verdicts[0].device) for verdict in verdicts]).all()
        for verdict in verdicts:
            verdict.copy_(whole)


def _one() -> float:
    return 1.0


def new_future(device: torch.device) -> Future[Tensor]:
    """A future of a tensor on that device."""
    # A future of accelerator tensors must be told the device, so that whoever waits orders its stream behind the result.
    return Future() if device.type == "cpu" else Future(devices=[device])
