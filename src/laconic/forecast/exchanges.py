"""Exchanges on meta tensors: the rounds of each, and what they send."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from laconic.comm import dryrun
from laconic.comm.bucket import Bucket
from laconic.comm.collectives import AllGather, Traffic
from laconic.comm.dryrun import Round
from laconic.comm.exchange import Rounds
from laconic.comm.flat_tensors import unflatten
from laconic.local.parameter_averaging import chunks, mean
from laconic.reducers.base import Reducer


@dataclass(frozen=True)
class Sent:
    """One exchange: its rounds, in order, and how many numbers it averages."""

    rounds: tuple[Round, ...]
    like: tuple[torch.Size, ...]  # the shapes of what it averages

    @property
    def numbers(self) -> int:
        """So many are averaged."""
        return sum(shape.numel() for shape in self.like)

    @cached_property
    def traffic(self) -> Traffic:
        """Of all rounds together."""
        return sum((each.traffic for each in self.rounds), Traffic())


Known: TypeAlias = dict[tuple[object, ...], Sent]
"""Exchanges that were worked out before, by all that they depend on."""


class Exchanges:
    """Exchanges by one reducer; worked out once for all that are alike, or looked up in `known`.

    Bytes depend on the bucket's shapes and dtype, on the world, on which warm-ups are over, and on the place in its cycle
    where a reducer takes turns: on nothing else. A model repeats its layers, so few exchanges stand for many.
    """

    def __init__(self, reducer: Reducer, known: Known | None = None) -> None:
        self._reducer, self._starts = reducer, reducer.changes_at()
        self._cycle = math.lcm(*(each.exchange_cycle for each in _with_inner(reducer)))
        self._known: Known = {} if known is None else known

    def of(self, parameters: Mapping[str, Tensor], world: int, step: int, number: int) -> Sent:
        """Of one bucket, in the step after `step` completed ones, as the exchange of this number."""
        names, like = list(parameters), list(parameters.values())
        shapes = tuple((tensor.shape, tensor.stride()) for tensor in like)
        warm = (step >= start for start in self._starts)
        key = (self._reducer, shapes, like[0].dtype, world, number % self._cycle, *warm)
        if key not in self._known:
            flat = meta(sum(tensor.numel() for tensor in like), like[0].dtype)
            views, slots = unflatten(flat, like), [{} for _ in names]  # type: list[Tensor], list[dict[str, Tensor]]
            bucket = Bucket(flat, views, names, slots, rank=0, world=world, step=step, exchanges=number)
            rounds = dryrun.rounds_of(self._reducer.reduce(bucket), world)
            self._known[key] = Sent(tuple(rounds), tuple(tensor.shape for tensor in like))
        return self._known[key]


def means(tensors: Iterable[Tensor], world: int) -> Iterator[Sent]:
    """The exchanges, chunk by chunk, by which tensors are replaced by their means."""
    known: dict[tuple[int, torch.dtype], Sent] = {}  # nearly all chunks are full ones
    for chunk in chunks([meta(tensor.numel(), tensor.dtype) for tensor in tensors]):
        key = sum(piece.numel() for piece in chunk), chunk[0].dtype
        if key not in known:
            flat = meta(*key)
            known[key] = Sent(tuple(dryrun.rounds_of(mean(flat, 0, world), world)), (flat.shape,))
        yield known[key]


def gathers(tensors: Iterable[Tensor], world: int) -> Iterator[Sent]:
    """The exchanges, chunk by chunk, by which tensors are replaced by the first rank's."""
    for chunk in chunks([meta(tensor.numel(), tensor.dtype) for tensor in tensors]):
        flat = torch.cat(list(chunk))
        yield Sent(tuple(dryrun.rounds_of(_gather(flat), world)), (flat.shape,))


def meta(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers that have no values."""
    return torch.empty(count, dtype=dtype, device="meta")


def _gather(flat: Tensor) -> Rounds[None]:
    yield AllGather(flat)


def _with_inner(reducer: Reducer) -> list[Reducer]:
    return [reducer, *(found for part in reducer.inner_reducers() for found in _with_inner(part))]
