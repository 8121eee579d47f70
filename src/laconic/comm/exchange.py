"""Exchanges: generators that yield collectives.

An exchange yields a collective, is sent the answer, and in the end returns what it worked out:

    def reduce(bucket):
        mean = yield AllReduce(bucket.flat)
        return Reduced(mean)

One collective of an exchange is a round. Whoever holds the generator decides how the rounds happen: `PendingExchange` sends
them through a `Group`, one at a time; `pipeline.py` runs many exchanges in a fixed order; `dryrun.py` runs all ranks in one
process, or one rank on meta tensors.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from torch import Tensor

from laconic.comm.collectives import Collective
from laconic.comm.group import CommunicationError, Group, Handle, is_lost
from laconic.comm.ledger import Ledger

Answer = TypeVar("Answer")
Rounds: TypeAlias = Generator[Collective, Tensor, Answer]


def _nothing() -> None:
    """Nothing to remember, nothing left to do."""


class Reduced(NamedTuple):
    """What a reducer's exchange returns.

    Arguments:
      `mean`: the same bits on every rank of the group; to be read after `finish`.
      `error`: the input minus what the peers decoded from this rank; None: nothing was lost, or nobody asked. Default None.
      `finish`: called once the whole step has arrived and the error has been taken: writes the reducer's memory, and may
        complete the mean, even in the error's place, so that no more than one of the two ever takes room. By default it does
        nothing.
      `good`: whether the mean is finite, a scalar on its device: from a reducer that knows it more cheaply than by looking, or
        whose mean is complete only after `finish`. Before `finish` is called it becomes, in place, whether those of all buckets
        of the step are: a GradScaler skips the step as a whole, and then no memory may have moved. Default None.

    >>> import torch, laconic
    >>> reduced = laconic.Reduced(torch.ones(2))
    >>> reduced.finish()
    >>> reduced.error is None
    True
    """

    mean: Tensor
    error: Tensor | None = None
    finish: Callable[[], None] = _nothing
    good: Tensor | None = None


Exchange: TypeAlias = Rounds[Reduced]
"""What `Reducer.reduce` returns: a generator that yields collectives, is sent their answers, and returns a `Reduced`."""


class PendingExchange(Generic[Answer]):
    """One exchange with its current round outstanding; the first leaves when it is made."""

    def __init__(self, rounds: Rounds[Answer], group: Group, ledger: Ledger) -> None:
        check_generator(rounds)
        self.launched = 0  # rounds so far
        self.over = False
        self._rounds, self._group, self._ledger = rounds, group, ledger
        self._handle: Handle | None = None
        self._answer: Tensor | None = None
        self._result: Answer | None = None
        self._proceed()

    @property
    def result(self) -> Answer:
        assert self.over, "the exchange is not complete yet"
        return cast(Answer, self._result)

    def wait(self) -> None:
        """Wait for the round that is outstanding, and go no further."""
        if self._handle is None:
            return
        start = time.perf_counter()
        with self._explained():
            self._answer = self._handle.wait()
        blocking = self._answer.device.type == "cpu"
        self._ledger.wait(time.perf_counter() - start if blocking else None)
        self._handle = None

    def advance(self) -> bool:
        """Wait for the round that is outstanding and launch the next one; False once `result` is in."""
        if not self.over:
            self.wait()
            self._proceed()
        return not self.over

    def complete(self) -> Answer:
        """Go through all rounds that are left."""
        while self.advance():
            pass
        return self.result

    def abandon(self, seconds: float) -> bool:
        """Forget the exchange; False: its round is outstanding even after so long, as a peer never launched its part."""
        self._rounds.close()
        return self._handle is None or self._handle.settle(seconds)

    def _taken(self) -> Tensor | None:
        """The answer, which nobody keeps from here on: the generator may free what it was sent before the next round."""
        answer, self._answer = self._answer, None
        return answer

    def _proceed(self) -> None:
        began = time.perf_counter()
        try:
            collective = next(self._rounds) if self._answer is None else self._rounds.send(cast(Tensor, self._taken()))
            check_collective(collective, self._rounds)
            while collective.tensor.numel() == 0:  # nothing to send: not worth a message
                collective = self._rounds.send(collective.blank(self._group.world))
        except StopIteration as stop:
            self._result, self.over = stop.value, True
            return
        finally:
            self._ledger.work_seconds += time.perf_counter() - began
        world = self._group.world
        self._ledger.launch(collective, world)
        self._sent = f"{collective.kind} of {collective.payload_bytes} bytes"
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
            raise CommunicationError(f"{self._sent} among {self._group.who} failed: {error}") from error


def checked_reduce(reduce: Callable[[], Exchange], numbers: int, name: str, *, meta: bool) -> Exchange:
    """The exchange that `reduce` makes of a bucket of so many numbers; what is wrong with it is said of `name`.

    `meta`: on tensors without values.
    """
    try:
        rounds = reduce()
        check_generator(rounds, name)
        result = yield from rounds
    except RuntimeError as error:
        if not meta or "meta" not in str(error).lower():
            raise
        raise TypeError(
            f"{name} must not read a value into Python: no .item(), no `if tensor`, no boolean masks. Shapes depend on shapes "
            f"alone: bytes are worked out on meta tensors, which have no values ({error!s:.60})"
        ) from error
    _check_reduced(result, numbers, name)
    return result


def check_generator(rounds: object, name: str = "reduce") -> None:
    """Refuse what yields no collectives: a `reduce` without a `yield` returns at once."""
    if not isinstance(rounds, Generator):
        raise TypeError(
            f"{name} must yield collectives, as in `mean = yield laconic.AllReduce(tensor)`; it yielded nothing, and returned "
            f"{_a(rounds)}"
        )


def check_collective(collective: object, rounds: object) -> None:
    """Refuse what is no collective; `rounds` yielded it."""
    if not isinstance(collective, Collective):
        name = "reduce"
        while rounds is not None:  # of reducers inside of others, the innermost
            if getattr(rounds, "gi_code", None) is checked_reduce.__code__:
                name = rounds.__qualname__  # type: ignore[attr-defined]  # a generator has it
            rounds = getattr(rounds, "gi_yieldfrom", None)
        raise TypeError(f"{name} must yield collectives, such as laconic.AllReduce(tensor), and yielded {_a(collective)}")


def _check_reduced(result: object, numbers: int, name: str) -> None:
    """Refuse what a reducer may not return for a bucket of so many numbers."""
    if not isinstance(result, Reduced):
        raise TypeError(f"{name} must return laconic.Reduced(mean, ...), got {_a(result)}")
    for word, tensor in (("mean", result.mean), ("error", result.error)):
        if not isinstance(tensor, Tensor) and not (word == "error" and tensor is None):
            raise TypeError(f"{name} must return laconic.Reduced(mean, ...) with a tensor as its {word}, got {_a(tensor)}")
        if tensor is not None and tensor.numel() != numbers:
            raise ValueError(f"{name}: the {word} must have as many numbers as the bucket, {numbers}, got {tensor.numel()}")


def _a(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def complete(rounds: Rounds[Answer], group: Group, ledger: Ledger) -> Answer:
    """Run an exchange to its end and return its result."""
    return PendingExchange(rounds, group, ledger).complete()
