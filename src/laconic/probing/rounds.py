"""How long a small round takes in a loop that computes, as training has it."""

import statistics

import torch

from laconic.cost.step_timer import now
from laconic.probing.collectives import KINDS, make
from laconic.probing.session import Session
from laconic.probing.slow_down import computed, iteration_seconds, one_thread

COMPUTE_SECONDS, ROUNDS = 5e-3, 2  # between two meetings: so long a computation, then so many rounds, one after the other
SIZE = 1 << 10  # bytes that a rank hands in
LOOP, FEWEST, MOST = 8, 2, 10  # meetings in a loop; loops of each kind


def round_seconds(session: Session, until: float) -> dict[str, float]:
    """By kind: the seconds by which a small round makes such a loop longer.

    It is more than a round takes in a tight loop. Threads that have slept must be woken, cores are busy, and the slowest rank
    is waited for. Means are compared, not medians: where processes share cores, a few rounds take as long as a time slice,
    and training pays for those, too.
    """
    found = {}
    with one_thread(), session.explained("small rounds between computations"):
        matrix = torch.eye(128, device=session.device)
        iterations = max(1, round(COMPUTE_SECONDS / iteration_seconds(session, matrix)))
        for place, kind in enumerate(KINDS):
            end = session.now + max(0.0, until - session.now) / (len(KINDS) - place)
            collective = make(kind, SIZE, session.group.world, session.device)
            quiet: list[float] = []
            loaded: list[float] = []
            while len(loaded) < FEWEST or (len(loaded) < MOST and session.now < end):
                for rows, rounds in ((quiet, 0), (loaded, ROUNDS)):
                    session.meet()
                    began = now()
                    for _ in range(LOOP):
                        computed(matrix, iterations)
                        for _ in range(rounds):
                            session.launch(collective, session.group).wait()
                    rows.append(now() - began)
            extra = (statistics.fmean(loaded) - statistics.fmean(quiet)) / (LOOP * ROUNDS)
            found[kind.__name__] = max(0.0, statistics.fmean(row[0] for row in session.meet(extra)))
    return found


def most_bytes(ranks: int) -> int:
    """That one rank puts on the cable at most."""
    return sum(MOST * LOOP * ROUNDS * make(kind, SIZE, ranks, torch.device("meta")).traffic(ranks).wire_bytes for kind in KINDS)
