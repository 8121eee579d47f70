"""What an elastic run counts of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticStats:
    """What this worker has done and seen since it was attached."""

    steps: int  # of the run: a worker that joins takes over its peers' clock
    version: int  # how often the state of the run has changed
    syncs: int  # that this worker took part in to the end
    dropped: int  # that came to nothing
    healed: int  # times that this worker took its state from a peer
    joined: int  # workers that it has seen come
    lost: int  # workers that it has seen go without a word
    left: int  # workers that said that they would leave
    workers: tuple[str, ...]  # who goes on after the last sync
    weights: dict[str, float]  # how much each worker counted in it, 1 on average
    # Of what error feedback held and nobody will send: that of lost workers as of their last sync, and this one's own.
    lost_residual_norm: float
    payload_bytes: int
    wire_bytes: int
    collectives: int
    wait_seconds: float | None
    quorum_seconds: float  # in which this worker waited for the others to come together
