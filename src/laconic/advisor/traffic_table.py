"""What each method sends, takes and keeps per number of a bucket. Written by `python -m laconic.advisor.tabulate`."""

from typing import NamedTuple


class Method(NamedTuple):
    """A way to average a bucket of n numbers among N workers.

    - `rounds`: kinds of collectives, each with its bytes per number: a worker puts bytes * n * (N - 1) / N on its cable.
    - `passes`: work before each round and after the last, in copies of the bucket: a snapshot of one machine's CPU.
    - `kept`: numbers that a rank keeps for each number of the bucket.
    - `rank`: of a low-rank method, whose bytes go by rows and columns; else 0.
    """

    rounds: tuple[tuple[str, float], ...]
    passes: tuple[float, ...]
    kept: float
    rank: int = 0


METHODS = {
    "Exact()": Method((("AllReduce", 8.0),), (0.0, 0.01), 0.0),
    "Cast('bf16')": Method((("AllToAll", 2.0), ("AllGather", 2.0)), (1.31, 2.52, 0.93), 0.0),
    "Quantized(8)": Method((("AllToAll", 1.0078), ("AllGather", 1.0078)), (4.79, 3.45, 2.22), 0.0),
    "ErrorFeedback(Quantized(4))": Method((("AllToAll", 0.5312), ("AllGather", 0.5312)), (10.63, 8.5, 7.59), 1.0),
    "Momentum(ErrorFeedback(Quantized(2)))": Method((("AllToAll", 0.2656), ("AllGather", 0.2656)), (13.68, 7.11, 33.41), 2.0),
    "ErrorFeedback(PowerSGD(32))": Method((("AllReduce", 0.0), ("AllReduce", 0.0)), (7.92, 13.24, 9.98), 1.02, 32),
    "ErrorFeedback(PowerSGD(16))": Method((("AllReduce", 0.0), ("AllReduce", 0.0)), (5.79, 6.95, 4.88), 1.01, 16),
    "ErrorFeedback(PowerSGD(8))": Method((("AllReduce", 0.0), ("AllReduce", 0.0)), (6.02, 7.99, 6.74), 1.0, 8),
    "ErrorFeedback(PowerSGD(4))": Method((("AllReduce", 0.0), ("AllReduce", 0.0)), (6.53, 9.03, 8.54), 1.0, 4),
    "mean": Method((("AllReduce", 8.0),), (0.01, 0.02), 0.0),
    "Quantized(4)": Method((("AllToAll", 0.5312), ("AllGather", 0.5312)), (9.03, 7.39, 4.73), 0.0),
    "ErrorFeedback(Ternary())": Method((("AllToAll", 0.2156), ("AllGather", 0.2156)), (10.48, 7.05, 7.25), 1.0),
}
