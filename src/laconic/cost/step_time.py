"""How long a step takes under a strategy: a small simulation of one worker's training thread and its cable.

The training thread computes, encodes and decodes; collectives travel on the cable meanwhile, and the thread waits where a run
waits. Which round leaves when is the pipeline's rule (`comm/pipeline.py`): in backward, a bucket's next round leaves when a
later bucket is ready; between steps, a few exchanges are outstanding at a time; outstanding fragments send their rounds at
fixed steps.

Workers are not equally fast in every step. A round begins when the slowest of them launches it. Since they last waited for
each other, they have come apart by sqrt(steps) * jitter, and the slowest of N is so many standard deviations behind as the
largest of N normal numbers is above their mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import NamedTuple, Protocol

from laconic.comm.ordering import DEPTH, WINDOW
from laconic.cost.network import Cable, Network

CYCLES = 3  # until a strategy's cycle repeats itself: what is outstanding at its start is what its end leaves


class Round(Protocol):
    """One collective: `laconic.comm.dryrun.Round`."""

    @property
    def kind(self) -> str: ...
    @property
    def wire_bytes(self) -> float: ...
    @property
    def world(self) -> int: ...


@dataclass(frozen=True)
class Exchange:
    """One exchange: its rounds, and the seconds of work before each of them and after the last."""

    rounds: Sequence[Round]
    work: Sequence[float]  # one more than rounds
    numbers: int = 0


@dataclass(frozen=True)
class Step:
    """What leaves in a step: in backward by bucket, after it, and after it without being waited for until `delay` steps on."""

    in_backward: Sequence[Exchange] = ()
    after: Sequence[Exchange] = ()
    outstanding: Sequence[Exchange] = ()
    delay: int = 0
    work: float = 0.0  # seconds of work around a sync that belong to no exchange


@dataclass(frozen=True)
class Compute:
    """Seconds of a step without any communication, in its three parts.

    `jitter` is by how much a step's seconds differ from worker to worker: their standard deviation.
    """

    forward: float
    backward: float
    optimizer: float = 0.0
    jitter: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.optimizer

    @classmethod
    def of(cls, seconds: float) -> "Compute":
        """A step of which only the whole is known: a backward takes about twice as long as a forward."""
        return cls(seconds / 3, seconds * 2 / 3)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on average over a cycle of the strategy."""

    compute: float
    work: float  # encoding and decoding, and what the hosts' work on collectives takes from training
    waiting: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.work + self.waiting

    @property
    def share(self) -> float:
        """Of the rate without communication."""
        return self.compute / self.seconds if self.seconds else 1.0


class Event(NamedTuple):
    """What the training thread or the cable does for a while; in seconds since the first of all cycles began.

    `what` is "forward", "backward", "optimizer", "work" or "waiting" of the thread, which does one after the other, and "wire"
    of the cable: one round.
    """

    what: str
    begin: float
    end: float
    wire_bytes: float = 0.0


def step_time(
    steps: Sequence[Step], compute: Compute, network: Network, *, cycles: int = CYCLES, trace: list[Event] | None = None
) -> StepTime:
    """On average over `steps`, which repeat; of the last of so many `cycles`. All that happens in them is added to `trace`.

    >>> from laconic.cost.link import Link
    >>> step_time([Step()], Compute.of(0.3), Network(Link(8_000_000))).share
    1.0
    """
    thread = _Thread(network, trace)
    worked = waited = 0.0
    for cycle in range(cycles):
        if cycle == cycles - 1:
            worked, waited = thread.worked, thread.waited
        for step in steps:
            thread.step(step, compute)
    return StepTime(compute.seconds, (thread.worked - worked) / len(steps), (thread.waited - waited) / len(steps))


@cache
def slowest_of(workers: int) -> float:
    """By how many standard deviations the slowest of so many workers is behind their mean (Blom 1958), if they are normal.

    >>> [round(slowest_of(workers), 2) for workers in (1, 2, 4, 64)]
    [0.0, 0.59, 1.05, 2.34]
    """
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


