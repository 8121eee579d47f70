"""What a strategy will send, before anything runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.ddp import bucket_assignment
from laconic._torch.fsdp import is_dtensor, reshard, shard_groups
from laconic.comm.collectives import Traffic
from laconic.comm.flat_tensors import local
from laconic.forecast.exchanges import Exchanges, Known
from laconic.forecast.timeline import StepTraffic, Trained, as_anchor, scope_sizes, timeline
from laconic.reducers.base import Reducer
from laconic.reducers.exact import Exact
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Strategy

FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's defaults
AFTER_WARMUP = 1 << 40  # a step by which every warm-up is over
LONGEST_CYCLE = 10_000  # steps: periods of moments that have nothing in common are averaged over so many


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Forecast(Traffic):
    """What one rank will send in `steps` steps: `laconic.predict` returns it.

    Two forecasts are equal if their numbers are, and if they are of as many steps. A Traffic, which doesn't say of how many it
    is, equals one with its numbers.

    Fields:
      `payload_bytes`: what the rank hands to collectives. Default 0.
      `wire_bytes`: the least that it puts on the cable for them: see `Traffic`. Default 0.
      `collectives`: how many it launches. Default 0.
      `steps`: the steps that all of these are of. Default 1.

    >>> import laconic
    >>> laconic.Forecast(400, 300, 2, steps=4)
    Forecast(payload_bytes=400, wire_bytes=300, collectives=2, steps=4, wire_bytes_per_step=75)
    """

    steps: int = 1

    @property
    def payload_bytes_per_step(self) -> float:
        """`payload_bytes` a step, on average over `steps`."""
        return self.payload_bytes / self.steps if self.steps else 0.0

    @property
    def wire_bytes_per_step(self) -> float:
        """`wire_bytes` a step, on average over `steps`: compare strategies by this."""
        return self.wire_bytes / self.steps if self.steps else 0.0

    @property
    def collectives_per_step(self) -> float:
        """`collectives` a step, on average over `steps`."""
        return self.collectives / self.steps if self.steps else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Traffic):
            return NotImplemented
        steps = other.steps if isinstance(other, Forecast) else self.steps
        mine = (self.payload_bytes, self.wire_bytes, self.collectives, self.steps)
        return mine == (other.payload_bytes, other.wire_bytes, other.collectives, steps)

    def __hash__(self) -> int:
        return hash((self.payload_bytes, self.wire_bytes, self.collectives))  # as a Traffic's

    def __repr__(self) -> str:
        numbers = [f"{part.name}={getattr(self, part.name)}" for part in fields(self)]
        return f"Forecast({', '.join(numbers)}, wire_bytes_per_step={self.wire_bytes_per_step:.10g})"


def predict(
    strategy: Strategy | str,
    model: nn.Module,
    *,
    world_size: int,
    buckets: Sequence[Sequence[str]] | None = None,
    step: int = AFTER_WARMUP,
    steps: int | None = None,
    sizes: Mapping[str, int] | None = None,
    shards: int = 1,
    shard: int = 0,
) -> Forecast:
    """Bytes and collectives of one rank, before anything runs.

    They are worked out on meta tensors: no data, no process group, and the model may be on the meta device. With the run's
    own buckets, they equal what `run.stats()` counts. By default they are of one cycle of the strategy, when every warm-up is
    over: one step where all are alike, a whole period of local updates. The answer says how many steps that is; compare
    strategies by `wire_bytes_per_step`.

    Of a model that `fully_shard` has sharded, a rank's bytes are those of its shards, and buckets are the groups of
    `fully_shard`. Moments with a period of their own count as numbers of their parameters' shapes and dtypes, as torch's
    optimizers have them; the cycle is one of theirs, too, or some ten thousand steps where that would be longer.

    Not: what `moments="average"` sends, which depends on the optimizer; a period that follows the learning rate (QSR is taken
    at its base); time, which `laconic advise` works out.

    Arguments:
      `strategy`: an object such as `laconic.diloco(32)`, or its text.
      `model`: a module or a DistributedDataParallel; its trained parameters count.
      `world_size`: how many ranks average; of a sharded model, how many islands.
      `buckets`: lists of parameter names, as `run.layout()` gives them. Default None: DDP's own rule, the parameters last to
        first, 1 MiB in the first bucket and 25 MiB in the others.
      `step`: the first step that is counted, from 0 on. Default 2^40, by which every warm-up is over.
      `steps`: how many are counted. Default None: one cycle.
      `sizes`: how many ranks a subgroup has, such as {"node": 8}. Default None: all are on one node.
      `shards`: count a whole model as if each parameter were cut by rows into so many, as `fully_shard` cuts them. Default 1.
      `shard`: which of them this rank holds, from 0 to `shards` - 1. Default 0.

    It raises a TypeError for what is no whole number or no module; a ValueError for numbers that can't be, for a model without
    trained parameters, for buckets with names that it doesn't train, and for a schedule that doesn't say its cycle, where
    `steps` is not given.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, device="meta")
    >>> laconic.predict("bf16()", layer, world_size=4)
    Forecast(payload_bytes=2502500, wire_bytes=3003000, collectives=2, steps=1, wire_bytes_per_step=3003000)
    >>> laconic.predict("local_sgd(16)", layer, world_size=4)
    Forecast(payload_bytes=4004000, wire_bytes=6006000, collectives=1, steps=16, wire_bytes_per_step=375375)
    >>> # 10 as ddp()
    >>> laconic.predict(
    ...     "powersgd(warmup=10)", layer, world_size=4, step=0, steps=20
    ... ).wire_bytes_per_step
    3030000.0
    """
    chosen = read(strategy)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_whole({"world_size": world_size, "step": step, "shards": shards, "shard": shard})
    _check_whole(
        {f"sizes[{name!r}]": size for name, size in (sizes or {}).items()} | ({} if steps is None else {"steps": steps})
    )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if shards < 1 or not 0 <= shard < shards:
        raise ValueError(f"shards must be at least 1, and shard from 0 to shards - 1, got shards={shards}, shard={shard}")
    count = cycle_of(chosen) if steps is None else steps
    if count < 0:
        raise ValueError(f"steps must be 0 or more, got {count}")
    cut = (shards, shard)
    found = timeline_of(chosen, model, world_size=world_size, buckets=buckets, step=step, steps=count, sizes=sizes, cut=cut)
    total = sum((sent.traffic for one in found for sent in one.exchanges), Traffic())
    return Forecast(total.payload_bytes, total.wire_bytes, total.collectives, count)


def _check_whole(numbers: Mapping[str, object]) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be a whole number, such as 8, got {number!r}")


def timeline_of(
    strategy: Strategy,
    model: nn.Module,
    *,
    world_size: int,
    buckets: Sequence[Sequence[str]] | None = None,
    step: int = AFTER_WARMUP,
    steps: int,
    sizes: Mapping[str, int] | None = None,
    cut: tuple[int, int] = (1, 0),
    known: Known | None = None,
) -> list[StepTraffic]:
    """Which exchanges leave in which step; arguments as those of `predict`, with `shards` and `shard` in `cut`.

    `known` is an empty dictionary at first; calls that share it work out the exchanges that they have in common once.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    whole = trained(module)
    if not whole:
        raise ValueError("the model has no parameters that are trained")
    own = {name: _shard(parameter, *cut) for name, parameter in whole.items()}
    groups = (_sharded_buckets(module, whole) or default_buckets(own)) if buckets is None else buckets
    unknown = [name for names in groups for name in names if name not in own]
    if unknown:
        raise ValueError(f"buckets name parameters that the model doesn't train: {', '.join(unknown)}")
    parts = Trained(whole, own, {**own, **_reduced(module, own)}, dict(module.named_buffers()))
    return list(timeline(strategy, parts, groups, scope_sizes(world_size, sizes), step, steps, known))


