"""What a probe measured, its file probe.json (version 1), and the network that the cost model makes of it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laconic.cost.line_fit import errors, line
from laconic.cost.link import Link
from laconic.cost.network import Network, Speed
from laconic.cost.plain_data import built

VERSION = 1
AGAIN = "measure again with laconic probe"


@dataclass(frozen=True)
class Sample:
    """One size of one kind of collective, as a probe timed it.

    Fields:
      `kind`: "AllReduce", "AllGather" or "AllToAll".
      `ranks`: how many ranks the group had.
      `in_flight`: how many were outstanding at once; the seconds are those of all of them, divided by how many.
      `wire_bytes`: what each rank puts on the cable, at least.
      `seconds`: the median over the repeats, of the slowest rank.
      `low_seconds`, `high_seconds`: the quartiles.
      `repeats`: how often it was timed.
      `busy`: the share of the time in which processors worked on it; 1 is a whole core of a rank, or all of a machine.

    >>> Sample("AllReduce", 2, 1, 1000, 2e-4, 1.9e-4, 2.2e-4, 16, 0.4).seconds
    0.0002
    """

    kind: str
    ranks: int
    in_flight: int
    wire_bytes: int
    seconds: float
    low_seconds: float
    high_seconds: float
    repeats: int
    busy: float


@dataclass(frozen=True)
class Fit:
    """The time of one kind of collective in one group, as a line.

    Maths: seconds = alpha + beta * bytes, where the bytes are those that each rank puts on the cable.

    Fields:
      `kind`, `ranks`, `in_flight`: what was timed, as in `Sample`.
      `alpha_seconds`, `seconds_per_byte`: alpha and beta.
      `alpha_range`, `per_byte_range`: the least and the most that the same fit to the medians and the quartiles gives.
      `error`: the median of the errors over the sizes. An error is 0.3 where line and time differ by 30 % of the smaller of the
        two, and 14 where they differ by a factor of 15.
      `worst_error`: the largest of them.

    >>> fit = Fit(
    ...     "AllReduce", 2, 1, 1e-4, 8e-8, (9e-5, 1.2e-4), (7.9e-8, 8.1e-8), 0.02, 0.1
    ... )
    >>> fit.alpha_seconds + 1e6 * fit.seconds_per_byte  # of 1 MB, behind 100 Mbit/s
    0.0801
    """

    kind: str
    ranks: int
    in_flight: int
    alpha_seconds: float
    seconds_per_byte: float
    alpha_range: tuple[float, float]
    per_byte_range: tuple[float, float]
    error: float  # the median of the relative errors
    worst_error: float


@dataclass(frozen=True)
class LeftOut:
    """A size that a probe did not measure.

    Fields:
      `kind`, `ranks`, `in_flight`, `wire_bytes`: what would have been timed, as in `Sample`.
      `reason`: why it was not, in words.

    >>> LeftOut(
    ...     "AllGather", 4, 1, 64_000_000, "it would have taken longer than what was left"
    ... ).kind
    'AllGather'
    """

    kind: str
    ranks: int
    in_flight: int
    wire_bytes: int
    reason: str


@dataclass(frozen=True)
class Worker:
    """One rank that a probe measured: where it is, and its own transfers. None: not measured.

    Fields:
      `rank`: its number in the group.
      `host`: the name of its host.
      `node`: the number of its node; ranks of one node share a network interface.
      `sends_bits_per_second`, `receives_bits_per_second`: its transfers to and from ranks of other hosts. Default None.
      `spread`: of several of those transfers, what lies between the quartiles, as a share of the usual time. Default None.
      `round_trip_seconds`: of a small message to another host and back. Default None.

    >>> Worker(0, "first", 0, sends_bits_per_second=1e8).round_trip_seconds  # None
    """

    rank: int
    host: str
    node: int
    sends_bits_per_second: float | None = None
    receives_bits_per_second: float | None = None
    spread: float | None = None
    round_trip_seconds: float | None = None


@dataclass(frozen=True)
class Probe:
    """A measured network: what `laconic.probe` returns, and what the file probe.json holds.

    `laconic.cost.measured.read(path)` reads the file that `laconic probe` writes.

    Fields:
      `world`: ranks.
      `per_node`: the most of them on one node.
      `device`, `backend`: where the tensors were, and what carried them.
      `seconds`: how long it took.
      `asked_seconds`: how long it was allowed to take.
      `wire_bytes`: what each rank has sent for it, at least.
      `workers`: a `Worker` for each rank.
      `samples`: a `Sample` for each size that was timed.
      `left_out`: a `LeftOut` for each size that was not.
      `fits`: a `Fit` for each kind of collective, group size and number outstanding.
      `bits_per_second`: of the cable between hosts, each way. None: no limit was found.
      `delay_seconds`: one way; 0 below 0.25 ms.
      `link_note`: how both were found, or why not.
      `slow`: the ranks that are slower than the others, in words.
      `slow_down`: seconds by which a computation is slower for each second of a collective beside it; 0: not measured.
      `slow_downs`: the same by kind.
      `round_seconds`: by kind, the seconds of a small collective in a loop that computes. Default {}: not measured.
      `versions`: the releases of laconic and torch. Default {}.
      `version`: of the file's format. Default 1.

    >>> workers = [Worker(0, "first", 0), Worker(1, "second", 1)]
    >>> fits = [
    ...     Fit("AllReduce", 2, 1, 1e-4, 8e-8, (9e-5, 1.2e-4), (7.9e-8, 8.1e-8), 0.02, 0.1)
    ... ]
    >>> ran = (2, 1, "cpu", "gloo", 9.5, 10.0, 60_000_000)
    >>> found = Probe(*ran, workers, [], [], fits, 1e8, 0.0, "", [], 0.0, {})
    >>> str(found.network().link), found.as_dict()["world"]
    ('100mbit', 2)
    >>> parse(found.text(), "probe.json") == found
    True
    """

    world: int
    per_node: int
    device: str
    backend: str
    seconds: float
    asked_seconds: float
    wire_bytes: int
    workers: list[Worker]
    samples: list[Sample]
    left_out: list[LeftOut]
    fits: list[Fit]
    bits_per_second: float | None
    delay_seconds: float
    link_note: str
    slow: list[str]
    slow_down: float
    slow_downs: dict[str, float]
    round_seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def one_host(self) -> bool:
        """Whether all ranks were on one host, so that no link between hosts was measured."""
        return self.per_node == self.world

    def check_world(self, world: int) -> None:
        """Refuse to speak for another number of workers: how collectives grow with it is not measured.

        Arguments:
          `world`: the number of workers that are asked for; a ValueError, unless the probe measured as many.
        """
        if world != self.world:
            raise ValueError(
                f"the probe measured {self.world} workers, and {world} are asked for; {AGAIN} on {world} workers, or give the "
                "link as --link instead of --probe"
            )

    def network(self, link: Link | None = None, *, world: int | None = None) -> Network:
        """What the cost model computes with.

        The hosts' speeds are the fitted ones of collectives alone; but alpha is that of a small round in a loop that computes,
        where this is longer.

        Arguments:
          `link`: one to use instead of the one that was found, which can only be slower: the found link's time is in the fits.
            Default None: the one that was found.
          `world`: the number of workers to speak for; a ValueError, unless the probe measured as many. Default None: as many.
        """
        if world is not None:
            self.check_world(world)
        found = Link(None if self.bits_per_second is None else round(self.bits_per_second), self.delay_seconds)
        if link is not None and found.bits_per_second is not None and not _slower(link, found):
            raise ValueError(
                f"the probe found a link of {found}, and its times contain that link's; {link} is faster, so they say "
                f"nothing of it: {AGAIN} without that link, or give the link without a probe"
            )
        # Ranks that are all on one host share no cable: each counts as a host of its own, and bytes are those that it sends.
        per_node = 1 if self.one_host else self.per_node
        delays, hosts = Network(Link(None, self.delay_seconds), per_node=per_node), dict[str, dict[int, Speed]]()
        for fit in self.fits:
            if fit.in_flight == 1:
                in_training = self.round_seconds.get(fit.kind, 0.0) if fit.ranks == self.world else 0.0
                alpha = max(fit.alpha_seconds, in_training)
                alpha -= delays.delay_seconds(fit.kind, fit.ranks)  # the cost model adds the delay itself
                hosts.setdefault(fit.kind, {})[fit.ranks] = Speed(max(0.0, alpha), fit.seconds_per_byte)
        used = found if link is None else link
        return Network(used, hosts, slow_down=self.slow_down, framing=self._framing(), per_node=per_node)

    def _framing(self) -> Mapping[str, float]:
        """By kind: the seconds of a byte over those that the cable needs for it at the rate that was found."""
        plain = Network().framing
        if self.bits_per_second is None:
            return plain
        cable, rate = Network(framing={}, per_node=self.per_node), self.bits_per_second / 8
        fits = [fit for fit in self.fits if fit.in_flight == 1 and fit.ranks == self.world]
        found = {fit.kind: fit.seconds_per_byte * rate / cable.cable_bytes(fit.kind, 1.0, self.world) for fit in fits}
        return {**plain, **{kind: max(1.0, factor) for kind, factor in found.items()}}

    def as_dict(self) -> dict[str, Any]:
        """The probe as plain data, as the file has it."""
        return asdict(self)

    def text(self) -> str:
        """The text of the file probe.json; `parse` reads it again."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> Probe:
    """A probe that was written earlier; a ValueError says what is wrong with the file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"the probe {path} can't be read: {why}; laconic probe --out {path} writes one") from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Probe:
    """The same, of a file's text."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is no probe, or a damaged one: {error}; {AGAIN}") from error
    if not isinstance(data, dict) or "version" not in data:
        raise ValueError(f"{name} is no probe: it has no version; {AGAIN}")
    if data["version"] != VERSION:
        raise ValueError(f"{name} is a probe of version {data['version']!r}, and this laconic reads version {VERSION}; {AGAIN}")
    try:
        probe = built(Probe, data)
        _check(probe)
    except ValueError as error:
        raise ValueError(f"{name} is a damaged probe: {error}; {AGAIN}") from error
    return probe


