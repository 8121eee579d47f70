"""The gradient hook: runs a reducer inside backward, on the buckets of DDP or FSDP2."""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from laconic._torch.tensors import at_end_of_backward, backward_id
from laconic.comm import group as polling
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import PendingExchange, Reduced, Rounds, complete
from laconic.comm.group import CommunicationError, Group, TorchGroup
from laconic.comm.inspection import Inspector
from laconic.comm.ledger import Ledger
from laconic.comm.pipeline import DEPTH, Pipeline
from laconic.gradients.handing_back import HandedBack, new_future
from laconic.reducers.base import Reducer


class Gradients(Protocol):
    """A bucket of gradients that backward has filled; `torch.distributed.GradBucket` is one."""

    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...


@dataclass(frozen=True)
class _Layout:
    key: tuple[int, ...]  # of which parameters, by id
    names: list[str]
    slots: list[Slot]


class _Arrived(NamedTuple):
    """A bucket of the backward that is running."""

    exchange: PendingExchange[Reduced]
    future: Future[Tensor]
    scale: float | Tensor | None  # what the mean is to be multiplied by


class GradientHook:
    """Averages buckets of gradients by a reducer: first rounds at once, later rounds in one fixed order.

    A bucket's first round leaves as soon as backward has filled it. Its later ones leave from the pipeline alone: the next
    when a later bucket arrives, the rest when the last bucket has arrived. Which one leaves when depends on bucket numbers
    only, never on what has arrived, so the order is the same on all ranks whatever their speed. No memory is written before
    every bucket has arrived and every exchange is over: a backward that fails half-way leaves nothing behind.

    How many rounds an exchange has is known only when it ends. So each bucket is expected to take as many as in the exchange
    before; in the first exchange of a layout, later rounds wait for the last bucket.
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
        self.unscaled = False  # ranks may have different loss scales: gradients travel without them
        self.strategy = ""  # what a person calls it, in errors
        self.exchanges = 0  # of all gradients, so far
        self.inspector = Inspector()
        self.fused = False  # compiled kernels may be used
        self.hands_back = False  # whoever calls it waits for each bucket's future by itself, once all have been launched
        self.island: TorchGroup | None = None  # the ranks with the other shards of this replica: they keep memory alike
        self._names, self._memory, self._ledger = names, memory, ledger
        self._depth = depth
        self._layouts: list[_Layout] = []
        self._expected: dict[Hashable, int] = {}  # rounds of each bucket, by its number
        self._pipeline = self._new_pipeline()
        self._arrived: list[_Arrived] = []
        self._last = -1  # the number of the bucket that came last
        self._handed_back: HandedBack | None = None  # the buckets of this backward, if nothing is to be done when they arrive
        self._handed = 0  # how many

    def use(self, reducer: Reducer, group: Group) -> None:
        """Average by another reducer, or with others, from the next backward on; all ranks together.

        What is expected is forgotten even if nothing is new here: a Release may be new on a rank that holds residuals, and
        not on others, and all ranks must expect alike.
        """
        self.reducer, self.group = reducer, group
        self._expected.clear()

    def layout(self) -> list[list[str]]:
        """Parameter names, bucket by bucket, as of the last backward."""
        return [list(layout.names) for layout in self._layouts]

    def arrive(self, gradients: Gradients) -> Future[Tensor]:
        """Backward has filled a bucket; the future gets the mean."""
        index, last = gradients.index(), gradients.is_last()
        if index <= self._last:
            self.settle()  # another backward
        self._last = index
        try:
            if self._may_hand_back():
                return self._hand_back(gradients, last)
            number = len(self._arrived)
            if number == 0:
                self._pipeline = self._new_pipeline()
            bucket = self._bucket(gradients, number)
            rounds = self.inspector.inspect(self.reducer.reduce, bucket)
            exchange = self._pipeline.add(number, rounds, last=last)
            future = new_future(bucket.flat.device)
            scale = self.scale() if self.unscaled else None
            self._arrived.append(_Arrived(exchange, future, scale))
            if last:
                self._finish()
        except Exception as error:
            self._raise(error, f"bucket {index}")
        return future

    def _may_hand_back(self) -> bool:
        """Whether means can be handed back as they arrive: nothing is to be done to them, or to be remembered, then."""
        untouched = self.reducer.is_plain(self.step) and not self.unscaled and not self.inspector.looking
        return self.hands_back and untouched and backward_id() >= 0

    def _hand_back(self, gradients: Gradients, last: bool) -> Future[Tensor]:
        if self._handed_back is None:
            self._handed_back, self._handed = HandedBack(self.group, self._ledger), 0
        self._note_layout(gradients, self._handed, last)
        self._handed += 1
        future = self._handed_back.launch(gradients.buffer())
        if last:
            self._handed_back.wait()
            # DDP queues its own wait when this returns, and this call queues another one behind it.
            at_end_of_backward(lambda: at_end_of_backward(self._complete))
        return future

    def _complete(self) -> None:
        """The backward has ended, and DDP has its means."""
        handed_back = self._handed_back
        if handed_back is None:
            return
        try:
            handed_back.complete()
        except Exception as error:
            self._raise(error, f"{self._handed} buckets")
        self._handed_back = None
        self._end(self._handed)

    def _raise(self, error: Exception, what: str) -> NoReturn:
        """Say where it failed, and forget the exchanges; no memory has moved."""
        self._abandon(0)  # if a collective failed, there is no point in waiting for others of the same group
        where = f"{self.strategy or self.reducer}, step {self.step + 1}, averaging gradients of {what}"
        if isinstance(error, CommunicationError):
            raise CommunicationError(f"{where}: {error}") from error
        error.add_note(f"laconic: {where}")
        raise error

    @property
    def idle(self) -> bool:
        """Whether no bucket is outstanding."""
        return not self._arrived

    def finish(self) -> None:
        """Complete what is outstanding: no further bucket will come."""
        if self._arrived:
            self._finish()

    def settle(self) -> None:
        """Forget the exchanges of a backward that never came to its end."""
        if not self._abandon(polling.POLL_SECONDS):
            warnings.warn(
                "a backward failed while collectives were outstanding, and a peer never launched its part of them; "
                "destroy the process group before you communicate again",
                stacklevel=2,
            )

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self.group, self._ledger, self._expected, depth=self._depth)

    def _abandon(self, seconds: float) -> bool:
        self._arrived, handed_back = [], self._handed_back
        self._handed_back = None
        settled = handed_back is None or handed_back.abandon(seconds)
        return self._pipeline.abandon(seconds) and settled

    def _finish(self) -> None:
        self._pipeline.finish()
        results = [arrived.exchange.result for arrived in self._arrived]
        self._share_verdict(results)
        for arrived, result in zip(self._arrived, results, strict=True):
            result.finish()
            arrived.future.set_result(result.mean if arrived.scale is None else result.mean.mul_(arrived.scale))
        self._end(len(self._arrived))

    def _end(self, buckets: int) -> None:
        del self._layouts[buckets:]
        self._arrived, self._last = [], -1
        self.exchanges += 1

    def _share_verdict(self, results: Sequence[Reduced]) -> None:
        """One bucket that is not finite, on any shard of the replica, keeps the memory of all as it was."""
        verdicts = [result.good for result in results if result.good is not None]
        apart = self.island is not None and bool(self.reducer.all_memory())
        if len(verdicts) < 2 and not apart:
            return
        device = verdicts[0].device if verdicts else self._arrived[0].exchange.result.mean.device
        whole = torch.stack([verdict.to(device) for verdict in verdicts]).all() if verdicts else torch.ones((), device=device)
        if apart:
            assert self.island is not None
            whole = complete(_everywhere(whole), self.island, Ledger())
        for verdict in verdicts:
            verdict.copy_(whole)

    def _note_layout(self, gradients: Gradients, number: int, last: bool) -> None:
        """Which parameters the bucket has. DDP rebuilds its buckets once, after the first backward."""
        parameters = gradients.parameters()
        key = tuple(map(id, parameters))
        if number >= len(self._layouts) or self._layouts[number].key != key:
            if any(id(parameter) not in self._names for parameter in parameters):
                raise RuntimeError(
                    "a parameter was replaced after attach, as load_state_dict(assign=True) and to_empty do; attach again"
                )
            names = [self._names[id(parameter)] for parameter in parameters]
            self._layouts[number:] = [_Layout(key, names, [self._memory[name] for name in names])]
            for later in [known for known in self._expected if isinstance(known, int) and known >= number]:
                del self._expected[later]
        elif last:
            del self._layouts[number + 1 :]

    def _bucket(self, gradients: Gradients, number: int) -> Bucket:
        flat = gradients.buffer()
        self._note_layout(gradients, number, gradients.is_last())
        layout, group = self._layouts[number], self.group
        if self.unscaled:
            flat.div_(self.scale())
        return Bucket(
            flat,
            gradients.gradients(),
            layout.names,
            layout.slots,
            group.rank,
            group.world,
            self.step,
            self.exchanges,
            1.0 if self.unscaled else self.scale(),
            fused=self.fused,
        )


def _everywhere(verdict: Tensor) -> Rounds[Tensor]:
    """Whether it is good on all ranks, as a tensor: nobody asks the device."""
    return (yield AllGather(verdict.to(torch.uint8).view(1))).amin()


def _one() -> float:
    return 1.0
