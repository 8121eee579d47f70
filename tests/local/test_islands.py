"""Local updates of sharded models: each shard is averaged over the islands, and the shards of a replica are treated alike."""

import warnings

import pytest
import torch
from torch import nn

import laconic
from laconic.reducers import discover
from laconic.run.run import engine_of
from laconic.strategies.strategy import render
from tests.islands import (
    Inner,
    adam,
    attached,
    same_on_islands,
    sharded,
    shards,
    step_once,
)
from tests.live import ranks
from tests.models import same_bits
from tests.run.test_resume import RECIPES

STEPS = 20


def fit(rank: int, text: str, inner: Inner, steps: int = 12) -> list[torch.Tensor]:
    with attached(2, text, inner) as (model, optimizer, _):
        for step in range(steps):
            step_once(model, optimizer, rank, step)
    return shards(model)


def pair(rank: int, one: str, other: str, inner: Inner, exact: bool) -> None:
    left, right = fit(rank, one, inner), fit(rank, other, inner)
    pairs = zip(left, right, strict=True)
    assert same_bits(left, right) if exact else all(torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in pairs)


LIMITS = [
    ("diloco(3, outer_lr=1.0, outer_momentum=0.0, reducer=Cast('bf16'))", "local_sgd(3, reducer=Cast('bf16'))", adam, True),
    ("diloco(3, outer_lr=1.0, outer_momentum=0.0)", "local_sgd(3)", adam, False),
    ("streaming_diloco(4, fragments=1, delay=0, blend=0.0)", "diloco(4, reducer=Quantized(8))", adam, True),
    ("local_sgd(4, moments='average')", "local_sgd(4, moments={'exp_avg': 4, 'exp_avg_sq': 4})", adam, True),
    ("hierarchical_sgd({3: 2})", "local_sgd(3)", adam, True),
]  # fmt: skip


SLOW = [pytest.param(*limit, marks=pytest.mark.soak) for limit in LIMITS[2:]]


@pytest.mark.parametrize(("one", "other", "inner", "exact"), [*LIMITS[:2], *SLOW], ids=[limit[0] for limit in LIMITS])
def test_a_limit_is_reached(one: str, other: str, inner: Inner, exact: bool) -> None:
    ranks(4, pair, one, other, inner, exact)


def every(rank: int, texts: list[str]) -> None:
    """Islands are equal where they must be, the loss falls, and predicted bytes are counted ones."""
    for text in texts:
        model, optimizer, mesh = sharded(2, adam)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*never began")
            strategy = laconic.strategy(text)
            with laconic.attach(model, optimizer, strategy, mesh=mesh, check_every=1) as run:
                losses = []
                for step in range(STEPS):
                    losses.append(step_once(model, optimizer, rank, step % 4))
                    if not engine_of(run).drifted:
                        assert same_on_islands(shards(model), mesh), f"{text}, step {step}"
                deltas = engine_of(run).local.deltas
                if deltas is not None:
                    deltas.complete_all()  # `predict` counts all rounds of what has left
                if "QSR" not in text:
                    expected = laconic.predict(strategy, model, world_size=2, step=0, steps=STEPS, sizes={"node": 2})
                    sent = run.stats().wire_bytes
                    extra = moments(strategy, model)
                    assert sent == expected.wire_bytes + extra * run.stats().syncs, f"{text}: {sent} and {expected}"
        assert same_on_islands(shards(model), mesh), text
        begun, ended = torch.tensor([sum(losses[:4]), sum(losses[-4:])]).tolist()
        assert ended < begun, f"{text}: the loss went from {begun} to {ended}"


def moments(strategy: laconic.Strategy, model: nn.Module) -> int:
    """What `moments="average"` sends, which `predict` does not count: two of each parameter; over 2 islands, once its bytes."""
    if strategy.averaging is None or strategy.averaging.moments != "average":
        return 0
    return sum(2 * part.nbytes for part, p in zip(shards(model), model.parameters(), strict=True) if p.requires_grad)


TAKERS = ["ddp(reducer={})", "diloco(4, reducer={})", "streaming_diloco(4, fragments=2, delay=1, reducer={})"]
EXAMPLES = [render(one) for kind in discover().values() for one in kind.examples() if one.takes_shards]
REDUCERS = [TAKERS[place % 3].format(text) for place, text in enumerate(EXAMPLES)]
OTHERS = [recipe.replace("={}", "=Quantized(8)").format() for recipe in RECIPES if "hierarchical" not in recipe]
OTHERS.append("hierarchical_sgd({2: 'node', 4: 'world'})")
ALL = [*OTHERS, "int8(warmup=3)", "fp8()", "bf16()", "fp16()", "topk(ratio=0.1)", "randomk(ratio=0.2)", "sign()", "int4()"]


QUICK = [text for text in ALL if text.split("(")[0] in ("streaming_diloco", "post_local_sgd", "local_adam", "int8", "powersgd")]


def test_strategies_on_islands() -> None:
    ranks(4, every, QUICK)


@pytest.mark.soak
@pytest.mark.parametrize("text", [text for text in dict.fromkeys([*ALL, *REDUCERS]) if text not in QUICK])
def test_every_strategy_on_islands(text: str) -> None:
    ranks(4, every, [text])