def _check(probe: Probe) -> None:
    """What types alone don't say."""
    if probe.world < 2 or not 1 <= probe.per_node <= probe.world:
        raise ValueError(f"it has {probe.world} workers, {probe.per_node} on a node")
    if [worker.rank for worker in probe.workers] != list(range(probe.world)):
        raise ValueError(f"its {len(probe.workers)} workers are not the ranks 0 to {probe.world - 1}")
    if not any(fit.ranks == probe.world and fit.in_flight == 1 for fit in probe.fits):
        raise ValueError("no collective of all workers was measured")
    if probe.bits_per_second == 0:
        raise ValueError("bits_per_second is 0; where no limit was found it is null")


def _slower(link: Link, found: Link) -> bool:
    assert found.bits_per_second is not None
    return link.bits_per_second is not None and link.bits_per_second <= found.bits_per_second


def fitted(samples: Sequence[Sample]) -> list[Fit]:
    """One fit for each kind, group size and number in flight."""
    found = []
    for kind, ranks, in_flight in dict.fromkeys((each.kind, each.ranks, each.in_flight) for each in samples):
        rows = [each for each in samples if (each.kind, each.ranks, each.in_flight) == (kind, ranks, in_flight)]
        if len(rows) < 2:  # one size says nothing of the next
            continue
        points, low, high = (
            [(float(each.wire_bytes), seconds) for each, seconds in zip(rows, column, strict=True)]
            for column in zip(*((each.seconds, each.low_seconds, each.high_seconds) for each in rows), strict=True)
        )
        middle = line(points)
        alphas, betas = zip(middle, line(low), line(high), strict=True)
        off = sorted(errors(middle, points))
        ranges = ((min(alphas), max(alphas)), (min(betas), max(betas)))
        found.append(Fit(kind, ranks, in_flight, *middle, *ranges, off[len(off) // 2], off[-1]))
    assert all(math.isfinite(fit.alpha_seconds + fit.seconds_per_byte) for fit in found)
    return found
