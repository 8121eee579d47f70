"""What a user holds of an elastic run: a strategy attached to a model, among workers that come and go."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from laconic.comm.group import CommunicationError
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


class ElasticRun:
    """A strategy attached to a model, among workers that may change; made by `laconic.elastic.attach`."""

    def __init__(self, parts: Parts, membership: Membership, island: Island, options: Options) -> None:
        self._parts, self._membership, self._island, self._options = parts, membership, island, options
        self._clock = Clock(parts.optimizers, parts.scaler, self._after_step)
        self._syncs = Syncs(parts, membership, island, options, self._clock)
        self._ended = False
        self._handler: Any = None
        self._join()

    # What a user sees

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far."""
        return self._clock.step

    @property
    def version(self) -> int:
        """Syncs so far that changed the state."""
        return self._syncs.version

    @property
    def strategy(self) -> Strategy:
        """What it goes by."""
        return self._parts.strategy

    def stats(self) -> ElasticStats:
        """Counts of this worker, since it was attached."""
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
        """Inside, the model is the one that all workers agreed on at their last sync: to evaluate, or to save.

        A strategy that averages parameters keeps no such model; under it, evaluate right after a sync, when `version` has
        changed. In an island, all ranks call this. No worker waits for another one.
        """
        before = self._parts.lend()
        try:
            yield
        finally:
            self._parts.take_back(before)

    def leave(self) -> None:
        """Take part in the next sync, hand over what error feedback still holds, and go. Raises SystemExit(0) after it.

        SIGTERM does the same after the step that is being made; in an island of several ranks, at its next sync.
        """
        self._syncs.leaving = True

    def detach(self) -> None:
        """Go at once: the others go on without this worker after their lighthouse has missed its heartbeats."""
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
        self._membership.leave()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(f"{type(error).__name__}: {error}" if isinstance(error, Exception) else None)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.leave()

    # The loop

    def _join(self) -> None:
        """Until there is a state to start from: everybody's at first, or that of a run which is under way."""
        pause, began = FIRST_PAUSE_SECONDS, time.monotonic()
        while self._syncs.version == 0:
            try:
                self._syncs.sync()
            except CommunicationError as error:
                self._syncs.drop(error)
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
        syncs = self._syncs
        syncs.stepped()
        if syncs.leaving and self._island.size == 1:
            self._go()
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
            log.warning("%s, step %d: the sync is dropped: %s", self._membership.name, self._clock.step, error)
            return False
        return True

    def _go(self) -> NoReturn:
        """Take part in one more sync, and leave."""
        deadline = time.monotonic() + self._options.leave_seconds
        self._membership.hurry(self._options.leave_seconds)
        while not self._try(self._syncs.sync) and time.monotonic() < deadline:
            time.sleep(FIRST_PAUSE_SECONDS)
        self._gone()

    def _gone(self) -> NoReturn:
        log.info("%s leaves after step %d", self._membership.name, self._clock.step)
        self.detach()
        raise SystemExit(0)
