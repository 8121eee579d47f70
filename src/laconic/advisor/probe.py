"""The probe: how long collectives take on a process group, from small messages to large ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Collective
from laconic.comm.exchange import Rounds, complete
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.cost.network import Speed

SIZES = [1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 26]  # bytes that a rank hands in
PRIMING_BYTES = 1 << 20  # sent before anything is timed: a bucket of tokens on the way is empty then
FEWEST, LONGEST_SECONDS = 3, 1.0  # repeats of each size; and no size is tried that would take longer than that


@dataclass(frozen=True)
class Sample:
    """One size of one kind of collective."""

    kind: str
    world: int
    wire_bytes: int
    seconds: float


def _make(kind: type[Collective], payload: int, world: int, device: torch.device) -> Collective:
    numbers = max(1, payload // 4)
    if kind is AllToAll:
        return kind(torch.zeros(world, max(1, numbers // world), device=device))
    return kind(torch.zeros(numbers, device=device))


KINDS: tuple[type[Collective], ...] = (AllReduce, AllGather, AllToAll)


def samples(
    group: TorchGroup, device: torch.device, *, seconds: float = 20.0, progress: Callable[[float], None] | None = None
) -> list[Sample]:
    """Each kind at each size, for so long altogether; all ranks together."""
    found: list[Sample] = []
    began, share = time.perf_counter(), seconds / len(KINDS)
    for number, kind in enumerate(KINDS):
        expected, last = 0.0, 0
        for size in SIZES:
            payload = size // group.world if kind is AllGather else size
            if found and last and expected * size / last > min(LONGEST_SECONDS, share / (2 * FEWEST)):
                break
            took = _timed(kind, payload, group, device, share / len(SIZES))
            found.append(
                Sample(
                    kind.__name__, group.world, _make(kind, payload, group.world, device).traffic(group.world).wire_bytes, took
                )
            )
            expected, last = took, size
            if progress is not None:
                progress(min(1.0, max((time.perf_counter() - began) / seconds, number / len(KINDS))))
    if progress is not None:
        progress(1.0)
    return found


def _timed(kind: type[Collective], payload: int, group: TorchGroup, device: torch.device, seconds: float) -> float:
    """Seconds of one, the slowest rank's: the median of as many as fit."""
    sent = 0
    while sent < min(PRIMING_BYTES, 16 * payload) or sent == 0:
        group.launch(_make(kind, payload, group.world, device)).wait()
        sent += payload
    rows: list[float] = []
    while True:
        one = _make(kind, payload, group.world, device)
        start = time.perf_counter()
        group.launch(one).wait()
        rows.append(time.perf_counter() - start)
        if len(rows) >= FEWEST and (len(rows) - FEWEST) % 4 == 0:
            # All ranks go on, or none does: the first one's clock decides.
            total = complete(_first(sum(rows), device), group, Ledger())
            if total > seconds or len(rows) > 200:
                break
    rows.sort()
    middle = rows[len(rows) // 2]
    return max(complete(_all(middle, device), group, Ledger()))


def _first(value: float, device: torch.device) -> Rounds[float]:
    return float((yield AllGather(torch.tensor([value], dtype=torch.float64, device=device))).flatten()[0])


def _all(value: float, device: torch.device) -> Rounds[list[float]]:
    return [float(each) for each in (yield AllGather(torch.tensor([value], dtype=torch.float64, device=device))).flatten()]


def fitted(found: Sequence[Sample]) -> dict[str, dict[int, Speed]]:
    """Speeds by kind and number of ranks: alpha + beta * bytes, by least squares of relative errors."""
    speeds: dict[str, dict[int, Speed]] = {}
    for kind, world in dict.fromkeys((each.kind, each.world) for each in found):
        rows = [each for each in found if (each.kind, each.world) == (kind, world)]
        speeds.setdefault(kind, {})[world] = fit([each.wire_bytes for each in rows], [each.seconds for each in rows])
    return speeds


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Speed:
    """alpha, beta >= 0 that make ((alpha + beta * size) / seconds - 1)^2 least.

    >>> speed = fit([1e3, 1e6, 1e7], [1e-3 + 1e-6, 2e-3, 1.1e-2])
    >>> round(speed.alpha_seconds, 5), round(1 / speed.seconds_per_byte / 1e9, 3)
    (0.001, 1.0)
    """
    u, v = [1 / took for took in seconds], [size / took for size, took in zip(sizes, seconds, strict=True)]
    uu, vv, uv = sum(a * a for a in u), sum(b * b for b in v), sum(a * b for a, b in zip(u, v, strict=True))
    su, sv = sum(u), sum(v)
    bottom = uu * vv - uv * uv
    if bottom <= 1e-12 * uu * vv:
        return Speed(su / uu, 0.0)
    alpha, beta = (su * vv - sv * uv) / bottom, (sv * uu - su * uv) / bottom
    if alpha < 0:
        alpha, beta = 0.0, sv / vv
    if beta < 0:
        alpha, beta = su / uu, 0.0
    return Speed(alpha, beta)