def cycle_of(strategy: Strategy) -> int:
    """The strategy's, in which its moments' periods fit, too; some ten thousand steps, where that would be longer."""
    cycle = strategy.cycle
    if cycle is None:
        raise ValueError(f"{strategy} has a schedule that does not say its cycle, so that one can't be predicted; give steps=")
    moments = strategy.averaging.moments if strategy.averaging else ()
    periods = [period for _, period in moments] if isinstance(moments, tuple) else []
    return min(math.lcm(cycle, *periods), max(LONGEST_CYCLE, cycle)) // cycle * cycle


def layer_bytes(strategy: Strategy | str, model: nn.Module, world_size: int) -> dict[str, int]:
    """Wire bytes of one exchange, by parameter, as if each were sent alone; 0 where the strategy sends none.

    >>> import torch
    >>> layer_bytes("ddp()", torch.nn.Linear(10, 10), 2)
    {'weight': 400, 'bias': 40}
    """
    chosen = read(strategy)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    named = {name: _shard(parameter, 1, 0) for name, parameter in trained(module).items()}
    reducer: Reducer | None = chosen.reducer if chosen.route.at(AFTER_WARMUP) is not None else None
    if chosen.averaging is not None:
        reducer = chosen.averaging.deltas.reducer if chosen.averaging.deltas else Exact()
    if chosen.averaging is not None and chosen.averaging.deltas is not None:
        named = {name: as_anchor(parameter) for name, parameter in named.items()}
    if reducer is None:
        return dict.fromkeys(named, 0)
    exchanges = Exchanges(reducer)
    sent = {name: exchanges.of({name: named[name]}, world_size, AFTER_WARMUP, AFTER_WARMUP) for name in named}
    return {name: each.traffic.wire_bytes for name, each in sent.items()}


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name; of a sharded model the shards, also after a forward that has gathered some."""
    reshard(module)
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}


def _shard(parameter: Tensor, shards: int, number: int) -> Tensor:
    """What a rank holds of a parameter, as a meta tensor: of a DTensor its own part, else the rows that it would hold."""
    mine = local(parameter)
    if is_dtensor(parameter) or shards == 1 or mine.dim() == 0:
        return torch.empty_like(mine, device="meta")
    rows = -(-mine.shape[0] // shards)
    held = min(rows, max(0, mine.shape[0] - number * rows))
    return torch.empty((held, *mine.shape[1:]), dtype=mine.dtype, device="meta")


def _reduced(module: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shards as gradients travel: `fully_shard` may reduce them in another dtype."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {names[id(one)]: group.reduce_dtype for group in shard_groups(module) for one in group.parameters}
    return {name: named[name].to(dtype) for name, dtype in found.items()}


def _sharded_buckets(module: nn.Module, whole: Mapping[str, Tensor]) -> list[list[str]]:
    """The groups of `fully_shard`, in the order in which they leave; none of a model that is not sharded."""
    names = {id(parameter): name for name, parameter in module.named_parameters() if name in whole}
    groups = [[names[id(one)] for one in group.parameters] for group in shard_groups(module)[::-1]]
    return [group for group in groups if group]


def default_buckets(named: Mapping[str, Tensor]) -> list[list[str]]:
    """The buckets that DDP settles on when gradients become ready from the last parameter to the first."""
    names = list(named)[::-1]
    limits = [FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES]
    return [[names[index] for index in group] for group in bucket_assignment([named[name] for name in names], limits)]
