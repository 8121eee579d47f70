"""Candidates without torch: bytes and rounds by a table of methods, and shapes; encoding as passes over memory.

`candidates.py` works out the same on meta tensors, to the byte. Where only numbers are known of a model, a table of what each
method sends per number says it to within 1 % (a test compares), and the answer is there before torch is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.advisor import shapes
from laconic.advisor.advice import Candidate
from laconic.advisor.catalogue import MEAN, OptimizerKind, Plan, families
from laconic.advisor.risk import Risk
from laconic.advisor.shapes import NUMBER_BYTES, Named, Shape
from laconic.advisor.traffic_table import METHODS, Method
from laconic.cost.around import DELTA_PASSES, MEAN_PASSES, Flow, heartbeat
from laconic.cost.step_time import Exchange, Step

# Bytes a second that encoding and decoding move on a device that nobody has measured: half of what the data sheet of an A100
# says of its memory, because the reducers are plain torch operations, a kernel each. Nothing was measured on a GPU.
MEMORY_BYTES_PER_SECOND = 1e12
COPY_BYTES = 2 * NUMBER_BYTES  # that copying one number moves
CHUNK_NUMBERS = 1 << 20  # parameters are averaged in chunks of 4 MiB
MOST_EXCHANGES = 256  # in one step of the simulation; of a model with more, neighbours are taken together
MIN_COMPRESSION_RATE = 2.0  # PowerSGD's


@dataclass(frozen=True)
class Passes:
    """Seconds of encoding and decoding: so many passes over the numbers, at so many bytes a second."""

    bytes_per_second: float = MEMORY_BYTES_PER_SECOND

    def seconds(self, passes: float, numbers: float) -> float:
        """A pass is a copy of the numbers: each is read and written."""
        return passes * numbers * COPY_BYTES / self.bytes_per_second


def estimated(
    named: Named,
    world: int,
    passes: Passes,
    *,
    per_node: int = 1,
    optimizer: OptimizerKind = "adam",
    risk: Risk = Risk.LOCAL,
) -> list[list[Candidate]]:
    """The families of the catalogue, for a model of these shapes."""
    layers = len({shapes.layer(name) for name in named})
    known = families(optimizer, fragments=min(4, layers), nodes=1 < per_node < world)
    model = _Model(named, world, per_node, passes)
    return [[model.candidate(plan) for plan in plans] for plans in known if plans[0].risk <= risk]


class _Model:
    """What a model sends: buckets, fragments and chunks, cut once."""

    def __init__(self, named: Named, world: int, per_node: int, passes: Passes) -> None:
        self._named, self._world, self._per_node, self._passes = named, world, per_node, passes
        self._numbers = shapes.size(list(named.values()))
        self._buckets = _fewer(shapes.buckets(named))
        chunks = min(MOST_EXCHANGES, -(-self._numbers // CHUNK_NUMBERS))
        self._means = [self._exchange(METHODS[MEAN], [(self._numbers // chunks,)], world)] * chunks

    def candidate(self, plan: Plan) -> Candidate:
        """As the plan says."""
        between, gradients = self._between(plan), self._gradients(plan)
        around = MEAN_PASSES if plan.between == MEAN else DELTA_PASSES
        steps = []
        for place in range(plan.cycle):
            in_backward = gradients if place % plan.every == 0 else []
            sent = between[place % plan.period]
            work = self._work(around, sent)  # what DDP copies of gradients is part of the step that the user gives
            steps.append(Step(in_backward, [] if plan.delay else sent, sent if plan.delay else [], plan.delay, work))
        return Candidate(plan.text, plan.risk, steps, self._memory(plan), plan.words)

    def _gradients(self, plan: Plan) -> list[Exchange]:
        if plan.gradients is None:
            return []
        world = self._per_node if plan.in_node else self._world
        return [self._exchange(METHODS[plan.gradients], bucket, world) for bucket in self._buckets] if world > 1 else []

    def _between(self, plan: Plan) -> list[list[Exchange]]:
        """By step of the period, what leaves after it. Fragment f of F is complete (f + 1) / F into the period."""
        found: list[list[Exchange]] = [[] for _ in range(plan.period)]
        if plan.between == MEAN:
            found[-1] = self._means
        elif plan.between is not None:
            for number, buckets in enumerate(shapes.fragments(self._named, plan.fragments)):
                end = (number + 1) * plan.period // plan.fragments
                sent = [self._exchange(METHODS[plan.between], bucket, self._world) for bucket in _fewer(buckets)]
                found[(end - plan.delay - 1) % plan.period] += sent
        return [[heartbeat(self._world), *sent] if sent else [] for sent in found]

    def _exchange(self, method: Method, like: Sequence[Shape], world: int) -> Exchange:
        numbers = shapes.size(like)
        if method.rank:
            return self._low_rank(method, like, world)
        rounds = [Flow(kind, each * numbers * (world - 1) / world, world) for kind, each in method.rounds]
        return Exchange(rounds, [self._passes.seconds(each, numbers) for each in method.passes], numbers)

    def _low_rank(self, method: Method, like: Sequence[Shape], world: int) -> Exchange:
        """Two thin factors of each matrix for which that saves enough; the rest goes with the first."""
        tall = wide = plain = 0
        for shape in like:
            numbers = shapes.size([shape])
            rows, columns = (shape[0], numbers // shape[0]) if len(shape) > 1 else (0, 0)
            rank = min(method.rank, rows, columns)
            if rank * (rows + columns) * MIN_COMPRESSION_RATE < rows * columns:
                tall, wide = tall + rank * rows, wide + rank * columns
            else:
                plain += numbers
        if not tall:
            return self._exchange(METHODS["Exact()"], like, world)
        sent = [2 * NUMBER_BYTES * each * (world - 1) / world for each in (tall + plain, wide)]
        numbers = shapes.size(like)
        work = [self._passes.seconds(each, numbers) for each in method.passes]
        return Exchange([Flow("AllReduce", each, world) for each in sent], work, numbers)

    def _work(self, passes: float, sent: Sequence[Exchange]) -> float:
        return self._passes.seconds(passes, sum(exchange.numbers for exchange in sent))

    def _memory(self, plan: Plan) -> float:
        """Bytes that a rank keeps, beyond DDP's."""
        kept = float(plan.warmup_memory) + (METHODS[plan.gradients].kept if plan.gradients is not None else 0.0)
        if plan.between == MEAN:
            kept += 1  # until all have arrived
        elif plan.between is not None:
            at_once = -(-plan.delay * plan.fragments // plan.period)  # fragments that are outstanding
            kept += 1 + plan.outer_memory + METHODS[plan.between].kept + 2 * at_once / plan.fragments
        return kept * self._numbers * NUMBER_BYTES


def _fewer(buckets: Sequence[list[Shape]]) -> list[list[Shape]]:
    """At most `MOST_EXCHANGES` of them: a model with more has buckets of hundreds of megabytes, whose latency is nothing."""
    if len(buckets) <= MOST_EXCHANGES:
        return list(buckets)
    together = -(-len(buckets) // MOST_EXCHANGES)
    starts = range(0, len(buckets), together)
    return [[shape for bucket in buckets[start : start + together] for shape in bucket] for start in starts]
