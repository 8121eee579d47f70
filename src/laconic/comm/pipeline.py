"""The pipeline: many exchanges, each of several rounds, in one order that is the same on all ranks.

Collectives on one process group must leave in the same order on every rank, or the group hangs or mixes them up. So which
round leaves when depends on numbers that all ranks have alike: how many exchanges were added before, and how many steps have
been made since. It never depends on what has arrived. Where a round must wait for the one before it, the rank waits there.
"""

import time
from collections.abc import Hashable, MutableMapping
from typing import Any

from laconic.comm.exchange import Answer, PendingExchange, Rounds
from laconic.comm.group import Group
from laconic.comm.ledger import Ledger
from laconic.comm.ordering import DEPTH as DEPTH
from laconic.comm.ordering import WINDOW as WINDOW


class Pipeline:
    """Runs the exchanges that are added to it, over one group.

    The first round of an exchange leaves when the exchange is added. A later round leaves

    - with a `depth`: when the exchange `depth` places further on is added;
    - with a `window`: when `window` exchanges are unfinished and another one is added, which completes the oldest first;
    - by `advance(elapsed, delay)`: the i-th of R rounds once i * delay / R steps have elapsed;
    - by `finish`: round by round, in the order of the exchanges.

    How many rounds an exchange has is known only when it ends. `expected` says, by key, how many the exchange of that key
    took the last time, and is kept up to date; an exchange that nobody expects anything of is taken to have one round, and
    its later ones leave with `finish`.
    """

    def __init__(
        self,
        group: Group,
        ledger: Ledger,
        expected: MutableMapping[Hashable, int],
        *,
        depth: int | None = None,
        window: int | None = None,
    ) -> None:
        self._group, self._ledger, self._expected = group, ledger, expected
        self._depth, self._window = depth, window
        self._pending: list[tuple[Hashable, PendingExchange[Any]]] = []

    def add(
        self, key: Hashable, rounds: Rounds[Answer], *, last: bool = False, ledger: Ledger | None = None
    ) -> PendingExchange[Answer]:
        """Launch the first round of an exchange; all ranks add the same exchanges in the same order.

        `last`: no other follows, so that `finish` launches all that is left.
        """
        if self._window is not None and len(self._pending) >= self._window:
            oldest, exchange = self._pending.pop(0)
            exchange.complete()
            self._expected[oldest] = exchange.launched
        added = PendingExchange(rounds, self._group, ledger or self._ledger)
        self._pending.append((key, added))
        if self._depth is not None and not last:
            for place in range(len(self._pending) - 1 - self._depth, -1, -self._depth):
                self._launch_expected(*self._pending[place])
        return added

    def advance(self, elapsed: int, delay: int) -> None:
        """Launch the rounds that are due `elapsed` of `delay` steps after the exchanges were added."""
        for key, exchange in self._pending:
            rounds = max(self._expected.get(key, 1), 1)  # one that had nothing to send had none
            while elapsed >= exchange.launched * delay // rounds and self._launch_expected(key, exchange):
                pass

    def finish(self) -> None:
        """Complete every exchange: the rounds that are expected first, then one after the other, whatever it has left.

        While one is decoded, those behind it travel.
        """
        unfinished = self._pending
        while unfinished := [pending for pending in unfinished if self._launch_expected(*pending)]:
            pass
        unfinished = self._pending
        while unfinished := [(key, exchange) for key, exchange in unfinished if exchange.advance()]:
            pass
        for key, exchange in self._pending:
            self._expected[key] = exchange.launched
        self._pending = []

    def abandon(self, seconds: float) -> bool:
        """Forget all exchanges; False: a round is outstanding even after so long, as a peer never launched its part."""
        deadline = time.monotonic() + seconds
        settled = [exchange.abandon(max(deadline - time.monotonic(), 0)) for _, exchange in self._pending]
        self._pending = []
        return all(settled)

    def _launch_expected(self, key: Hashable, exchange: PendingExchange[Any]) -> bool:
        """Launch the next round of an exchange, if one is expected to follow the one that is outstanding."""
        if exchange.over or exchange.launched >= self._expected.get(key, 1):
            return False
        exchange.advance()
        return True
