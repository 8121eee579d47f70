"""The timeline of a strategy: which exchanges leave in which step, and how long they may take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from laconic.comm.scopes import AUTO, Scope
from laconic.forecast.exchanges import Exchanges, Known, Sent, gathers, means, meta
from laconic.local.agenda import Agenda
from laconic.local.anchors import anchor_dtype
from laconic.local.fragments import buckets as fragment_buckets
from laconic.local.fragments import fragments
from laconic.local.moments import COUNTER
from laconic.strategies.strategy import Averaging, Strategy


@dataclass(frozen=True)
class StepTraffic:
    """What one rank sends in one step, in the order in which it leaves."""

    in_backward: Sequence[Sent] = ()  # of gradients, bucket by bucket
    after: Sequence[Sent] = ()  # between this step and the next, which waits for them
    outstanding: Sequence[Sent] = ()  # that leave then, and are waited for `delay` steps later
    delay: int = 0

    @property
    def exchanges(self) -> list[Sent]:
        """All of them."""
        return [*self.in_backward, *self.after, *self.outstanding]


@dataclass(frozen=True)
class Trained:
    """What is trained, as meta tensors by name; of a sharded model this rank's shards."""

    whole: Mapping[str, Tensor]  # without any shards
    own: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]  # as they travel
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def timeline(
    strategy: Strategy,
    trained: Trained,
    buckets: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    first: int,
    count: int,
    known: Known | None = None,
) -> Iterator[StepTraffic]:
    """Step by step, `count` steps from step `first` on. `sizes`: of the scopes, from `scope_sizes`."""
    between = _BetweenSteps(strategy.averaging, trained, sizes, first, known) if strategy.averaging else None
    gradients = Exchanges(strategy.reducer, known)
    for step in range(first, first + count):
        scope = strategy.route.at(step)
        size = size_of(scope, sizes)
        sent: list[Sent] = []
        if scope is not None and (size > 1 or scope == "world"):
            groups = [{name: trained.gradients[name] for name in names} for names in buckets]
            sent = [gradients.of(group, size, step, step) for group in groups]
        after = between.after(step + 1) if between is not None else StepTraffic()
        yield StepTraffic(sent, after.after, after.outstanding, after.delay)


def scope_sizes(world: int, given: Mapping[str, int] | None) -> dict[str, int]:
    """How many ranks each scope has."""
    known = {"node": world, AUTO: 1, "world": world, **(given or {})}
    if given and "node" in given:
        known[AUTO] = given["node"] if given["node"] < world else 1
    return known


def size_of(scope: Scope | None, sizes: Mapping[str, int]) -> int:
    """How many ranks average together; 1: nobody does."""
    if scope is None or isinstance(scope, int):
        return scope or 1
    if scope not in sizes:
        raise ValueError(f"how many ranks has {scope!r}? Give sizes={{{scope!r}: ...}}")
    return sizes[scope]


def as_anchor(parameter: Tensor) -> Tensor:
    """A parameter as its delta travels."""
    return meta(parameter.numel(), anchor_dtype(parameter.dtype)).view(parameter.shape)


class _BetweenSteps:
    """What is sent between steps: by the agenda that a run goes by, in the buckets and chunks that it sends."""

    def __init__(
        self, averaging: Averaging, trained: Trained, sizes: Mapping[str, int], step: int, known: Known | None
    ) -> None:
        self._averaging, self._named, self._buffers, self._sizes = averaging, trained.own, trained.buffers, sizes
        self._agenda = Agenda(averaging, step if step > averaging.start else 0)
        self._syncs = 0
        self._means: dict[tuple[bool, int], list[Sent]] = {}  # of buffers or parameters, by the number of ranks
        self._moments: dict[int, list[Sent]] = {}  # by how many of each parameter's are averaged at once
        self._delay = 0
        if averaging.deltas is not None:
            self._deltas, self._delay = Exchanges(averaging.deltas.reducer, known), averaging.deltas.delay
            parts = fragments(trained.whole, averaging.deltas.fragments, averaging.deltas.order)
            self._fragments = [
                [{name: as_anchor(self._named[name]) for name in names} for names in fragment_buckets(self._named, part)]
                for part in parts
            ]

    def after(self, step: int) -> StepTraffic:
        """Sent after `step` completed steps."""
        scope = self._agenda.scope(step)
        size = size_of(scope, self._sizes)
        blocking: list[Sent] = []
        deltas: list[Sent] = []
        if scope is not None and (size > 1 or scope == "world"):
            self._agenda.synced(step, None)
            blocking = [*self._mean(size), *self._of_buffers(size)]
        else:
            for fragment in self._agenda.departures(step):
                world = self._sizes["world"]
                deltas += [self._deltas.of(bucket, world, step, self._syncs) for bucket in self._fragments[fragment]]
                if fragment == self._agenda.last_fragment:
                    self._agenda.synced(step, None)
                    self._syncs += 1
                    blocking += self._of_buffers(world)
        blocking += self._of_moments(step)
        if self._delay:
            return StepTraffic((), blocking, deltas, self._delay)
        return StepTraffic((), [*deltas, *blocking])

    def _of_moments(self, step: int) -> list[Sent]:
        count = len([key for key in self._agenda.moments(step) if key != COUNTER])
        if count not in self._moments:
            repeated = [self._named[name] for name in sorted(self._named) for _ in range(count)]
            self._moments[count] = list(means(repeated, self._sizes["world"]))
        return self._moments[count]

    def _mean(self, size: int, *, buffers: bool = False) -> list[Sent]:
        if (buffers, size) not in self._means:
            self._means[buffers, size] = list(means((self._buffers if buffers else self._named).values(), size))
        return self._means[buffers, size]

    def _of_buffers(self, size: int) -> list[Sent]:
        match self._averaging.buffers:
            case "average":
                return self._mean(size, buffers=True)
            case "broadcast":
                return list(gathers(self._buffers.values(), size))
        return []
