"""What a reducer is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket
from laconic.comm.exchange import Exchange, checked_reduce
from laconic.kernels.kernel import Kernel


def checked(reducer: object, name: str) -> "Reducer":
    """Refuse what can't be a part of a strategy: its text must say all that makes it differ from another."""
    if not isinstance(reducer, Reducer):
        hint, inside = "", getattr(reducer, "reducer", None)
        if isinstance(inside, Reducer):
            hint = f", which is a strategy; give its reducer, {inside!r}"
        elif isinstance(reducer, type) and issubclass(reducer, Reducer):
            hint = f"; give an instance, {reducer.__name__}()"
        raise TypeError(f"{name} must be a Reducer such as Cast('bf16'), got {reducer!r}{hint}")
    checked_frozen(reducer)
    name = type(reducer).__name__
    if not isinstance(reducer.memory, Mapping):
        raise TypeError(f"{name}.memory must map keys to 'own' or 'shared', as {{'last': 'own'}}, got {reducer.memory!r}")
    for key, kind in reducer.memory.items():
        if kind not in ("own", "shared"):
            raise ValueError(f"{name}.memory[{key!r}] must be 'own' (each rank has another) or 'shared', got {kind!r}")
    return reducer


def checked_frozen(part: object) -> None:
    """Refuse a part whose text would not show all of it, or that could change after ranks have compared it."""
    kind = type(part)
    if not is_dataclass(part) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # a dataclass has it
        raise TypeError(f"{kind.__name__} must be a frozen dataclass: put @dataclass(frozen=True) above it")


def checked_steps(steps: object, name: str) -> int:
    """Refuse what is no number of steps."""
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"{name} must be a whole number of steps, got {steps!r}")
    if steps < 0:
        raise ValueError(f"{name} must be 0 or more steps, got {steps}")
    return steps


def checked_rank(rank: object, min_compression_rate: object) -> None:
    """Refuse what is no rank, and a rate that would never or always compress."""
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a whole number, at least 1, got {rank!r}")
    if not isinstance(min_compression_rate, int | float) or min_compression_rate <= 0:
        raise ValueError(f"min_compression_rate must be above 0, got {min_compression_rate!r}")


def checked_ratio(ratio: object) -> float:
    """Refuse what is no share of the entries."""
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1 (all entries), got {ratio!r}")
    return ratio


def finite(tensor: Tensor) -> Tensor:
    """Whether all numbers are finite, as a tensor: in one pass, without a copy, without asking the device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()


Memory: TypeAlias = Literal["own", "shared"]
"""Whose a reducer's memory is: "own", each rank has another, or "shared", all ranks have the same bits."""


class Reducer(ABC):
    """How a bucket is averaged over the ranks: a frozen dataclass of hyperparameters, and one generator.

    Derive a frozen dataclass from it and write `reduce`, which yields collectives and returns the mean. It does no I/O, knows
    no process group, and never reads a value into Python, so that the same lines run in DDP's backward, in `simulate` and, on
    meta tensors, in `predict`. Its memory is in `bucket.slots`, written by the function that it returns as `finish`. These
    class attributes have defaults:

    - `memory`: the keys of its slots, and whose each is: "own", each rank has another, or "shared", the same bits on all.
    - `exchange_cycle`: exchanges after which it sends as much again. Default 2.
    - `writes_residual`: whether it writes its error into `bucket.residual`, where that is given. Default False.
    - `takes_shards`: whether a bucket may hold this rank's shards of parameters instead of whole ones. Default True.

    >>> from dataclasses import dataclass
    >>> import torch, laconic
    >>> @dataclass(frozen=True)
    ... class Halves(laconic.Reducer):
    ...     def reduce(self, bucket):
    ...         mean = yield laconic.AllReduce(bucket.flat.bfloat16())
    ...         return laconic.Reduced(bucket.flat.copy_(mean))
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # 2(N-1)/N * 2n
    >>> laconic.predict(laconic.ddp(reducer=Halves()), layer, world_size=4).wire_bytes
    3000000
    """

    # The keys of its slots, and whose each is. On another number of ranks every rank gets the mean of what the old ones had
    # for themselves, and what they shared as it is.
    memory: ClassVar[Mapping[str, Memory]] = {}
    # Exchanges after which it sends as much again: `predict` works out no more of them. One that takes more turns says so.
    exchange_cycle: ClassVar[int] = 2
    # Whether it writes its error into `bucket.residual`, where that is given, and returns it as `Reduced.error`.
    writes_residual: ClassVar[bool] = False
    # Whether a bucket may hold this rank's shards of parameters instead of whole ones.
    takes_shards: ClassVar[bool] = True

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "reduce" in vars(cls):  # whoever calls it, `simulate`'s user or a reducer around it, is told what is wrong with it
            cls.reduce = _checked(vars(cls)["reduce"])  # type: ignore[method-assign, assignment]

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Exchange:
        """Average `bucket.flat` over the group: yield collectives, return a `Reduced`."""

    def is_plain(self, step: int) -> bool:
        """Whether in `step` it is one all-reduce of the bucket as it is, whose answer is the mean, and remembers nothing."""
        return False

    @property
    def warmup_steps(self) -> int:
        """Steps before it does what it is for."""
        return 0

    def changes_at(self) -> list[int]:
        """At which steps it, or a reducer that it is made of, begins to send something else."""
        return [step for part in self.inner_reducers() for step in part.changes_at()]

    def kernels(self) -> list[Kernel]:
        """What it works out over many numbers and can have compiled; so do the reducers that it is made of."""
        return [kernel for part in self.inner_reducers() for kernel in part.kernels()]

    def inner_reducers(self) -> list["Reducer"]:
        """The reducers that it is made of: in its fields, and in tuples and mappings there."""
        assert is_dataclass(self), "a reducer is a frozen dataclass"
        return _reducers([getattr(self, part.name) for part in fields(self)])

    def all_memory(self) -> dict[str, Memory]:
        """Its own memory, what it inherits, and that of the reducers that it is made of."""
        found: dict[str, Memory] = {}
        for base in reversed(type(self).__mro__):
            found |= vars(base).get("memory", {})
        for part in self.inner_reducers():
            found |= part.all_memory()
        return found

    @classmethod
    def examples(cls) -> Iterator[Self]:
        """Instances worth trying: the law tests and benchmarks run every one of them."""
        yield cls()


def _checked(reduce: Callable[[Any, Bucket], Exchange]) -> Callable[[Any, Bucket], Exchange]:
    """The same, and what a reducer may not do is said with its class."""

    @wraps(reduce)
    def checked(self: Reducer, bucket: Bucket) -> Exchange:
        flat, name = bucket.flat, f"{type(self).__name__}.reduce"
        rounds = checked_reduce(partial(reduce, self, bucket), flat.numel(), name, meta=flat.is_meta)
        rounds.__qualname__ = name  # type: ignore[attr-defined]  # a generator has it
        return rounds

    return checked


def _reducers(values: Iterable[object]) -> list[Reducer]:
    found: list[Reducer] = []
    for value in values:
        if isinstance(value, Reducer):
            found.append(value)
        elif isinstance(value, Mapping):
            found += _reducers(value.values())
        elif isinstance(value, list | tuple):
            found += _reducers(value)
    return found
