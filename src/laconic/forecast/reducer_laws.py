"""Whether a reducer obeys the laws that training relies on: all ranks in one process, without a network."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import lcm

import torch
from torch import Tensor

from laconic.comm import dryrun
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.collectives import AllReduce, Collective, Traffic
from laconic.comm.exchange import Exchange, Reduced, check_collective
from laconic.comm.flat_tensors import unflatten
from laconic.comm.ledger import Ledger
from laconic.reducers.base import Reducer, checked

# A number, nothing, an odd count, several parameters, and one of several blocks of any of laconic's codes.
MODELS: tuple[tuple[tuple[int, ...], ...], ...] = (((1,),), ((0,),), ((1001,),), ((), (33, 7), (0,), (5,)), ((97, 130), (61,)))
TOLERANCE = (
    1e-4  # of what is lost without a word, in units of the largest number: a gradient that is rounded to bf16 loses 2e-3
)
FEWEST = 4  # exchanges of each model
SOON, LATE = 16, 64  # exchanges after which it is counted what has arrived
QUICK = 2000  # numbers of a model that is exchanged so often


def check_reducer(reducer: Reducer, world: int = 3, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Raise an error that says which law a reducer breaks, if it breaks one: run this on a reducer of your own.

    All ranks run in this process, by `simulate`, on some small models (one number, none, an odd count, several blocks), for two
    cycles of exchanges each, and as many again when its warm-up is over. A reducer inside of it is checked first. The laws:

    - All ranks get the same mean, bit for bit, whether or not they ask for the error. It has the bucket's length and dtype.
    - The mean plus the mean of the ranks' errors is the true mean, but for rounding. Without an `error`, `ErrorFeedback` takes
      nothing for lost: then the mean is the true mean. A reducer with memory of its own ("own") that returns no error may keep
      there what it has not sent; of such a one this isn't checked.
    - Zeros in, zeros out.
    - Where a number of one rank is not finite, no rank's mean is, and no memory moves.
    - Every number arrives in the end: with the same gradients again and again, and errors added to them, more numbers have
      arrived after 64 exchanges than after 16, or all.
    - Memory that it declares as "shared" has the same bits on all ranks.
    - The bytes that `predict` works out are those that are sent, and are the same after each `exchange_cycle`.

    Not: whether training with it gets anywhere.

    Arguments:
      `reducer`: an instance.
      `world`: how many ranks, at least 1. Default 3.
      `dtype`: of the numbers. Default torch.float32.
      `seed`: of the numbers. Default 0.

    >>> from dataclasses import dataclass
    >>> import laconic
    >>> laconic.check_reducer(laconic.PowerSGD(2))
    >>> @dataclass(frozen=True)
    ... class Half(laconic.Reducer):
    ...     def reduce(self, bucket):
    ...         mean = yield laconic.AllReduce(bucket.flat * 0.5)
    ...         return laconic.Reduced(mean)
    >>> laconic.check_reducer(Half())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Half loses numbers and returns no error: its mean is off by up to ..., and ErrorFeedback would believe that...
    """
    checked(reducer, "reducer")
    if type(world) is not int or world < 1:
        raise ValueError(f"world must be a number of ranks, at least 1, got {world!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, got {dtype}")
    for inner in reducer.inner_reducers():
        check_reducer(inner, world, dtype=dtype, seed=seed)
    cycle = lcm(reducer.exchange_cycle, *(inner.exchange_cycle for inner in reducer.inner_reducers()))
    exchanges = max(FEWEST, 2 * cycle)
    steps = [*range(exchanges)]
    if (over := max(reducer.changes_at(), default=0)) > 0:
        first = -(-max(over, exchanges) // cycle) * cycle  # where a cycle begins
        steps += range(first, first + exchanges)
    for shapes in MODELS:
        model = _Model(reducer, [torch.Size(shape) for shape in shapes], world, dtype, torch.Generator().manual_seed(seed))
        for step in steps:
            try:
                model.check(step, step % cycle)
            except Exception as error:
                error.add_note(f"laconic.check_reducer: {world} ranks, parameters of shapes {list(shapes)}, exchange {step}")
                raise
        model.check_arrival(steps[-1] + 1)


@dataclass
class _Model:
    """Parameters of these shapes on all ranks, each with the reducer's memory."""

    reducer: Reducer
    shapes: Sequence[torch.Size]
    world: int
    dtype: torch.dtype
    draw: torch.Generator
    memory: list[list[Slot]] = field(init=False)
    traffic: dict[tuple[object, ...], Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.no_memory()

    @property
    def name(self) -> str:
        return type(self.reducer).__name__

    @property
    def numbers(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def no_memory(self) -> list[list[Slot]]:
        return [[{} for _ in self.shapes] for _ in range(self.world)]

    def check(self, step: int, place: int) -> None:
        """One exchange, `place` in the cycle, by all laws; the memory moves on."""
        given = [torch.randn(self.numbers, generator=self.draw).to(self.dtype) for _ in range(self.world)]
        zeros = [torch.zeros_like(flat) for flat in given]
        if any(bool(result.mean.any()) for result in self.run(zeros, self.no_memory(), step).results):
            raise ValueError(f"{self.name} makes of zeros on all ranks a mean that is not zero")
        for broken in self.with_one_broken(given, place):
            self.check_broken(broken, step)
        plain = self.run(given, copy.deepcopy(self.memory), step, feedback=False)
        ran = self.run(given, self.memory, step)
        self.check_means([*ran.results, *plain.results])
        self.check_errors(given, ran)
        self.check_shared()
        self.check_bytes(ran.traffic, step, place)

    def run(self, given: Sequence[Tensor], memory: list[list[Slot]], step: int, *, feedback: bool = True) -> "_Ran":
        buckets = [
            self.bucket(flat.clone(), slots, rank, step, feedback)
            for rank, (flat, slots) in enumerate(zip(given, memory, strict=True))
        ]
        ledger, wire = Ledger(), [self.dtype]
        try:
            results = dryrun.simulate([_noting(self.reducer.reduce(bucket), wire) for bucket in buckets], ledger)
        except AssertionError as error:
            if not str(error).startswith("ranks "):  # of `simulate`, where they differ in what they yield
                raise
            raise ValueError(f"{self.name}: every rank must yield the same collectives, of the same shapes: {error}") from error
        errors = [None if result.error is None else result.error.clone() for result in results]  # `finish` may write there
        for result in results:
            result.finish()
        results = [result._replace(error=error) for result, error in zip(results, errors, strict=True)]
        return _Ran(results, ledger.total, max(torch.finfo(each).eps for each in wire))

    def bucket(self, flat: Tensor, slots: Sequence[Slot], rank: int, step: int, feedback: bool) -> Bucket:
        like = [torch.empty(shape, device="meta") for shape in self.shapes]
        names = [f"parameter {place}" for place in range(len(like))]
        return Bucket(flat, unflatten(flat, like), names, slots, rank, self.world, step, step, feedback=feedback)

    def with_one_broken(self, given: Sequence[Tensor], place: int) -> Iterator[list[Tensor]]:
        """The same, with a number that is not finite, of another rank and at another place in each exchange."""
        if self.numbers:
            values = (float("nan"), float("inf"), float("-inf"))
            for where, value in zip((place, self.numbers // 2, self.numbers - 1), values, strict=True):
                broken = [flat.clone() for flat in given]
                broken[where % self.world][where % self.numbers] = value
                yield broken

    def check_broken(self, given: Sequence[Tensor], step: int) -> None:
        memory = copy.deepcopy(self.memory)
        results = self.run(given, memory, step).results
        bad = next(float(flat[~flat.isfinite()]) for flat in given if not flat.isfinite().all())
        blind = [rank for rank, result in enumerate(results) if bool(result.mean.isfinite().all())]
        if blind:
            raise ValueError(
                f"{self.name} hides a number that is not finite: one rank had {bad:g}, and the mean on rank {blind[0]} is "
                "finite; every rank must see it, by a mean that is not finite somewhere: send one number more, "
                "0 * bucket.flat.sum().view(1), and add what arrives of it to the mean"
            )
        if key := _spoilt(self.memory, memory):
            raise ValueError(
                f"{self.name}: one rank had {bad:g}, and memory {key!r} has changed; it must stay as it was where the mean is "
                "not finite: write it by torch.where(good, new, old)"
            )

    def check_means(self, results: Sequence[Reduced]) -> None:
        first = results[0].mean
        for place, result in enumerate(results):
            if result.mean.dtype != self.dtype:
                raise ValueError(f"{self.name}: the mean must be of the bucket's dtype, {self.dtype}, got {result.mean.dtype}")
            if not _same(result.mean, first):
                if place >= self.world:
                    raise ValueError(
                        f"{self.name}: the mean must be the same whether or not bucket.feedback is set, bit for bit"
                    )
                off = float((result.mean.double() - first.double()).abs().max())
                raise ValueError(
                    f"{self.name}: all ranks must have the same mean, bit for bit, or replicas drift apart; rank {place}'s "
                    f"differs from rank 0's by up to {off:.2g}"
                )

    def check_errors(self, given: Sequence[Tensor], ran: "_Ran") -> None:
        kept = [result.error for result in ran.results]
        silent = all(error is None for error in kept)
        if not self.numbers or (silent and "own" in self.reducer.all_memory().values()):
            return
        whole = torch.stack([flat.double() for flat in given])
        left = torch.stack([torch.zeros_like(whole[0]) if error is None else error.view(-1).double() for error in kept]).mean(0)
        off = float((ran.results[0].mean.view(-1).double() + left - whole.mean(0)).abs().max())
        rounding = ran.epsilon if ran.epsilon > TOLERANCE else 0.0  # of sums on the wire, which are nobody's error
        if off <= ((2 + self.world) * rounding + TOLERANCE) * float(whole.abs().max()):
            return
        if silent:
            raise ValueError(
                f"{self.name} loses numbers and returns no error: its mean is off by up to {off:.2g}, and ErrorFeedback would "
                "believe that nothing was lost; return laconic.Reduced(mean, error), where error is what was not sent"
            )
        raise ValueError(
            f"{self.name}: the mean plus the mean of the ranks' errors must be the true mean, and is off by up to {off:.2g}; "
            "an error is the rank's input minus what the others decoded from it"
        )

    def check_arrival(self, first: int) -> None:
        """With the same gradients again and again, and what was not sent added to them: every number arrives in the end."""
        if self.numbers > QUICK:
            return
        given = [torch.randn(self.numbers, generator=self.draw).to(self.dtype) for _ in range(self.world)]
        left, memory = [torch.zeros_like(flat) for flat in given], self.no_memory()
        # Of those whose mean is nearly zero nobody can tell.
        arrived, soon = torch.stack([flat.double() for flat in given]).mean(0).abs() < 0.1, 0
        for exchange in range(LATE):
            soon = int(arrived.sum()) if exchange == SOON else soon
            results = self.run([flat + rest for flat, rest in zip(given, left, strict=True)], memory, first + exchange).results
            left = [result.error.view(-1) for result in results if result.error is not None]
            if len(left) < self.world:
                return  # nothing is lost, or the reducer keeps by itself what it has not sent
            arrived |= results[0].mean.view(-1) != 0
            if bool(arrived.all()):
                return
        if int(arrived.sum()) == soon:
            raise ValueError(
                f"{self.name} never sends {self.numbers - soon} of {self.numbers} numbers, not in {LATE} exchanges: they are "
                "in its error each time, and no parameter moves by them; choose others each time, such as by bucket.exchanges"
            )

    def check_shared(self) -> None:
        declared = self.reducer.all_memory()
        for slots in self.memory[1:]:
            for mine, first in zip(slots, self.memory[0], strict=True):
                for key in (key for key in {**mine, **first} if declared.get(key) == "shared"):
                    if key not in mine or key not in first or not _same(mine[key], first[key]):
                        raise ValueError(f"{self.name}: memory {key!r} is declared as 'shared', and ranks have different bits")

    def check_bytes(self, sent: Traffic, step: int, place: int) -> None:
        flat = torch.empty(self.numbers, dtype=self.dtype, device="meta")
        slots: list[Slot] = [{} for _ in self.shapes]
        predicted = dryrun.predict(self.reducer.reduce(self.bucket(flat, slots, 0, step, False)), self.world)
        if predicted != sent:
            raise ValueError(
                f"{self.name}: predict works out {predicted.wire_bytes} bytes in {predicted.collectives} collectives, and "
                f"{sent.wire_bytes} in {sent.collectives} were sent; what is sent must depend on shapes alone"
            )
        alike = (place, *(step >= start for start in self.reducer.changes_at()))
        if self.traffic.setdefault(alike, sent) != sent:
            raise ValueError(
                f"{self.name} sends {sent.wire_bytes} bytes in exchange {step}, and {self.traffic[alike].wire_bytes} in an "
                f"earlier one at the same place of its cycle; set exchange_cycle, which is {self.reducer.exchange_cycle}"
            )


@dataclass(frozen=True)
class _Ran:
    results: Sequence[Reduced]
    traffic: Traffic
    epsilon: float  # of the coarsest type that was summed on the wire


def _noting(rounds: Exchange, wire: list[torch.dtype]) -> Exchange:
    """The same exchange; adds the types that are summed on the wire."""
    try:
        collective: Collective = next(rounds)
        while True:
            check_collective(collective, rounds)
            if isinstance(collective, AllReduce) and collective.tensor.dtype.is_floating_point:
                wire.append(collective.tensor.dtype)
            collective = rounds.send((yield collective))
    except StopIteration as stop:
        result: Reduced = stop.value
        return result


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bits."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _spoilt(before: Sequence[Sequence[Slot]], after: Sequence[Sequence[Slot]]) -> str | None:
    """The key of a memory that is not as it was, or is new and not finite."""
    for then, now in zip(chain(*before), chain(*after), strict=True):
        for key, value in now.items():
            if not (_same(then[key], value) if key in then else bool(value.isfinite().all())):
                return key
    return None
