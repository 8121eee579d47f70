"""`PostLocalSGDOptimizer`: torch's and ours."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.libraries import both, but_torch, close, module
from tests.live import ranks
from tests.models import everywhere_equal, same_bits

RATE = 0.1


def layer(rank: int) -> nn.Linear:
    torch.manual_seed(rank)
    return nn.Linear(4, 3)


def wrapped(library: str, model: nn.Module, period: int = 3, warmup: int = 0, **options: Any) -> Any:
    averager = module(library, "model_averaging.averagers").PeriodicModelAverager(period=period, warmup_steps=warmup)
    inner = torch.optim.SGD(model.parameters(), lr=RATE, **options)
    return module(library, "optim").PostLocalSGDOptimizer(inner, averager)


def lose(model: nn.Module, rank: int, step: int) -> Any:
    return model(torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()


def reference(library: str, rank: int, steps: int, period: int = 3) -> list[Tensor]:
    """Plain SGD, with the mean over the ranks after each step that is a multiple of the period."""
    model = layer(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        lose(model, rank, step).backward()
        optimizer.step()
        if step % period == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.detach())
                parameter.detach().div_(dist.get_world_size())
    return [parameter.detach() for parameter in model.parameters()]


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        lose(model, rank, step).backward()
        optimizer.step()


def steps_then_averages(rank: int, library: str) -> None:
    for steps in (1, 2, 3, 4, 8):
        model = layer(rank)
        optimizer = wrapped(library, model)
        train(model, optimizer, rank, range(steps))
        found = [parameter.detach() for parameter in model.parameters()]
        assert close(found, reference(library, rank, steps)), f"{steps} steps"
        # The step comes first: after a step that averages, replicas are equal.
        assert everywhere_equal(found) == ((steps - 1) % 3 == 0)
        assert optimizer.averager.step == steps


@both
def test_it_steps_then_averages(library: str) -> None:
    ranks(2, steps_then_averages, library)


def warmed_up(rank: int, library: str) -> None:
    model = layer(rank)
    optimizer = wrapped(library, model, warmup=4)
    equal = []
    for step in range(9):
        train(model, optimizer, rank, range(step, step + 1))
        equal.append(everywhere_equal([parameter.detach() for parameter in model.parameters()]))
    assert [step for step, each in enumerate(equal) if each] == [4, 7]


@both
def test_no_averaging_in_the_warm_up(library: str) -> None:
    ranks(2, warmed_up, library)


def resumed(rank: int, library: str) -> None:
    straight = layer(rank)
    train(straight, wrapped(library, straight, momentum=0.9), rank, range(9))
    model = layer(rank)
    optimizer = wrapped(library, model, momentum=0.9)
    train(model, optimizer, rank, range(5))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert saved["step"] == 5
    model = layer(rank + 7)
    model.load_state_dict(weights)
    optimizer = wrapped(library, model, momentum=0.9)
    optimizer.load_state_dict(saved)
    assert optimizer.averager.step == 5
    train(model, optimizer, rank, range(5, 9))
    assert same_bits(list(model.parameters()), list(straight.parameters()))
    del saved["step"]
    with pytest.warns(UserWarning, match="step"):
        optimizer.load_state_dict(saved)
    assert optimizer.averager.step == 0


@both
def test_resume(library: str) -> None:
    ranks(2, resumed, library)


def scheduled(rank: int, library: str) -> None:
    model = layer(rank)
    optimizer = wrapped(library, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, rank, range(1))
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == RATE / 2
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank, range(1, 2))
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == RATE / 4, "what the inner optimizer steps with"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.averager.step = 1
    train(model, optimizer, rank, range(2, 3))
    assert same_bits(before, list(model.parameters()))


@but_torch("goes on with the parameter groups of before the loading")
def test_a_scheduler_after_loading(library: str) -> None:
    ranks(2, scheduled, library)


def closed_over(rank: int, library: str) -> None:
    model = layer(rank)
    optimizer = wrapped(library, model)
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = lose(model, rank, 0)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert (calls, loss.item()) == (1, pytest.approx(lose(layer(rank), rank, 0).item()))
    assert close([parameter.detach() for parameter in model.parameters()], reference(library, rank, 1))


@but_torch("takes no closure")
def test_closure(library: str) -> None:
    ranks(2, closed_over, library)


def with_hooks(rank: int, library: str) -> None:
    model = layer(rank)
    optimizer = wrapped(library, model)
    events: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: events.append("before"))
    optimizer.register_step_post_hook(lambda *_: events.append(f"after {optimizer.averager.step}"))
    train(model, optimizer, rank, range(2))
    assert events == ["before", "after 1", "before", "after 2"]
    assert optimizer.defaults["lr"] == RATE
    assert isinstance(optimizer, torch.optim.Optimizer)


@but_torch("has no room for hooks, nor defaults")
def test_step_hooks(library: str) -> None:
    ranks(1, with_hooks, library)


def state_hooks(rank: int) -> None:
    model = layer(rank)
    optimizer = wrapped("laconic", model)
    events: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: events.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: events.append(f"loading {state.pop('mark')}"))
    optimizer.register_load_state_dict_post_hook(lambda *_: events.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert events == ["saving", "loading 1", "loaded"]
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "step": 7})
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.averager.step == 7, "what a hook gives back is loaded"


def reset(rank: int, library: str) -> None:
    model = layer(rank)
    optimizer = wrapped(library, model)
    for to_none in (False, True):
        lose(model, rank, 0).backward()
        optimizer.zero_grad(set_to_none=to_none)
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is None if to_none else gradient is not None and not gradient.any() for gradient in gradients)


@both
def test_zero_grad(library: str) -> None:
    ranks(1, reset, library)


def test_state_dict_hooks() -> None:
    ranks(1, state_hooks)


def copied(rank: int, library: str) -> None:
    model = layer(rank)
    optimizer = wrapped(library, model, momentum=0.9)
    train(model, optimizer, rank, range(2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, rank, range(2, 6))
    assert twin.averager.step == 2
    train(twin_model, twin, rank, range(2, 6))
    assert same_bits(list(model.parameters()), list(twin_model.parameters()))
    assert repr(optimizer) == repr(optimizer.optim)


@but_torch("tries to copy the process group")
def test_deepcopy(library: str) -> None:
    ranks(2, copied, library)


def grown(rank: int, library: str) -> None:
    model, more = layer(rank), nn.Parameter(torch.full((3,), float(rank)))
    optimizer = wrapped(library, model)
    optimizer.add_param_group({"params": [more], "lr": 0.0})
    more.grad = torch.ones(3)
    lose(model, rank, 0).backward()
    optimizer.step()
    assert torch.equal(more.detach(), torch.full((3,), 0.5))


@both
def test_add_param_group(library: str) -> None:
    ranks(2, grown, library)


def scaled(rank: int, library: str, unscale: bool) -> None:
    """A scaler without overflow changes nothing; with one on rank 1, ranks stay in step."""
    model = layer(rank)
    optimizer = wrapped(library, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(7):
        optimizer.zero_grad()
        loss = lose(model, rank, step)
        scaler.scale(loss * float("inf") if (step, rank) == (4, 1) else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        found = [parameter.detach() for parameter in model.parameters()]
        if step == 3:
            assert close(found, reference(library, rank, 4), 1e-5)
        if step == 4:
            assert same_bits(found, before) == (rank == 1), "the step is skipped where the overflow was"
    assert optimizer.averager.step == 7
    assert everywhere_equal(found), "the seventh step averages on both ranks"


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled before"])
@but_torch("counts no step on the rank that skips, and the ranks wait for each other", hangs=True)
def test_a_scaler_that_skips_on_one_rank(library: str, unscale: bool) -> None:
    ranks(2, scaled, library, unscale)


def refused(rank: int) -> None:
    optim, averagers = module("laconic", "optim"), module("laconic", "model_averaging.averagers")
    averager = averagers.PeriodicModelAverager(period=2)
    with pytest.raises(TypeError, match=r"optim must be a torch\.optim\.Optimizer, got list"):
        optim.PostLocalSGDOptimizer([], averager)
    with pytest.raises(TypeError, match="averager must be a ModelAverager, got int"):
        optim.PostLocalSGDOptimizer(torch.optim.SGD(layer(0).parameters(), lr=1), 4)


def test_what_is_no_optimizer_is_refused() -> None:
    ranks(1, refused)


def other_averagers(rank: int) -> None:
    """A user's own averager, and torch's."""
    averagers = module("laconic", "model_averaging.averagers")

    class Counting(averagers.ModelAverager):  # type: ignore[misc, name-defined]
        def average_parameters(self, params: Any) -> None:
            self.step += 1

    model = layer(rank)
    optimizer = module("laconic", "optim").PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=1), Counting())
    train(model, optimizer, rank, range(3))
    assert optimizer.averager.step == 3
    assert pickle.loads(pickle.dumps(optimizer.state_dict()))["step"] == 3


def test_an_averager_of_ones_own() -> None:
    ranks(1, other_averagers)
