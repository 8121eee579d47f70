"""Adam's second moment under a strategy: by which decay it moves, and that its divisor never jumps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.run.second_moment import AGED, SLOW, SecondMoment
from tests.live import ranks
from tests.models import vectors

KINDS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}]


def adam(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), **options)


def trained(steps: int, **options: Any) -> tuple[nn.Parameter, torch.optim.AdamW]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, 3))
    optimizer = adam([parameter], **options)
    for _ in range(steps):
        parameter.grad = torch.randn(7, 3)
        optimizer.step()
    return parameter, optimizer


def divisor(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """What Adam divides by, but for its epsilon."""
    state, (_, beta2) = optimizer.state[parameter], optimizer.param_groups[0]["betas"]
    square: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    root: Tensor = (square / (1 - beta2 ** float(state["step"]))).sqrt()
    return root


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_divisor_does_not_jump(options: dict[str, Any]) -> None:
    parameter, optimizer = trained(50, **options)
    before, second = divisor(optimizer, parameter), SecondMoment([optimizer])
    second.prepare("shared", 50, synchronous=False)
    assert optimizer.param_groups[0]["betas"] == (0.9, SLOW)
    assert torch.allclose(divisor(optimizer, parameter), before, rtol=1e-6)
    second.release()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert torch.allclose(divisor(optimizer, parameter), before, rtol=1e-6)
    assert optimizer.state[parameter]["step"] == 50


def test_the_next_step_is_the_one_that_it_would_have_been() -> None:
    """But for the new square, which hardly counts: after a change of beta2, the same gradient makes nearly the same step."""
    moved = []
    for kind in ("local", "slow"):
        parameter, optimizer = trained(30)
        before = parameter.detach().clone()
        SecondMoment([optimizer]).prepare(kind, 30, synchronous=False)
        parameter.grad = optimizer.state[parameter]["exp_avg"] / 100
        optimizer.step()
        moved.append(parameter.detach() - before)
    assert torch.allclose(moved[0], moved[1], rtol=0.06, atol=1e-5), "the old square decays by a twentieth where it is not held"


def test_a_new_square_weighs_as_much_as_beta2_says() -> None:
    parameter, optimizer = trained(50)
    before = divisor(optimizer, parameter).square()
    SecondMoment([optimizer]).prepare("slow", 50, synchronous=False)
    parameter.grad = torch.full((7, 3), 3.0)
    optimizer.step()
    assert torch.allclose(divisor(optimizer, parameter).square(), SLOW * before + (1 - SLOW) * 9.0, rtol=1e-4)


def test_a_synchronous_step_stands_for_those_since_the_last_one() -> None:
    parameter, optimizer = trained(50)
    second, (before,) = SecondMoment([optimizer]), [divisor(optimizer, parameter).square()]
    second.synchronised(50)
    for step, beta2 in ((51, 0.95**2), (60, 0.8), (100, 0.8)):
        ready = copy.deepcopy(second)
        ready.prepare("shared", step, synchronous=True)
        chosen = ready._optimizers[0].param_groups[0]["betas"][1]
        assert chosen == pytest.approx(beta2), "one since, then many, of which it stands for no more than a fifth"
    second.prepare("shared", 55, synchronous=True)
    parameter.grad = torch.full((7, 3), 2.0)
    optimizer.step()
    (beta2,) = {group["betas"][1] for group in optimizer.param_groups}
    expected = beta2 * before + (1 - beta2) * 4.0
    assert torch.allclose(divisor(optimizer, parameter).square(), expected, rtol=1e-4), "Adam's own rule, by that beta2"


@pytest.mark.parametrize("kind", ["local", "shared", "slow"])
def test_what_is_left_alone(kind: str) -> None:
    """Other optimizers, second moments that have just begun, and everything by "local"."""
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    _, young = trained(3)
    _, old = trained(50)
    before = [copy.deepcopy(optimizer.state_dict()) for optimizer in (sgd, young, old)]
    SecondMoment([sgd, young, old]).prepare(kind, 0, synchronous=False)
    after = [optimizer.state_dict() for optimizer in (sgd, young, old)]
    assert [str(a) == str(b) for a, b in zip(before, after, strict=True)] == [True, True, kind == "local"]


def test_the_user_s_decay_travels_with_the_optimizer_s_state() -> None:
    parameter, optimizer = trained(50)
    before = divisor(optimizer, parameter)
    SecondMoment([optimizer]).prepare("slow", 50, synchronous=True)
    resumed, other = trained(1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    second = SecondMoment([other])
    second.prepare("slow", 51, synchronous=True)
    second.release()
    assert other.param_groups[0]["betas"] == (0.9, 0.95)
    assert set(other.param_groups[0]) == set(trained(1)[1].param_groups[0]), "nothing is left"
    assert torch.allclose(divisor(other, resumed), before, rtol=1e-6)


def test_a_strategy_that_leaves_adam_alone_takes_over_from_one_that_does_not() -> None:
    """By an optimizer's state that a user saved in mid-run and loads into a run of ddp()."""
    parameter, optimizer = trained(50)
    before = divisor(optimizer, parameter)
    SecondMoment([optimizer]).prepare("slow", 50, synchronous=True)
    SecondMoment([optimizer]).prepare("local", 0, synchronous=True)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert torch.allclose(divisor(optimizer, parameter), before, rtol=1e-6)


