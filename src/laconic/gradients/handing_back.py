"""Handing means back as they arrive: DDP copies the first bucket while the last one is outstanding."""

import threading
import time
import weakref

import torch
from torch import Tensor
from torch.futures import Future

from laconic.comm import group as polling
from laconic.comm.collectives import AllReduce
from laconic.comm.group import CommunicationError, Group, Handle, is_lost
from laconic.comm.ledger import Ledger


def new_future(device: torch.device) -> Future[Tensor]:
    """A future of a tensor on that device."""
    # A future of accelerator tensors must be told the device, so that whoever waits orders its stream behind the result.
    return Future() if device.type == "cpu" else Future(devices=[device])


class HandedBack:
    """The buckets of one backward that need one all-reduce and nothing else; DDP waits for them one by one, by itself.

    DDP waits in C++, where nobody asks whether the peers are still there. So a thread asks, each time the wait has lasted
    `POLL_SECONDS`. If a peer has gone, or a collective has failed, DDP gets what is in the buckets, and `complete` raises.
    """

    def __init__(self, group: Group, ledger: Ledger) -> None:
        self._group, self._ledger = group, ledger
        self._lock = threading.Lock()
        self._sent: list[tuple[Handle, Future[Tensor], Tensor]] = []
        self._arrived = self._waiting_since = 0.0
        self._error: BaseException | None = None

    def launch(self, flat: Tensor) -> Future[Tensor]:
        """Send a bucket. The future never fails."""
        future, collective = new_future(flat.device), AllReduce(flat)
        if not flat.numel():  # nothing to send: not worth a message
            future.set_result(flat)
            return future
        self._ledger.launch(collective, self._group.world)
        try:
            handle = self._group.launch(collective)
        except RuntimeError as error:
            raise self._named(error, flat) from error
        self._sent.append((handle, future, flat))

        def arrived() -> None:
            self._arrived = time.perf_counter()
            self._give(future, flat)

        handle.when_done(arrived)
        return future

    def wait(self) -> None:
        """All buckets have been launched: from now on DDP waits for them."""
        self._arrived = self._waiting_since = time.perf_counter()
        _watch(self)

    def complete(self) -> None:
        """DDP has all its means; raises what ended its wait."""
        since, self._waiting_since = self._waiting_since, 0.0
        # Not kept: a handle leads to its future, that to `arrived`, and that back here.
        sent, self._sent = self._sent, []
        if self._error is not None:
            self._sent = sent  # to be abandoned
            raise self._error
        for handle, _, flat in sent:
            try:
                handle.wait()
            except RuntimeError as error:
                raise self._named(error, flat) from error
        blocking = all(flat.device.type == "cpu" for _, _, flat in sent)
        self._ledger.wait(max(self._arrived - since, 0.0) if blocking else None)

    def abandon(self, seconds: float) -> bool:
        """Forget them; False: one is outstanding even after so long."""
        self._waiting_since = 0.0
        deadline = time.monotonic() + seconds
        settled = [handle.settle(max(deadline - time.monotonic(), 0)) for handle, _, _ in self._sent]
        return all(settled)

    def poll(self) -> None:
        """Ask whether the peers are there, if DDP has waited for long."""
        if not self._waiting_since or time.perf_counter() - self._waiting_since < polling.POLL_SECONDS:
            return
        if all(future.done() for _, future, _ in self._sent):
            return  # the backward goes on below the DDP
        try:
            self._group.check_peers()
        except BaseException as error:  # it is raised by `complete`, in the user's thread
            self._error = error
            for _, future, flat in self._sent:
                self._give(future, flat)

    def _give(self, future: Future[Tensor], flat: Tensor) -> None:
        with self._lock:
            if not future.done():
                future.set_result(flat)

    def _named(self, error: RuntimeError, flat: Tensor) -> RuntimeError:
        if not is_lost(error):
            return error
        return CommunicationError(f"AllReduce of {flat.nbytes} bytes among {self._group.who} failed: {error}")


_watched: "weakref.WeakSet[HandedBack]" = weakref.WeakSet()
_watching = threading.Lock()
_watcher: threading.Thread | None = None


def _watch(one: HandedBack) -> None:
    global _watcher
    with _watching:
        _watched.add(one)
        if _watcher is None or not _watcher.is_alive():  # a fork leaves threads behind
            _watcher = threading.Thread(target=_keep_polling, name="laconic: peers", daemon=True)
            _watcher.start()


def _keep_polling() -> None:
    while True:
        time.sleep(polling.POLL_SECONDS / 4)
        with _watching:
            now = list(_watched)
        for one in now:
            one.poll()
        del now
