"""Every reducer there is, and buckets to try it on."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket, Slot
from laconic.comm.dryrun import simulate
from laconic.comm.exchange import Reduced
from laconic.comm.flat_tensors import flatten
from laconic.comm.ledger import Ledger
from laconic.reducers import discover
from laconic.reducers.base import Reducer
from laconic.strategies.strategy import render

EVERY = [example for kind in discover().values() for example in kind.examples()]
NAMES = [render(example) for example in EVERY]

Shapes = Sequence[tuple[int, ...]]
Memory = list[dict[str, Slot]]  # by rank, then by parameter


def tensors(shapes: Shapes, seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * size).to(dtype) for shape in shapes]


def names(shapes: Shapes) -> list[str]:
    return [f"p{index}" for index in range(len(shapes))]


def bucket(inputs: Sequence[Tensor], memory: dict[str, Slot], rank: int, world: int, step: int, feedback: bool) -> Bucket:
    flat, views = flatten([tensor.clone() for tensor in inputs])
    labels = [f"p{index}" for index in range(len(inputs))]
    slots = [memory.setdefault(label, {}) for label in labels]
    return Bucket(flat, views, labels, slots, rank, world, step, step, feedback=feedback)


def run(
    reducer: Reducer, inputs: Sequence[Sequence[Tensor]], memory: Memory, step: int, *, feedback: bool = False
) -> tuple[list[Reduced], Ledger]:
    """One exchange over all ranks; `inputs` by rank, then by parameter."""
    world, ledger = len(inputs), Ledger()
    buckets = [bucket(inputs[rank], memory[rank], rank, world, step, feedback) for rank in range(world)]
    results = simulate([reducer.reduce(one) for one in buckets], ledger)
    errors = [None if result.error is None else result.error.clone() for result in results]
    for result in results:
        result.finish()
    return [result._replace(error=error) for result, error in zip(results, errors, strict=True)], ledger


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_frozen_dataclass(reducer: Reducer) -> bool:
    return dataclasses.is_dataclass(reducer) and type(reducer).__dataclass_params__.frozen