def test_a_parameter_that_comes_late_and_an_optimizer_that_is_old_are_released_as_they_are() -> None:
    _, optimizer = trained(50)
    late = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [late], "betas": (0.9, 0.95)})
    optimizer.param_groups[0]["params"].append(optimizer.param_groups.pop()["params"][0])
    second = SecondMoment([optimizer])
    second.prepare("slow", 50, synchronous=False)
    for _ in range(30):
        late.grad = torch.ones(3)
        optimizer.step()
    before = divisor(optimizer, late)
    second.release()
    assert torch.allclose(divisor(optimizer, late), before, rtol=1e-3), "it was made while beta2 was held"
    parameter, old = trained(2)
    old.state[parameter]["step"] += 300_000
    second = SecondMoment([old])
    second.prepare("slow", 0, synchronous=False)
    second.release()
    assert old.state[parameter]["step"] == 300_002


def by_hand(rank: int, steps: int, slow_from: int) -> list[Tensor]:
    """DDP without laconic; then a second moment that is slowed by hand."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = adam(model.parameters())
    for step in range(steps):
        if step == slow_from:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(1 / (1 - 0.9**step))
                state["exp_avg_sq"].mul_(1 / (1 - 0.95**step))
                state["step"] += AGED
            optimizer.param_groups[0]["betas"] = (0.9, SLOW)
        model(vectors(rank, step, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_laconic(rank: int, strategy: str, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = adam(model.parameters())
    with laconic.attach(model, optimizer, strategy) as run:
        for step in range(steps):
            model(vectors(rank, step, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = run.state_dict()["second_moment"]
    assert state["last"] == (None if "'local'" in strategy else steps), "all of them were averaged"
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95), "given back"
    return [parameter.detach().clone() for parameter in model.parameters()]


def limits(rank: int) -> None:
    for strategy, slow_from in (
        ("ddp(second_moment='local')", 40),
        ("ddp(second_moment='shared')", 40),  # every step is synchronous
        ("ddp(second_moment='slow', warmup=25)", 25),
    ):
        ours, theirs = by_laconic(rank, strategy, 32), by_hand(rank, 32, slow_from)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), strategy


def test_limits() -> None:
    """Never slowed is plain DDP, and slow is what one would write by hand: bit for bit."""
    ranks(2, limits)


def shared(rank: int) -> None:
    """By which decay each step was made, and that the refreshes bring the ranks' divisors together."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = adam(model.parameters())
    decays: list[float] = []
    optimizer.register_step_pre_hook(lambda one, *_: decays.append(one.param_groups[0]["betas"][1]))
    with laconic.attach(model, optimizer, "local_adam(4, warmup=24, refresh=8, warmup_reducer=Exact())") as run:
        for step in range(48):
            model(vectors(rank, step, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        laconic.check_replicas(run)
        mine = divisor(optimizer, model.module.weight)
    assert decays[:25] == [0.95] * 25, "the first refresh follows the warm-up at once"
    later = [0.8 if step in (32, 40) else SLOW for step in range(25, 48)]
    assert decays[25:] == pytest.approx(later)
    gathered = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(gathered, mine)
    assert not torch.equal(*gathered)
    assert torch.allclose(gathered[0], gathered[1], rtol=0.1), "though each rank has gradients of its own"


def test_local_steps_share_a_second_moment() -> None:
    ranks(2, shared)
