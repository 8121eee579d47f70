"""Local updates where ranks are not alike: lone ranks on a node, optimizers ahead, memory and buffers that differ."""

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.comm.scopes import OUTSTANDING
from laconic.local.moments import Moments
from laconic.local.parameter_averaging import ParameterAverager
from laconic.run.run import engine_of
from tests.live import GROUP_TIMEOUT, ranks
from tests.local.test_updates import adam, go, parameters
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights


def lopsided(rank: int, text: str, uneven: str) -> None:
    """Nodes of two ranks and of one."""
    before = dict(os.environ)
    try:
        os.environ["GROUP_RANK"] = str(rank // 2)
        model = build(chain)
        optimizer = adam(model)
        with laconic.attach(model, optimizer, text, uneven=uneven):  # type: ignore[arg-type]
            list(go(model, optimizer, rank, range(9)))
        assert everywhere_equal(parameters(model))
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("uneven", ["error", "stop"])
@pytest.mark.parametrize(
    "text",
    [
        "hierarchical_sgd({2: 'node', 4: 'world'})",
        "post_local_sgd(2, 4, subgroup='node')",
        "post_local_sgd(0, 4, subgroup='node')",
        "post_local_sgd(0, 4)",
    ],
)
def test_a_rank_alone_on_its_node(text: str, uneven: str) -> None:
    ranks(3, lopsided, text, uneven)


def unlike_memory(rank: int) -> None:
    """Steps, loss scales and moments that differ after a local phase are equal before gradients are averaged."""
    model = build(chain)
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    extra = list(model.parameters())[-1]
    with laconic.attach(model, optimizer, "local_sgd(4)", scaler=scaler) as run:
        for step in range(12):
            if step == 6:
                run.swap("ddp()")
                assert everywhere_equal(parameters(model))
                assert {float(state["step"]) for state in optimizer.state.values() if state} == {6}, "the largest, no mean"
            loss = model(vectors(rank, step)).square().sum()
            scaler.scale(loss * (float("inf") if rank == 1 and step == 3 else 1.0)).backward()
            if step < 6 and rank == 0:
                extra.grad = None
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step >= 6:
                assert everywhere_equal(parameters(model)), step


def unlike_counts(rank: int) -> None:
    model = build(chain)
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    with laconic.attach(model, optimizer, "local_sgd(4, moments='average')", scaler=scaler):
        for step in range(4):
            loss = model(vectors(rank, step)).square().sum()
            scaler.scale(loss * (float("inf") if rank == 1 and step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert {float(state["step"]) for state in optimizer.state.values()} == {4 - rank}, "a count of steps is no moment"
        assert everywhere_equal([state["exp_avg"] for state in optimizer.state.values()])
    counts = torch.tensor([3 * rank, 5 - rank])
    ParameterAverager({"counts": counts}, Ledger()).average(TorchGroup(dist.distributed_c10d._get_default_group()))
    assert counts.tolist() == [3, 5]


def test_of_counts_there_is_no_mean() -> None:
    ranks(2, unlike_counts)


def test_memory_is_equal_before_gradients_are_averaged() -> None:
    ranks(2, unlike_memory)


def late_gradient(rank: int) -> None:
    """On rank 0 the first parameter gets its gradient a step later, so its optimizer remembers it last."""
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.5)
    with laconic.attach(nn.ParameterList([first, second]), optimizer, "local_sgd(2, moments='average')"):
        for step in range(2):
            first.grad = None if rank == 0 and step == 0 else torch.full((2,), 2.0)
            second.grad = torch.full((2,), 8.0)
            optimizer.step()
    # The first: 2 on rank 0, 0.5 * 2 + 2 on rank 1. The second: 0.5 * 8 + 8 on both.
    assert optimizer.state[first]["momentum_buffer"].tolist() == [2.5, 2.5]
    assert optimizer.state[second]["momentum_buffer"].tolist() == [12, 12]


def test_memory_is_averaged_by_name_whatever_order_a_rank_has_it_in() -> None:
    ranks(2, late_gradient)


class Steps(torch.optim.Optimizer):
    """Remembers under a key with a space, whose last word is a counter's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["last step"] = -0.01 * parameter.grad
            parameter += state["last step"]


def spaced(rank: int) -> None:
    model = build(lambda: nn.ParameterDict({"a b": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(2))}))
    optimizer = Steps(model)
    with laconic.attach(model, optimizer, "local_sgd(3)") as run:
        for _ in range(2):
            torch.cat([parameter * (rank + 1.0) for parameter in model.parameters()]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        run.swap("ddp()")
        for parameter in model.parameters():
            assert torch.allclose(optimizer.state[parameter]["last step"], torch.tensor(-0.015)), "the mean, no counter"
    moments = Moments([optimizer], dict(model.module.named_parameters()), Ledger(), Ledger(), torch.device("cpu"))
    optimizer.state[model.module["a b"]]["last step"].fill_(float("nan"))
    moments.forget_bad(["a b"])
    assert not optimizer.state[model.module["a b"]]
    assert optimizer.state[model.module["b"]]


def test_names_with_spaces() -> None:
    ranks(2, spaced)


def without_memory(rank: int) -> None:
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with laconic.attach(model, optimizer, "local_sgd(4, moments={'exp_avg': 3})") as run:
        with pytest.warns(UserWarning, match="no optimizer remembers exp_avg"):
            list(go(model, optimizer, rank, range(3)))
        run.swap("ddp()")
        list(go(model, optimizer, rank, range(3, 6)))
        assert everywhere_equal(weights(model))


def test_an_optimizer_without_memory() -> None:
    ranks(2, without_memory)


def one_ahead(rank: int) -> None:
    model = chain()
    halves = list(model.parameters())
    one, other = torch.optim.SGD(halves[:10], lr=0.01), torch.optim.SGD(halves[10:], lr=0.01)
    with laconic.attach(model, [one, other], "local_sgd(1)") as run:
        for step in range(4):
            model(vectors(rank, step)).square().sum().backward()
            one.step()
            if step < 3:
                other.step()
        assert not everywhere_equal(weights(model))
        run.sync()
        assert everywhere_equal(weights(model))


def test_an_optimizer_that_is_ahead_has_drifted() -> None:
    ranks(2, one_ahead)


def silent_at_first(rank: int, steps: int) -> None:
    torch.manual_seed(rank)
    model = chain()
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "silent()") as run:
        list(go(model, optimizer, rank, range(steps)))
        run.swap("diloco(2)")
        assert everywhere_equal(weights(model)), "anchors are"
        list(go(model, optimizer, rank, range(2)))
        assert everywhere_equal(weights(model))


@pytest.mark.parametrize("steps", [0, 2])
def test_bare_modules_are_equal_from_the_start(steps: int) -> None:
    """And where syncs begin after steps that were taken alone."""
    ranks(2, silent_at_first, steps)


def back_to_the_warm_up(rank: int) -> None:
    model = build(chain)
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "diloco(2, warmup=2)") as run:
        list(go(model, optimizer, rank, range(1)))
        kept = copy.deepcopy([run.state_dict(), model.state_dict(), optimizer.state_dict()])
        list(go(model, optimizer, rank, range(1, 6)))
        first = weights(model)
        model.load_state_dict(kept[1])
        optimizer.load_state_dict(kept[2])
        run.load_state_dict(kept[0])
        list(go(model, optimizer, rank, range(1, 6)))
        assert same_bits(first, weights(model))


def test_a_state_from_the_warm_up_has_no_anchor() -> None:
    ranks(2, back_to_the_warm_up)


def too_late(rank: int) -> None:
    model = chain()
    optimizer = adam(model)
    run = laconic.attach(model, optimizer, "streaming_diloco(4, fragments=2, delay=2)")
    dist.destroy_process_group()
    run.detach()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with laconic.attach(model, optimizer, "local_sgd(2)"):
        list(go(model, optimizer, rank, range(3)))


def test_detach_after_the_groups_are_gone() -> None:
    ranks(1, too_late)


def own_groups(rank: int) -> None:
    model = build(chain)
    run = laconic.attach(model, adam(model), "streaming_diloco(4, fragments=2, delay=2)")
    built = engine_of(run).groups[OUTSTANDING].process_group
    assert built is not engine_of(run).group.process_group
    assert built._get_backend(torch.device("cpu")).options._timeout == GROUP_TIMEOUT
    run.detach()


def test_groups_of_our_own_have_the_timeout_of_the_users() -> None:
    ranks(2, own_groups)


def caches(rank: int) -> str:
    model = chain()
    optimizer = adam(model)
    run = laconic.attach(model, optimizer, "local_sgd(2)")
    with pytest.raises(ValueError, match="different shapes on different ranks") as caught, run:
        model.register_buffer("cache", torch.zeros(3 + rank))
        list(go(model, optimizer, rank, range(2)))
    with pytest.raises(ValueError, match=r"rank 1 has buffer cache of shape \(4,\)"):
        laconic.attach(model, optimizer, "local_sgd(2)")
    return str(caught.value)


def test_buffers_that_differ_are_named() -> None:
    for rank, message in enumerate(ranks(2, caches)):
        assert f"cache ({3 + rank},)" in message
        assert "a strategy with buffers='local' leaves them alone" in message, "attach has no such argument"


def recovers(rank: int) -> None:
    model = chain(2)
    optimizer = adam(model)
    history: list[list[Tensor]] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not finite")
        with laconic.attach(model, optimizer, "diloco(2)"):
            for step in range(10):
                loss = model(vectors(rank, step)).square().sum()
                (loss * (float("nan") if rank == 0 and step == 2 else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
                history.append(parameters(model))
    assert all(tensor.isfinite().all() for tensor in history[-1])
    assert not same_bits(history[5], history[9]), "it learns again"


def test_one_bad_batch_does_not_stop_training_for_ever() -> None:
    ranks(2, recovers)


class Gaps(nn.Module):
    """A parameter whose rows lie apart in memory, or not."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.empty_strided((16, 16), (stride, 1)).copy_(torch.randn(16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def apart_in_memory(rank: int) -> None:
    for text in (
        "local_sgd(3)",
        "local_sgd(3, atomic=False)",
        "local_sgd(3, reducer=ErrorFeedback(Quantized(4)))",
        "streaming_diloco(4, fragments=1, delay=2, blend=0.5, carry=True)",
    ):
        found = []
        for stride in (16, 20):
            model = Gaps(stride)
            optimizer = adam(model)
            with laconic.attach(model, optimizer, text) as run:
                list(go(model, optimizer, rank, range(8)))
                found += parameters(model)
                with run.consensus():
                    found += parameters(model)
            found += parameters(model)
            assert model.weight.stride() == (stride, 1)
        assert same_bits(found[:3], found[3:]), text
        assert everywhere_equal(found[-1:])


def test_parameters_with_gaps_in_memory() -> None:
    ranks(2, apart_in_memory)


def after_a_local_phase(rank: int, detach_first: bool) -> None:
    """A forward that raised while DDP was kept from communicating, and a run that ended then, leave a plain DDP."""
    model = build(lambda: nn.Sequential(chain(), nn.BatchNorm1d(3)))
    optimizer = adam(model)
    run = laconic.attach(model, optimizer, "silent()")
    list(go(model, optimizer, rank, range(2)))
    running: Any = model.module[1].running_mean
    assert not everywhere_equal([running]), "else the last line shows nothing"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(8, 3))
    if detach_first:
        run.detach()
    else:
        run.swap("ddp()")
    optimizer.zero_grad()
    model(vectors(rank, 3)).square().mean().backward()
    assert everywhere_equal([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    model.eval()
    model(vectors(rank, 4))
    assert everywhere_equal([running]), "DDP's forward broadcasts buffers again"
    run.detach()


@pytest.mark.parametrize("detach_first", [True, False])
def test_after_a_local_phase_ddp_communicates_again(detach_first: bool) -> None:
    ranks(2, after_a_local_phase, detach_first)


def moved_storage(rank: int, text: str) -> None:
    """`model.to(...)` there and back, as Accelerate and Lightning do it: parameters stay, their storage is another one."""

    def train(move: bool) -> list[Tensor]:
        model = build(chain)
        optimizer = adam(model)
        with laconic.attach(model, optimizer, text):
            for step, _ in enumerate(go(model, optimizer, rank, range(15))):
                if move and step in (5, 9, 14):
                    for parameter in model.parameters():
                        parameter.data = parameter.data.clone()
        return weights(model)

    assert same_bits(train(True), train(False))


@pytest.mark.parametrize("text", ["diloco(4)", "streaming_diloco(period=6, fragments=2, delay=3, warmup=2)"])
def test_a_model_that_is_moved_in_mid_run_trains_on(text: str) -> None:
    ranks(2, moved_storage, text)
