"""`ddp()` through our hook is DDP without a hook, bit for bit, in every mode of DDP."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests.live import ranks
from tests.models import Odd, build, images, same_bits, weights

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {"accumulate": 3},
    "find_unused": {"find_unused_parameters": True, "unused": True},
    "static_graph": {"static_graph": True},
    "static_graph_unused": {"static_graph": True, "unused": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "bucket_view_no_sync": {"gradient_as_bucket_view": True, "accumulate": 2},
    "bf16": {"dtype": torch.bfloat16},
    "bf16_bucket_view": {"dtype": torch.bfloat16, "gradient_as_bucket_view": True},
}


def train(rank: int, attached: bool, steps: int, options: dict[str, Any]) -> tuple[list[list[Tensor]], int]:
    """Gradients and weights after every step, and the number of buckets."""
    options = dict(options)
    accumulate, dtype, unused = (
        options.pop(key, other) for key, other in [("accumulate", 1), ("dtype", torch.float32), ("unused", False)]
    )
    model = build(lambda: Odd(dtype, unused), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    run = laconic.attach(model, optimizer, "ddp()") if attached else None
    history: list[list[Tensor]] = []
    for step in range(steps):
        for part in range(accumulate):
            batch = images(rank, step * accumulate + part, dtype)
            if part < accumulate - 1:
                with model.no_sync():
                    torch.autograd.backward(loss(model, batch))
            else:
                torch.autograd.backward(loss(model, batch))
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        history.append([*gradients, *weights(model)])
    buckets = len(run.layout()) if run else 0
    if run:
        assert run.stats().exchanges == run.stats().steps == steps
        run.detach()
    return history, buckets


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).float().square().mean()
    return value


def compare(rank: int, steps: int, options: dict[str, Any]) -> int:
    plain, _ = train(rank, False, steps, options)
    ours, buckets = train(rank, True, steps, options)
    for step, (left, right) in enumerate(zip(plain, ours, strict=True)):
        assert len(left) == len(right)
        assert same_bits(left, right), f"step {step} differs"
    assert all(t.isfinite().all() for t in ours[-1]), "a diverged run shows nothing"
    return buckets


QUICK = [*((mode, 3) for mode in MODES), ("plain", 2)]


@pytest.mark.parametrize(("mode", "world"), QUICK)
def test_bit_equal_to_ddp_without_a_hook(mode: str, world: int) -> None:
    assert min(ranks(world, compare, 12, MODES[mode])) >= 6


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_bit_equal_for_longer(mode: str, world: int) -> None:
    assert min(ranks(world, compare, 50, MODES[mode])) >= 6