class _Pending:
    """An exchange whose round is on the cable."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.launched, self.over_at = exchange, 0, 0.0

    @property
    def finished(self) -> bool:
        return self.launched > len(self.exchange.rounds)


class _Thread:
    """The training thread of one worker, and its cable."""

    def __init__(self, network: Network, trace: list[Event] | None = None) -> None:
        self.now = self.worked = self.waited = 0.0
        self._network, self._cable, self._trace = network, Cable(network), trace
        self._count = 0
        self._apart = 0.0  # how far workers are apart since they waited for each other: the variance, in seconds squared
        self._outstanding: list[tuple[int, int, list[_Pending]]] = []  # when they left, how many steps they have, and what

    def step(self, step: Step, compute: Compute) -> None:
        self._apart += compute.jitter**2
        self._spend("forward", compute.forward)
        self._backward(step.in_backward, compute.backward)
        self._spend("optimizer", compute.optimizer)
        self._count += 1
        self._work(step.work)
        self._send_on()
        if step.outstanding:
            pending = [_Pending(exchange) for exchange in step.outstanding]
            for one in pending:
                self._advance(one, hidden=True)
            self._outstanding.append((self._count, step.delay, pending))
        self._after(step.after)

    def _backward(self, exchanges: Sequence[Exchange], seconds: float) -> None:
        """Buckets become ready over backward, by how many numbers they have."""
        numbers = sum(exchange.numbers for exchange in exchanges) or 1
        pending: list[_Pending] = []
        for place, exchange in enumerate(exchanges):
            self._spend("backward", seconds * exchange.numbers / numbers)
            last = place == len(exchanges) - 1
            pending.append(_Pending(exchange))
            self._advance(pending[-1], hidden=not last)
            if not last:
                for earlier in range(place - DEPTH, -1, -DEPTH):
                    self._advance(pending[earlier], hidden=True)
        if not exchanges:
            self._spend("backward", seconds)
        self._finish(pending)

    def _after(self, exchanges: Sequence[Exchange]) -> None:
        pending: list[_Pending] = []
        for exchange in exchanges:
            if len(pending) >= WINDOW:
                self._finish([pending.pop(0)])
            pending.append(_Pending(exchange))
            self._advance(pending[-1])
        self._finish(pending)

    def _send_on(self) -> None:
        """Outstanding exchanges: the i-th of R rounds leaves once i * delay / R steps have passed; the end is at `delay`."""
        for left, delay, pending in list(self._outstanding):
            elapsed = self._count - left
            if elapsed >= delay:
                self._finish(pending)
                self._outstanding.remove((left, delay, pending))
                continue
            for one in pending:
                rounds = len(one.exchange.rounds)
                while one.launched < rounds and elapsed >= one.launched * delay // rounds:
                    self._advance(one, hidden=True)

    def _finish(self, pending: Sequence[_Pending]) -> None:
        """Round by round, in the order of the exchanges."""
        while unfinished := [one for one in pending if not one.finished]:
            for one in unfinished:
                self._advance(one)

    def _advance(self, one: _Pending, *, hidden: bool = False) -> None:
        """Wait for the round that is on the cable, do the work behind it, and launch the next one if there is one."""
        if one.finished:
            return
        if one.over_at > self.now:
            self.waited += one.over_at - self.now
            self._note("waiting", self.now, one.over_at)
            self.now, self._apart = one.over_at, 0.0
        rounds = one.exchange.rounds
        self._work(one.exchange.work[one.launched])
        if one.launched < len(rounds):
            round_ = rounds[one.launched]
            slowest = self.now + math.sqrt(self._apart) * slowest_of(round_.world)
            begin = max(slowest, self._cable.free_at)
            one.over_at = self._cable.launch(slowest, round_.kind, round_.wire_bytes, round_.world)
            self._note("wire", begin, one.over_at, round_.wire_bytes)
            if hidden:  # the hosts' work on it takes time from training
                host = self._network.host_seconds(round_.kind, round_.wire_bytes, round_.world)
                self._work(self._network.slow_down * host)
        one.launched += 1

    def _work(self, seconds: float) -> None:
        self.worked += seconds
        self._spend("work", seconds)

    def _spend(self, what: str, seconds: float) -> None:
        self._note(what, self.now, self.now + seconds)
        self.now += seconds

    def _note(self, what: str, begin: float, end: float, wire_bytes: float = 0.0) -> None:
        if self._trace is not None and end > begin:
            self._trace.append(Event(what, begin, end, wire_bytes))
