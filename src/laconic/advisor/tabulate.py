"""Makes `traffic_table.py`: what each method sends and keeps per number, on meta tensors, and its passes, timed here.

`OMP_NUM_THREADS=1 python -m laconic.advisor.tabulate > traffic_table.py` prints the file. Rounds and memory come out the same
everywhere, and a test compares them. Passes are a snapshot of one machine.
"""

import statistics
import sys

from torch import nn

from laconic.advisor.catalogue import MEAN, families
from laconic.advisor.memory import kept_bytes
from laconic.cost.codec import Codec, copy_seconds
from laconic.forecast.prediction import timeline_of
from laconic.strategies.parsing import strategy
from laconic.strategies.strategy import Strategy

SIDE, WORLD = 2048, 4  # the bucket is a matrix; parameters are averaged in chunks of 1024²
HEAD = '''"""What each method sends, takes and keeps per number of a bucket. Written by `python -m laconic.advisor.tabulate`."""

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
'''


def methods() -> list[str]:
    """All that the catalogue names."""
    plans = [plan for kind in ("adam", "sgd") for family in families(kind, nodes=True) for plan in family]
    return list(dict.fromkeys(name for plan in plans for name in (plan.gradients, plan.between) if name is not None))


def rounds_and_memory(name: str) -> tuple[tuple[tuple[str, float], ...], float, int]:
    """Of one method: its rounds, what it keeps, and its rank."""
    rank = int(name.partition("PowerSGD(")[2].rstrip(")") or 0)
    chosen, model = _chosen(name)
    (sent,) = timeline_of(chosen, model, world_size=WORLD, steps=1)
    (exchange,) = sent.after if name == MEAN else sent.in_backward
    unit = exchange.numbers * (WORLD - 1) / WORLD
    found = tuple((round_.kind, 0.0 if rank else round(round_.wire_bytes / unit, 4)) for round_ in exchange.rounds)
    kept = 0.0 if name == MEAN else kept_bytes(chosen.reducer, dict(model.named_parameters()))
    return found, round(kept / (4 * exchange.numbers), 2), rank


def passes(name: str) -> tuple[float, ...]:
    """Timed here: work before each round and after the last, in copies of the bucket."""
    chosen, model = _chosen(name)
    found = timeline_of(chosen, model, world_size=WORLD, steps=1)
    rows, copies = [], []
    for _ in range(3):
        copies.append(copy_seconds())
        (step,) = Codec().steps(chosen, found)
        exchange = (step.after if name == MEAN else step.in_backward)[-1]  # before the mean, there is a heartbeat
        rows.append(exchange.work)
    unit = statistics.median(copies) * exchange.numbers
    return tuple(round(statistics.median(column) / unit, 2) for column in zip(*rows, strict=True))


def table() -> str:
    """The file."""
    lines = [HEAD]
    for name in methods():
        rounds, kept, rank = rounds_and_memory(name)
        sent = str(rounds).replace("'", '"')
        lines.append(f'    "{name}": Method({sent}, {passes(name)}, {kept}{f", {rank}" if rank else ""}),\n')
    return "".join([*lines, "}\n"])


def _chosen(name: str) -> tuple[Strategy, nn.Module]:
    """A strategy that averages by this method in every step, and a model of one bucket."""
    side = SIDE // 2 if name == MEAN else SIDE
    text = "local_sgd(1)" if name == MEAN else f"ddp(reducer={name})"
    return strategy(text), nn.Linear(side, side, bias=False, device="meta")


if __name__ == "__main__":
    sys.stdout.write(table())
