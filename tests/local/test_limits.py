"""Local updates where they must equal DDP, each other, or the plain optimizer."""

import copy
import warnings
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.local import fragments
from tests.live import ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights

Inner: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fit(rank: int, text: str | None, steps: int, inner: Inner = sgd) -> list[list[Tensor]]:
    """The weights after every step, and after leaving; without a strategy, plain DDP's."""
    model = build(chain)
    optimizer = inner(model)
    history: list[list[Tensor]] = []

    def loop() -> None:
        for step in range(steps):
            model(vectors(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(weights(model))

    if text is None:
        loop()
    else:
        with laconic.attach(model, optimizer, text):
            loop()
    return [*history, weights(model)]


def close(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in zip(left, right, strict=True))


def pair(rank: int, one: str, other: str | None, steps: int, inner: Inner, exact: bool) -> None:
    ours, theirs = fit(rank, one, steps, inner), fit(rank, other, steps, inner)
    last = ours[-1], theirs[-1]
    assert same_bits(*last) if exact else close(*last)
    assert not close(ours[0], ours[-1]), "something was learnt"


LIMITS = [
    # what, must equal (None: plain DDP), optimizer, to the bit
    ("local_sgd(1)", None, sgd, False),
    ("post_local_sgd(warmup=100, period=3)", None, adam, True),
    ("post_local_sgd(warmup=2, period=3, subgroup='node')", None, adam, True),
    ("diloco(3, outer_lr=1.0, outer_momentum=0.0)", "local_sgd(3)", adam, False),
    ("slowmo(3, beta=0.0, alpha=1.0, moments='keep')", "local_sgd(3)", momentum, False),
    ("local_sgd(3, reducer=Cast('bf16'))", "diloco(3, outer_lr=1.0, outer_momentum=0.0, reducer=Cast('bf16'))", adam, True),
    ("streaming_diloco(4, fragments=1, delay=0, blend=0.0)", "diloco(4, reducer=Quantized(8))", adam, True),
    ("diloco(3, offload=True)", "diloco(3)", adam, True),
    ("local_sgd(4, moments='average')", "local_sgd(4, moments={'exp_avg': 4, 'exp_avg_sq': 4})", adam, True),
    ("local_sgd(period=QSR(base=3, alpha=1e-9))", "local_sgd(3)", adam, True),
    ("local_adam(3, warmup=0, refresh=0, reducer=Exact(), second_moment='local')", "local_sgd(3)", adam, False),
    ("local_adam(1, warmup=0, refresh=1, reducer=Exact(), warmup_reducer=Exact())", None, adam, False),
    ("local_adam(3, warmup=100, warmup_reducer=Exact())", None, adam, True),
    ("ddp(reducer=Momentum(Exact()))", None, momentum, False),
]  # fmt: skip


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("one", "other", "inner", "exact"), LIMITS, ids=[limit[0] for limit in LIMITS])
def test_a_limit_is_reached(one: str, other: str | None, inner: Inner, exact: bool, world: int) -> None:
    ranks(world, quietly, one, other, 12, inner, exact)


def quietly(rank: int, *args: object) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*never began")
        pair(rank, *args)  # type: ignore[arg-type]


def test_one_level_of_a_hierarchy_is_a_period() -> None:
    ranks(4, pair, "hierarchical_sgd({3: 4})", "local_sgd(3)", 8, adam, True)


@pytest.mark.parametrize("text", ["local_sgd(3)", "post_local_sgd(2, 3)", "hierarchical_sgd({2: 1})"])
def test_one_rank_is_the_plain_optimizer(text: str) -> None:
    ranks(1, pair, text, None, 8, adam, True)


def nesterov_by_hand(rank: int) -> None:
    """What torch's own SGD makes of the mean of the replicas' deltas, in many buckets."""
    model = build(chain)
    optimizer = adam(model)
    anchors = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    fragments.BUCKET_BYTES = 1100
    try:
        run = laconic.attach(model, optimizer, "diloco(3, outer_momentum=0.9)")
    finally:
        fragments.BUCKET_BYTES = 25 << 20
    with run:
        for step in range(12):
            model(vectors(rank, step)).square().sum().backward()
            if step % 3 == 2:  # the optimizer's step will be followed by a sync: see first where it gets
                expected = plain_step(model, optimizer)
                for anchor, parameter in zip(anchors, expected, strict=True):
                    anchor.grad = (anchor.detach() - parameter) / dist.get_world_size()
                    dist.all_reduce(anchor.grad)
                outer.step()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                assert close([a.detach() for a in anchors], [p.detach() for p in model.parameters()])
    assert run.stats().syncs == 4


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Where the optimizer would get, without going there."""
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    other = torch.optim.AdamW(copies, lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, parameter in zip(copies, model.parameters(), strict=True):
        mine.grad = parameter.grad
    other.step()
    return [mine.detach() for mine in copies]


def test_the_outer_optimizer_is_torchs_nesterov() -> None:
    ranks(2, nesterov_by_hand)


def blocks(rank: int) -> None:
    history = fit(rank, "hierarchical_sgd({2: 2, 4: 4})", 8, adam)
    rows: list[object] = [None] * 4
    for step, now in enumerate(history[:-1], 1):
        dist.all_gather_object(rows, [w.sum().item() for w in now])
        kinds = len({repr(row) for row in rows})
        assert kinds == {0: 1, 2: 2}.get(step % 4, 4), (step, kinds)
        if step % 4 == 2:
            assert rows[0] == rows[1]
            assert rows[2] == rows[3]


def test_blocks_agree_when_they_are_due() -> None:
    ranks(4, blocks)


def slow(rank: int) -> None:
    """SlowMo, from the paper's formulas on numbers: u = beta u + (x0 - mean) / rate; x0 -= alpha rate u.

    The ranks' rates decay differently; that of the first holds for all.
    """
    parameter = nn.Linear(1, 1, bias=False)
    parameter.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(parameter.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, (0.8, 0.9)[rank])
    locals_, moments = [1.0, 1.0], [0.0, 0.0]
    anchor, u, rates = 1.0, 0.0, [0.1, 0.1]
    with laconic.attach(parameter, optimizer, "slowmo(2, beta=0.6, alpha=0.9)"):
        for step in range(8):
            gradients = [(r + 1) * x for r, x in enumerate(locals_)]
            moments = [0.5 * m + g for m, g in zip(moments, gradients, strict=True)]
            locals_ = [x - rate * m for x, rate, m in zip(locals_, rates, moments, strict=True)]
            if step % 2:
                u = 0.6 * u + (anchor - sum(locals_) / 2) / rates[0]
                anchor -= 0.9 * rates[0] * u
                locals_, moments = [anchor, anchor], [0.0, 0.0]
            torch.autograd.backward((0.5 * (rank + 1) * parameter.weight**2).sum())
            optimizer.step()
            optimizer.zero_grad()
            assert parameter.weight.item() == pytest.approx(locals_[rank], rel=1e-5)
            scheduler.step()
            rates = [rates[0] * 0.8, rates[1] * 0.9]


def test_slow_momentum_is_in_units_of_the_learning_rate() -> None:
    ranks(2, slow)


def identical(rank: int) -> None:
    from laconic.comm.group import TorchGroup
    from laconic.comm.ledger import Ledger
    from laconic.local.parameter_averaging import ParameterAverager

    torch.manual_seed(1)
    tensors = {
        "large": torch.randn(3_000_001).bfloat16(),
        "half": torch.randn(33).half(),
        "scalar": torch.tensor(0.3).bfloat16(),
        "empty": torch.empty(0, dtype=torch.bfloat16),
        "image": torch.randn(4, 3, 5, 5).bfloat16().to(memory_format=torch.channels_last),
        "every second": torch.randn(6, 8).bfloat16()[:, ::2],  # one flat view, with gaps
        "gaps": torch.randn(6, 9).bfloat16()[:, ::2],  # no flat view at all
        "counter": torch.tensor(7),
    }
    single = torch.randn(1_500_000)
    group, pointers = TorchGroup(dist.group.WORLD), {name: tensor.data_ptr() for name, tensor in tensors.items()}  # type: ignore[arg-type]
    before = [tensor.clone() for tensor in tensors.values()]
    exact = single.clone()
    for _ in range(10):
        ParameterAverager({**tensors, "single": single}, Ledger()).average(group)
    assert same_bits(before, list(tensors.values()))
    assert torch.allclose(single, exact, rtol=10 * 2 * torch.finfo(torch.float32).eps, atol=0)
    assert pointers == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert tensors["image"].is_contiguous(memory_format=torch.channels_last)

    for atomic in (False, True):
        mixed = copy.deepcopy(tensors)  # strides and all
        for tensor in mixed.values():
            tensor.add_(rank)
        ParameterAverager(mixed, Ledger()).average(group, atomic=atomic)
        assert everywhere_equal(list(mixed.values()))
        assert mixed["counter"] == 7 + group.world - 1, "of counters, the largest"
        assert mixed["gaps"].stride() == (9, 2)
        assert torch.allclose(mixed["gaps"].float(), tensors["gaps"].float() + 1, atol=0.02)


def test_averaging_identical_replicas_changes_no_bit() -> None:
    ranks(3, identical)
