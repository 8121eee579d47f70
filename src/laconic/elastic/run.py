"""What a user holds of an elastic run: a strategy attached to a model, among workers that come and go."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from laconic.comm.group import CommunicationError
from laconic.comm.lending import await_return
from laconic.elastic.island import Island
from laconic.elastic.membership import Membership
from laconic.elastic.metering import Metering
from laconic.elastic.parts import Parts
from laconic.elastic.stats import ElasticStats
from laconic.elastic.sync import Options, Syncs
from laconic.run.arguments import attached
from laconic.run.clock import Clock
from laconic.strategies.strategy import Strategy

log = logging.getLogger("laconic.elastic")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0  # between two tries to join
START_SECONDS = 60.0  # that a run waits for `start_with` workers; it starts with fewer then


class ElasticRun:
    """A strategy attached to a model, among workers that may change; `laconic.elastic.attach` makes it.

    As a context manager, it leaves the others at the end of the block, at once, and has SIGTERM do what `leave` does, where
    Python's default handler was set. A sync that fails is dropped, a warning is logged ("laconic.elastic"), and training goes
    on.

    >>> import torch, laconic.elastic
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.elastic.lighthouse() as address:  # as a rule, in a process of its own
    ...     manager = laconic.elastic.Membership(lighthouse=address)
    ...     with laconic.elastic.attach(model, optimizer, "diloco(2)", manager) as run:
    ...         while run.step < 3:
    ...             model(torch.ones(8, 4)).sum().backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    ...         with run.consensus():
    ...             evaluated = model(torch.ones(1, 4))
    >>> run.step, run.version, run.strategy == laconic.diloco(2)
    (3, 2, True)
    """

    def __init__(self, parts: Parts, membership: Membership, island: Island, options: Options) -> None:
        self._parts, self._membership, self._island, self._options = parts, membership, island, options
        self._clock = Clock(parts.optimizers, parts.scaler, self._after_step)
        self._syncs = Syncs(parts, membership, island, options, self._clock)
        self._ended = False
        self._lent = False  # the parameters are those of the last sync, for a moment
        self._process = os.getpid()
        self._problem = ""  # with the last sync, if it was dropped
        self._handler: Any = None
        self._join()

    # What a user sees

    @property
    def step(self) -> int:
        """Attempted optimizer steps of the run so far: a worker that joins takes over its peers' clock."""
        return self._clock.step

    @property
    def version(self) -> int:
        """How often the run's state has changed by a sync; the same on all who have the same state."""
        return self._syncs.version

    @property
    def strategy(self) -> Strategy:
        """By which it goes, from the start to the end."""
        return self._parts.strategy

    def stats(self) -> ElasticStats:
        """Counts of this worker, since it was attached: see `ElasticStats` for each. Nobody is asked."""
        syncs, ledger = self._syncs, self._parts.ledger
        total = ledger.total + syncs.control.total
        return ElasticStats(
            self._clock.step,
            syncs.version,
            **syncs.counts,
            workers=syncs.names,
            weights=dict(syncs.counted),
            lost_residual_norm=syncs.lost_norm,
            payload_bytes=total.payload_bytes,
            wire_bytes=total.wire_bytes,
            collectives=total.collectives,
            wait_seconds=ledger.wait_seconds,
            quorum_seconds=syncs.metering.quorum_seconds,
        )

    def source(self) -> Metering:
        """What `laconic.Meter(run, folder)` reads."""
        return self._syncs.metering

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside the block, the model is the one that all workers agreed on at their last sync: to evaluate, or to save.

        After it, the parameters are this worker's own again, bit for bit. In an island, all ranks call this. No worker waits
        for another one.

        Bytes: none between workers.

        Memory: a copy of the parameters, as long as the block lasts.

        Not: under a strategy that averages parameters it is a RuntimeError, as no such model is kept; evaluate right after a
        sync, when `version` has changed.
        """
        before, self._lent = self._parts.lend(), True
        try:
            yield
        finally:
            self._lent = False
            self._parts.take_back(before)

    def leave(self) -> None:
        """Say that this worker wants to go: after the next step, it takes part in one more sync, and leaves.

        It hands over what error feedback still holds, waits for that for `leave_seconds` of `attach` at the most, and raises
        SystemExit(0) in `optimizer.step()`. In an island of several ranks, that is at its next sync. SIGTERM does the same.
        """
        self._syncs.leaving = True

    def detach(self) -> None:
        """Go at once, and take everything off; calling it twice is harmless.

        What error feedback holds is lost. The others go on without this worker after their lighthouse has missed its
        heartbeats.
        """
        self._end(None)

    def _end(self, failure: str | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._clock.stop()
        attached.difference_update(self._parts.optimizers)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        self._syncs.metering.ended(failure)
        await_return()
        self._membership.leave()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(f"{type(error).__name__}: {error}" if isinstance(error, Exception) else None)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.leave()
            return
        signal.signal(number, signal.SIG_DFL)  # a process that was forked from this one, such as a DataLoader's
        os.kill(os.getpid(), number)

    # The loop

    def _join(self) -> None:
        """Until there is a state to start from: everybody's at first, or that of a run which is under way."""
        pause, began = FIRST_PAUSE_SECONDS, time.monotonic()
        while self._syncs.version == 0:
            try:
                self._syncs.sync()
            except CommunicationError as error:
                self._syncs.drop(error)
                if time.monotonic() - began > START_SECONDS:
                    self._syncs.start_with = 1
                if time.monotonic() - began > self._membership.quorum_seconds:
                    self.detach()
                    raise
                log.info("%s could not join yet: %s", self._membership.name, error)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except BaseException:
                self.detach()
                raise

    def _after_step(self) -> None:
        if self._lent:
            raise RuntimeError(
                "a step was made inside consensus(), where the model is only lent; leave that block before you train"
            )
        syncs = self._syncs
        syncs.stepped()
        if syncs.leaving:
            self._membership.hurry(self._options.leave_seconds)
            if self._island.size == 1 and not self._parts.outstanding:
                self._go()  # else at the next sync that is due: others wait for what is outstanding
        if self._parts.departures(self._clock.step):
            if self._try(syncs.sync) and syncs.told_to_leave:
                self._gone()
        elif self._parts.outstanding:
            self._try(lambda: syncs.exchange([]))
        syncs.metering.stepped()

    def _try(self, act: Callable[[], None]) -> bool:
        """A sync that fails is dropped, and training goes on."""
        try:
            act()
        except CommunicationError as error:
            self._syncs.drop(error)
            again = str(error) == self._problem  # such as too few workers, sync after sync
            log.log(logging.DEBUG if again else logging.WARNING, "%s, step %d: the sync is dropped: %s",
                    self._membership.name, self._clock.step, error)  # fmt: skip
            self._problem = str(error)
            return False
        self._problem = ""
        return True

    def _go(self) -> NoReturn:
        """Take part in one more sync, and leave."""
        deadline = time.monotonic() + self._options.leave_seconds
        while not self._try(self._syncs.sync) and time.monotonic() < deadline:
            time.sleep(FIRST_PAUSE_SECONDS)
        self._gone()

    def _gone(self) -> NoReturn:
        log.info("%s leaves after step %d", self._membership.name, self._clock.step)
        self.detach()
        raise SystemExit(0)
