"""Candidates for a model: exchanges to the byte, on meta tensors, and the seconds of their work by a codec."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.advisor.advice import Candidate
from laconic.advisor.catalogue import MEAN, OptimizerKind, families
from laconic.advisor.curves import with_world
from laconic.advisor.estimates import Passes
from laconic.advisor.memory import extra_bytes
from laconic.advisor.risk import Risk
from laconic.advisor.traffic_table import METHODS, Method
from laconic.comm.bucket import RESIDUAL
from laconic.cost.codec import WorkModel
from laconic.forecast.exchanges import Known, Sent
from laconic.forecast.prediction import cycle_of, timeline_of, trained
from laconic.local.fragments import fragments
from laconic.reducers.base import Reducer
from laconic.reducers.cast import Cast
from laconic.reducers.error_feedback import Release
from laconic.reducers.exact import Exact
from laconic.reducers.float8 import Float8
from laconic.reducers.quantized import Quantized
from laconic.reducers.warmup import Warmup
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Strategy

MOST_FRAGMENTS = 4
EXACT_WORLD = 16  # bytes of more workers are scaled from so many: beyond, only rounding to whole words per worker differs
UNKNOWN_PASSES = 10.0  # before each round and after the last, of a reducer that is in no table: those of 4 bits


def candidates(
    model: nn.Module,
    world_size: int,
    codec: WorkModel,
    *,
    sizes: Mapping[str, int] | None = None,
    buckets: Sequence[Sequence[str]] | None = None,
    optimizer: OptimizerKind = "adam",
    risk: Risk = Risk.LOCAL,
    extra: Sequence[str] = (),
) -> list[list[Candidate]]:
    """The families of the catalogue up to a risk, for this model; and `extra` strategies, each a family of its own.

    `sizes` and `buckets` are as in `predict`. Only shapes of the model are read: it may be on meta.
    """
    if world_size < 2:
        raise ValueError(f"with {world_size} worker there is nothing to communicate: ask for 2 workers at least")
    whole = trained(model.module if isinstance(model, DistributedDataParallel) else model)
    node = (sizes or {}).get("node", 1)
    exact = min(world_size, max(EXACT_WORLD, 2 * node))
    known = families(optimizer, fragments=_most_fragments(whole), nodes=1 < node < world_size)
    plans = [[(read(plan.text), plan.text, plan.risk, plan.words) for plan in family] for family in known]
    alone = [family[0][0] for family in plans if len(family) == 1]
    for text in extra:
        chosen = read(text)
        if chosen.advised is not None:
            raise ValueError(
                f"{text} leaves the choice to the advisor, who is being asked; give the strategies that it may take"
            )
        if chosen not in alone:
            plans.append([(chosen, text, risk_of(chosen), "no benchmark of laconic's is known to the advisor")])

    exchanges: Known = {}  # families have most of them in common

    def candidate(strategy: Strategy, text: str, own_risk: Risk, words: str) -> Candidate:
        cycle = cycle_of(strategy)
        found = timeline_of(strategy, model, world_size=exact, buckets=buckets, steps=cycle, sizes=sizes, known=exchanges)
        steps = with_world(codec.steps(strategy, found), exact, world_size)
        return Candidate(text, own_risk, steps, extra_bytes(strategy, whole), words)

    return [[candidate(*plan) for plan in family] for family in plans if family[0][2] <= risk]


def risk_of(strategy: Strategy) -> Risk:
    """The class of any strategy.

    What leaves numbers out without error feedback, and is more than rounding to 8 bits or more, changes the training.

    >>> risk_of(read("int8()")).name, risk_of(read("topk()")).name, risk_of(read("diloco()")).name
    ('ROUNDING', 'DELAY', 'LOCAL')
    """
    reducer = strategy.reducer.inner if isinstance(strategy.reducer, Warmup) else strategy.reducer
    if strategy.averaging is not None or strategy.route.at(1 << 40) is None:
        return Risk.LOCAL
    if RESIDUAL in reducer.all_memory():
        return Risk.DELAY
    if isinstance(reducer, Exact):
        return Risk.SAME
    rounds = isinstance(reducer, Cast | Float8) or (isinstance(reducer, Quantized) and reducer.bits == 8)
    return Risk.ROUNDING if rounds else Risk.LOCAL


def meta_model(parameters: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module that has parameters of these names and shapes, and no numbers.

    >>> [name for name, _ in meta_model({"blocks.0.weight": [2, 3], "norm": [3]}).named_parameters()]
    ['norm', 'blocks.0.weight']
    """
    if not parameters:
        raise ValueError("a model needs parameters, and there are none")
    root = nn.Module()
    for path, shape in parameters.items():
        if not path or any(not part or hasattr(nn.Module(), part) for part in path.split(".")) or _inside(path, parameters):
            raise ValueError(f"no model has a parameter of the name {path!r} beside the others")
        *parents, name = path.split(".")
        place = root
        for parent in parents:
            if parent not in dict(place.named_children()):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.register_parameter(name, nn.Parameter(torch.empty(list(shape), dtype=dtype, device="meta")))
    return root


def _inside(path: str, names: Collection[str]) -> bool:
    """Whether another parameter has the name of a module that this one is in."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts)))


class PassesCodec(WorkModel):
    """Seconds of work as passes over memory, by the table: for a device that is not this machine."""

    counts_copies = False

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def work(self, reducer: Reducer | None, sent: Sent) -> list[float]:
        method, parts = _method(reducer), len(sent.rounds) + 1
        passes = method.passes if method is not None else (UNKNOWN_PASSES,) * parts
        if len(passes) != parts:  # a bucket without any matrix is sent as it is
            passes = (0.0,) * parts
        return [self._passes.seconds(each, sent.numbers) for each in passes]

    def around(self, passes: float, numbers: int, tensors: int) -> float:
        return self._passes.seconds(passes, numbers)


def _method(reducer: Reducer | None) -> Method | None:
    """Its line of the table, where None is a plain mean; None: it has none."""
    if reducer is None:
        return METHODS[MEAN]
    if isinstance(reducer, Warmup | Release):
        return _method(reducer.inner)
    return _by_reducer().get(reducer)


@cache
def _by_reducer() -> dict[Reducer, Method]:
    return {read(f"ddp(reducer={name})").reducer: method for name, method in METHODS.items() if name != MEAN}


def _most_fragments(parameters: Mapping[str, Tensor]) -> int:
    """As many as there are layers, up to the catalogue's four."""
    for count in range(MOST_FRAGMENTS, 1, -1):
        try:
            fragments(parameters, count, "strided")
        except ValueError:
            continue
        return count
    return 1
