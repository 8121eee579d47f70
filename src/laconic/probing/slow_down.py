"""How much slower a computation is while a collective runs beside it."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from laconic.comm.collectives import Collective
from laconic.cost.measured import Sample
from laconic.cost.step_timer import now
from laconic.probing.collectives import KINDS, make
from laconic.probing.session import Session

SIDE = 128  # of the matrices: they stay in a core's cache, as those of a step do not; what is measured is the core
LONGEST_SECONDS = 0.1  # of the collective
FEWEST, MOST = 3, 9


def slow_downs(session: Session, samples: Sequence[Sample], sizes: Sequence[int], until: float) -> dict[str, float]:
    """By kind: extra seconds of a computation for each second of a collective beside it, which takes that long when alone.

    All ranks compute at once, as in training. The computation takes twice as long as the collective, so that all of the
    collective's work falls into it. Runs with and without a collective alternate, and medians are compared.
    """
    with one_thread():
        return _slow_downs(session, samples, sizes, until)


def _slow_downs(session: Session, samples: Sequence[Sample], sizes: Sequence[int], until: float) -> dict[str, float]:
    matrix = torch.eye(SIDE, device=session.device)
    one = iteration_seconds(session, matrix)
    found = {}
    for place, kind in enumerate(KINDS):
        left = max(0.0, until - session.now) / (len(KINDS) - place)
        alone = _chosen(samples, kind, sizes, session, left)
        if alone is None:
            continue
        collective, seconds = alone
        iterations = max(1, math.ceil(2 * seconds / one))
        repeats = min(MOST, max(FEWEST, int(left / (5 * seconds))))
        quiet, loaded = [], []
        with session.explained(f"{collective.kind} of {collective.payload_bytes} bytes beside a computation"):
            for _ in range(repeats):
                session.meet()
                quiet.append(computed(matrix, iterations))
                session.meet()
                handle = session.launch(collective, session.group)
                loaded.append(computed(matrix, iterations))
                handle.wait()
        extra = statistics.median(loaded) - statistics.median(quiet)
        rows = session.meet(extra)
        found[kind.__name__] = max(0.0, statistics.mean(row[0] for row in rows) / seconds)
    return found


def _chosen(
    samples: Sequence[Sample], kind: type[Collective], sizes: Sequence[int], session: Session, left: float
) -> tuple[Collective, float] | None:
    """The largest that leaves time for some repeats."""
    world = session.group.world
    alone = {
        each.wire_bytes: each.seconds
        for each in samples
        if (each.kind, each.ranks, each.in_flight) == (kind.__name__, world, 1)
    }
    for size in reversed(sizes):
        seconds = alone.get(make(kind, size, world, torch.device("meta")).traffic(world).wire_bytes)
        if seconds is not None and seconds <= LONGEST_SECONDS and 5 * seconds * FEWEST <= left:
            return make(kind, size, world, session.device), seconds
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """A computation of one thread, as several ranks of a machine have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def iteration_seconds(session: Session, matrix: torch.Tensor) -> float:
    """The slowest rank's, while all of them compute."""
    iterations = 8
    while True:
        session.meet()
        took = max(row[0] for row in session.meet(computed(matrix, iterations)))
        if took > 5e-3:
            return took / iterations
        iterations *= 4


def computed(matrix: torch.Tensor, iterations: int) -> float:
    """Seconds of so many products, on the device on which training computes."""
    start = now()
    result = matrix
    for _ in range(iterations):
        result = result @ matrix
    if matrix.device.type == "cpu":
        return now() - start
    torch.accelerator.current_stream().synchronize()  # this computation alone: the collective is in a stream of its own
    return time.perf_counter() - start


def most_bytes(ranks: int, sizes: Sequence[int]) -> int:
    """That one rank puts on the cable at most."""
    return sum(MOST * make(kind, max(sizes), ranks, torch.device("meta")).traffic(ranks).wire_bytes for kind in KINDS)
