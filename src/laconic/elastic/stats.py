"""What an elastic run counts of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ElasticStats:
    """What this worker has done and seen since it was attached.

    `run.stats()` of an `ElasticRun` returns it.

    Fields:
      `steps`: attempted optimizer steps of the run: a worker that joins takes over its peers' clock.
      `version`: how often the state of the run has changed.
      `syncs`: that this worker took part in to the end.
      `dropped`: syncs that came to nothing.
      `healed`: times that this worker took its state from a peer.
      `joined`: workers that it has seen come.
      `lost`: workers that it has seen go without a word.
      `left`: workers that said that they would leave.
      `workers`: the names of those who go on after the last sync.
      `weights`: how much each worker counted in it, by name, 1 on average.
      `lost_residual_norm`: the norm of what error feedback held and nobody will send: that of lost workers as of their last
        sync, and this one's own.
      `payload_bytes`: what this rank handed to collectives, between workers.
      `wire_bytes`: the least that it put on the cable for them: see `Traffic`.
      `collectives`: how many it launched.
      `wait_seconds`: how long the training thread stood still for them. None: not known on this device.
      `quorum_seconds`: how long this worker waited for the others to come together.

    >>> import laconic.elastic
    >>> counts = dict(version=9, syncs=8, dropped=1, healed=0, joined=1, lost=1, left=0)
    >>> sent = dict(payload_bytes=800, wire_bytes=800, collectives=40)
    >>> alike = dict(workers=("a", "b"), weights={"a": 1.0, "b": 1.0})
    >>> rest = dict(wait_seconds=0.1, quorum_seconds=0.2, lost_residual_norm=0.0)
    >>> stats = laconic.elastic.ElasticStats(steps=128, **counts, **alike, **sent, **rest)
    >>> stats.syncs, stats.dropped, stats.workers
    (8, 1, ('a', 'b'))
    """

    steps: int
    version: int
    syncs: int
    dropped: int
    healed: int
    joined: int
    lost: int
    left: int
    workers: tuple[str, ...]
    weights: dict[str, float]
    lost_residual_norm: float
    payload_bytes: int
    wire_bytes: int
    collectives: int
    wait_seconds: float | None
    quorum_seconds: float
