"""What a strategy keeps on a rank, beyond what DDP does: worked out on meta tensors."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from laconic.comm.bucket import Bucket, Slot
from laconic.comm.exchange import Exchange, Reduced
from laconic.local.anchors import anchor_dtype
from laconic.reducers.base import Reducer
from laconic.strategies.outer import Outer
from laconic.strategies.strategy import Averaging, Strategy

WORLD = 2  # what is kept does not depend on how many ranks there are


def extra_bytes(strategy: Strategy, parameters: Mapping[str, Tensor]) -> float:
    """Residuals, anchors, the outer optimizer's memory and outstanding deltas; of parameters that are averaged, their copy.

    Of several reducers, such as those of a warm-up and of what comes after it, the one that keeps most.
    """
    own = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
    found = kept_bytes(strategy.reducer, own)
    return found + (_between_bytes(strategy.averaging, own) if strategy.averaging is not None else 0.0)


def kept_bytes(reducer: Reducer, parameters: Mapping[str, Tensor]) -> float:
    """What a reducer keeps for parameters: a dry run fills its slots.

    >>> from laconic import ErrorFeedback, Quantized
    >>> kept_bytes(ErrorFeedback(Quantized(4)), {"w": torch.empty(10, 10, device="meta")})
    400.0
    """
    steps = [0, *reducer.changes_at()]
    return sum(max(_filled(reducer, each.shape, each.dtype, step) for step in steps) for each in parameters.values())


@lru_cache(maxsize=4096)
def _filled(reducer: Reducer, shape: torch.Size, dtype: torch.dtype, step: int) -> float:
    flat = torch.empty(shape.numel(), dtype=dtype, device="meta")
    slot: Slot = {}
    bucket = Bucket(flat, [flat.view(shape)], ["parameter"], [slot], 0, WORLD, step)
    _completed(reducer.reduce(bucket)).finish()
    return float(sum(tensor.nbytes for tensor in slot.values()))


def _completed(exchange: Exchange) -> Reduced:
    """The exchange, with answers of no meaning."""
    try:
        collective = next(exchange)
        while True:
            collective = exchange.send(collective.blank(WORLD))
    except StopIteration as stop:
        result: Reduced = stop.value
        return result


def _between_bytes(averaging: Averaging, own: Mapping[str, Tensor]) -> float:
    deltas = averaging.deltas
    if deltas is None:
        return float(sum(each.nbytes for each in own.values())) if averaging.atomic else 0.0
    anchors = {name: torch.empty_like(each, dtype=anchor_dtype(each.dtype)) for name, each in own.items()}
    size = float(sum(anchor.nbytes for anchor in anchors.values()))
    fixed = averaging.fixed
    period = (fixed.fixed_period if fixed is not None else None) or 1
    at_once = -(-deltas.delay * deltas.fragments // period)  # fragments that are outstanding, each twice: sent, and as it left
    held = kept_bytes(deltas.reducer, anchors) + 2 * size * at_once / deltas.fragments
    return held + (0.0 if deltas.offload else size + _outer_bytes(deltas.outer, list(anchors.values())))


def _outer_bytes(outer: Outer, anchors: Sequence[Tensor]) -> float:
    """What the outer optimizer keeps: one step of it, on as many parameters of one number each."""
    size = sum(anchor.numel() for anchor in anchors)
    sample = nn.Parameter(torch.zeros(64))
    optimizer = outer.build([{"params": [sample], "rate": 1.0}])
    sample.grad = torch.ones(64)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[sample].values() if isinstance(value, Tensor) and value.numel() == 64)
    return kept / 64 * size
