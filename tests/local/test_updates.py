"""Local updates at work: any reducer, odd models, uneven clocks, buffers, moments, nodes, meshes, failures."""

import os
import random
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.run.run import engine_of
from laconic.strategies.strategy import render
from tests.live import POLL_SECONDS, last_ranks, ranks
from tests.models import Odd, build, chain, everywhere_equal, images, same_bits, vectors, weights
from tests.reducers.every import EVERY, NAMES

RECIPES = {
    "local_sgd": "local_sgd(4{})",
    "post_local_sgd": "post_local_sgd(2, 4{})",
    "slowmo": "slowmo(4{})",
    "diloco": "diloco(4{})",
    "streaming_diloco": "streaming_diloco(4, fragments=2, delay=2{})",
    "hierarchical_sgd": "hierarchical_sgd({{2: 2, 4: 4}}{})",
    "sparseloco": "sparseloco(4{})",
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def go(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Iterator[int]:
    for step in steps:
        model(vectors(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def anchors_agree(run: laconic.Run) -> bool:
    """The bits that all ranks must share at every step, also where `blend` keeps replicas apart."""
    deltas = engine_of(run).local.deltas
    return deltas is None or everywhere_equal(list(deltas.anchors.by_name.values()))


def every_recipe(rank: int, reducer: str) -> None:
    for name in ("local_sgd", "post_local_sgd", "slowmo", "diloco", "streaming_diloco"):
        model = chain(3)
        optimizer = adam(model)
        if name == "post_local_sgd":
            model = build(lambda: chain(3))
            optimizer = adam(model)
        with laconic.attach(model, optimizer, RECIPES[name].format(f", reducer={reducer}")) as run:
            for step in go(model, optimizer, rank, range(13)):
                assert anchors_agree(run), (name, step)
                local = max(step + 1 - (2 if name == "post_local_sgd" else 0), 0)
                if local and local % 4 == 0 and name != "streaming_diloco":
                    assert everywhere_equal(parameters(model)), (name, step)
                    assert not engine_of(run).local.drifted
                elif local:
                    assert not everywhere_equal(parameters(model)), (name, step)
        assert everywhere_equal(parameters(model)), name
        assert run.stats().syncs >= 2


@pytest.mark.parametrize("reducer", EVERY, ids=NAMES)
def test_any_reducer_with_any_recipe(reducer: laconic.Reducer) -> None:
    ranks(2, every_recipe, render(reducer))


def test_a_hierarchy_says_why_it_takes_no_compressor() -> None:
    with pytest.raises(ValueError, match=r"no anchor in common from which Sign\(\) could send"):
        laconic.hierarchical_sgd({4: 2}, reducer=laconic.Sign())


def sleepy(rank: int, name: str, steps: int) -> None:
    draw = random.Random(rank)
    model = build(lambda: chain(4))
    optimizer = adam(model)
    with laconic.attach(model, optimizer, RECIPES[name].format("")) as run:
        before = 0
        for _ in go(model, optimizer, rank, range(steps)):
            if draw.random() < 0.2:
                time.sleep(draw.random() * 0.005)
            assert anchors_agree(run)
            if not engine_of(run).local.drifted:
                assert everywhere_equal(parameters(model))
                before += 1
    assert everywhere_equal(weights(model))
    assert name == "streaming_diloco" or before >= steps // 5


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("steps", [40, pytest.param(500, marks=pytest.mark.soak)])
def test_ranks_that_take_their_time(name: str, steps: int) -> None:
    ranks(4, sleepy, name, steps)


def odd(rank: int, buffers: str) -> None:
    model = build(Odd, find_unused_parameters=True)
    optimizer = adam(model)
    text = f"post_local_sgd(2, 3, subgroup='none', buffers={buffers!r})"
    layout = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    with laconic.attach(model, optimizer, text) as run:
        for step in range(9):
            loss = model(images(rank, step)).square().sum()
            if step > 2 and rank == 1:  # no gradient for the head on one rank
                loss = loss * 0
            loss.backward()
            if step > 2 and rank == 1:
                model.module.head.weight.grad = model.module.head.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
            if step in (4, 7):
                assert everywhere_equal(parameters(model))
                floats = [model.module.norm.running_mean.clone(), model.module.norm.running_var.clone()]
                assert everywhere_equal(floats) == (buffers != "local")
            elif step > 1:
                assert not everywhere_equal(parameters(model))
                assert not everywhere_equal([model.module.norm.running_mean.clone()]), "no broadcast in a local phase"
    assert run.stats().syncs == 2
    assert everywhere_equal(parameters(model))
    assert layout == [(p.data_ptr(), p.stride()) for p in model.parameters()]
    assert model.forward_sync_buffers
    assert model.require_backward_grad_sync


@pytest.mark.parametrize("buffers", ["average", "local", "broadcast"])
def test_buffers_and_missing_gradients(buffers: str) -> None:
    ranks(2, odd, buffers)


def clocks(rank: int) -> None:
    """Accumulation with and without no_sync, a closure, two optimizers, and a scaler that skips on one rank alone."""
    model = build(chain)
    halves = list(model.parameters())
    optimizers = [
        torch.optim.SGD(halves[:8], lr=0.01),
        torch.optim.Adam([{"params": halves[8:12]}, {"params": halves[12:]}], lr=0.01),
    ]
    with laconic.attach(model, optimizers, "diloco(3, warmup=2)") as run:
        for step in range(11):
            with model.no_sync():
                model(vectors(rank, step)).square().sum().backward()
            model(vectors(rank, step + 50)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step(lambda: 0.0)
                optimizer.zero_grad()
        assert run.stats().syncs == 3
        assert run.stats().steps == 11
        assert everywhere_equal(weights(model))

    module = chain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with laconic.attach(module, optimizer, "local_sgd(2)", scaler=scaler) as run:
        for step in range(6):
            loss = module(vectors(rank, step)).square().sum()
            scaler.scale(loss * (float("inf") if rank == 1 and step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert run.stats().steps == 6
    assert run.stats().syncs == 3
    assert all(tensor.isfinite().all() for tensor in weights(module))
    assert everywhere_equal(weights(module))


def test_the_clock_counts_attempted_steps() -> None:
    ranks(2, clocks)


def moments(rank: int) -> None:
    def states(optimizer: torch.optim.Optimizer, key: str) -> list[Tensor]:
        return [state[key].clone() for state in optimizer.state.values() if key in state]

    for text, equal in (("local_sgd(2, moments='average')", ["exp_avg", "exp_avg_sq"]), ("local_sgd(2)", [])):
        model = chain()
        optimizer = adam(model)
        with laconic.attach(model, optimizer, text):
            list(go(model, optimizer, rank, range(4)))
            for key in ("exp_avg", "exp_avg_sq"):
                assert everywhere_equal(states(optimizer, key)) == (key in equal)
            assert {float(step) for step in states(optimizer, "step")} == {4.0}
    model = chain()
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "local_sgd(2, moments={'exp_avg': 3, 'exp_avg_sq': 4})"):
        for step in go(model, optimizer, rank, range(12)):
            assert everywhere_equal(states(optimizer, "exp_avg")) == (step % 3 == 2)
            assert everywhere_equal(states(optimizer, "exp_avg_sq")) == (step % 4 == 3)
    model = DistributedDataParallel(chain())
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "local_sgd(2, warmup=2, moments={'exp_avg': 3})"):
        for step in go(model, optimizer, rank, range(6)):  # periods begin where the warm-up ends
            assert everywhere_equal(states(optimizer, "exp_avg")) == (step < 2 or step == 4)
    model = chain()
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "local_sgd(2, moments='reset')"):
        list(go(model, optimizer, rank, range(4)))
        assert not any(state.any() for state in states(optimizer, "exp_avg"))


def test_the_optimizers_memory() -> None:
    ranks(2, moments)


def wait_for_rate(rank: int, text: str) -> None:
    model = chain()
    first, *middle, last = model.parameters()
    model.register_parameter("stepped by nobody", nn.Parameter(torch.ones(1)))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": middle}, {"params": [last]}], lr=0.01)
    equal = []
    with laconic.attach(model, optimizer, text):
        for step in go(model, optimizer, rank, range(24)):
            equal.append(everywhere_equal(weights(model)))
            rate = (0.01 if step < 7 else 0.006) * (1 + rank)  # the first rank's holds for all, and the largest of its groups'
            for group, share in zip(optimizer.param_groups, (0.5, 1.0, 0.25), strict=True):
                group["lr"] = share * rate
    # base at first, then (0.02 / 0.01)^2 = 4, from step 8 on at 0.006: 11
    synced = [step + 1 for step, same in enumerate(equal) if same]
    assert synced == [2, 6, 10, 21], synced


@pytest.mark.parametrize("reducer", ["Exact()", "Cast('bf16')"], ids=["parameters", "deltas"])
def test_the_period_follows_the_learning_rate_of_the_first_rank(reducer: str) -> None:
    ranks(2, wait_for_rate, f"local_sgd(period=QSR(base=2, alpha=0.02), reducer={reducer})")


def on_nodes(rank: int, how: str) -> None:
    """Two nodes of two ranks: gradients within them, parameters over all."""
    mesh, before = None, dict(os.environ)
    try:
        subgroup = "node"
        if how == "mesh":
            mesh, subgroup = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), "inner"
        elif how == "torchrun":
            os.environ["GROUP_RANK"] = str(rank // 2)
        else:
            os.environ["LOCAL_WORLD_SIZE"] = "2"
        model = build(Odd)
        optimizer = adam(model)
        text = f"post_local_sgd(2, 3, subgroup={subgroup!r})" if how != "auto" else "post_local_sgd(2, 3)"
        with laconic.attach(model, optimizer, text, mesh=mesh):
            for step in range(8):
                if step == 3:
                    assert buffer_after_forward(model, rank) == rank, "no broadcast from one node to another"
                model(images(rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                rows: list[float] = [0.0] * 4
                dist.all_gather_object(rows, sum(p.double().sum().item() for p in model.parameters()))
                if step in (0, 1, 4, 7):
                    assert len(set(rows)) == 1, (step, rows)
                else:
                    assert rows[0] == rows[1] != rows[2] == rows[3], (step, rows)
        assert buffer_after_forward(model, rank) == 0, "a DDP as it was: the first rank's on all"
    finally:
        os.environ.clear()
        os.environ.update(before)


def buffer_after_forward(model: DistributedDataParallel, rank: int) -> float:
    """What is left of a buffer that has this rank's number before an evaluation."""
    mean: Tensor = model.module.norm.running_mean
    mean.fill_(rank)
    model.eval()
    with torch.no_grad():
        model(images(rank, 0))
    model.train()  # type: ignore[no-untyped-call]
    return float(mean[0])


@pytest.mark.parametrize("how", ["torchrun", "local world size", "mesh", pytest.param("auto", marks=pytest.mark.soak)])
def test_gradients_within_nodes(how: str) -> None:
    ranks(4, on_nodes, how)


def inside_and_between(rank: int) -> None:
    """A DDP over each node of the user's own, and averaging of the module inside over all ranks."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    model = DistributedDataParallel(chain(), process_group=nodes[rank // 2])
    optimizer = adam(model)
    with laconic.attach(model.module, optimizer, "local_sgd(3)") as run:
        for step in go(model, optimizer, rank, range(6)):
            rows: list[float] = [0.0] * 4
            dist.all_gather_object(rows, sum(p.double().sum().item() for p in model.parameters()))
            assert len(set(rows)) == (1 if step % 3 == 2 else 2)
    assert run.stats().exchanges == 0


@pytest.mark.soak
def test_a_ddp_inside_a_node_and_averaging_between() -> None:
    ranks(4, inside_and_between)


def on_loan(rank: int) -> None:
    model = chain()
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "diloco(4)") as run:
        list(go(model, optimizer, rank, range(6)))
        mine, sent = weights(model), run.stats().wire_bytes
        with run.consensus():
            assert everywhere_equal(weights(model))
        assert same_bits(mine, weights(model))
        assert run.stats().wire_bytes == sent
        assert run.stats().background_bytes > 0
        with run.consensus("anchor"):
            assert everywhere_equal(weights(model))
        assert same_bits(mine, weights(model))
        for of in ("mean", "anchor"):
            with pytest.raises(ZeroDivisionError), run.consensus(of):
                raise ZeroDivisionError("in the user's evaluation")
            assert same_bits(mine, weights(model)), "an exception gives back what was on loan"
        run.sync()
        assert everywhere_equal(weights(model))
        list(go(model, optimizer, rank, range(6, 7)))
        run.swap("local_sgd(3)")
        assert everywhere_equal(weights(model))
        with pytest.raises(ValueError, match="has no anchor"), run.consensus("anchor"):
            pass
        list(go(model, optimizer, rank, range(7, 9)))
        assert everywhere_equal(weights(model)), "step 9 is due"
        run.swap("streaming_diloco(4, fragments=2, delay=3)")
        list(go(model, optimizer, rank, range(9, 15)))
        run.swap("silent()")
        assert everywhere_equal(weights(model))


def test_consensus_sync_and_swap() -> None:
    ranks(2, on_loan)


def broken(rank: int, name: str) -> float:
    """One rank fails inside the block: it leaves at once, and the other hears of it."""
    import laconic.comm.group

    laconic.comm.group.POLL_SECONDS = 0.3
    model = chain()
    optimizer = adam(model)
    start = time.monotonic()
    try:
        with (
            pytest.raises((RuntimeError, ZeroDivisionError)) as caught,
            laconic.attach(model, optimizer, RECIPES[name].format("")),
        ):
            for step in go(model, optimizer, rank, range(9)):
                if rank == 1 and step == 4:
                    raise ZeroDivisionError("the user's own")
        seconds = time.monotonic() - start
        if rank == 0:
            assert "rank 1 failed in step 6 with ZeroDivisionError" in str(caught.value), str(caught.value)
        else:
            assert isinstance(caught.value, ZeroDivisionError)
        return seconds
    finally:
        laconic.comm.group.POLL_SECONDS = POLL_SECONDS


@pytest.mark.parametrize("name", ["local_sgd", "diloco", pytest.param("streaming_diloco", marks=pytest.mark.soak)])
def test_a_failure_inside_the_block_is_heard_of(name: str) -> None:
    failed, heard = last_ranks(2, broken, name)[::-1]
    assert failed < 10
    assert heard < 30


def uneven(rank: int, name: str) -> None:
    for fewer in range(1, 5):  # whatever is outstanding then
        model = chain()
        optimizer = adam(model)
        more = ", moments={'exp_avg': 3}" if name == "local_sgd" else ""
        with laconic.attach(model, optimizer, RECIPES[name].format(more), uneven="stop") as run:
            list(go(model, optimizer, rank, range(12 - fewer * rank)))
        assert everywhere_equal(parameters(model))
        assert 12 - fewer <= run.stats().steps <= 12


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming_diloco"])
def test_ranks_that_run_out_of_batches_stop_together(name: str) -> None:
    ranks(2, uneven, name)


def unequal(rank: int) -> str:
    model = chain()
    optimizer = adam(model)
    with pytest.raises(laconic.UnevenError) as caught, laconic.attach(model, optimizer, "local_sgd(2)") as run:
        if rank == 1:
            engine_of(run).clock.step = 2
        list(go(model, optimizer, rank, range(2)))
    return str(caught.value)


def test_clocks_that_differ_at_a_sync_are_an_error_that_names_both() -> None:
    assert all("rank 0 made 2 steps, rank 1 made 4 steps" in message for message in last_ranks(2, unequal))


def bare(rank: int) -> None:
    torch.manual_seed(rank)  # built differently, as a DDP would not be
    model = chain()
    next(model.parameters()).requires_grad_(False)
    model.register_buffer("noise", torch.randn(3))
    before = weights(model)
    optimizer = adam(model)
    with laconic.attach(model, optimizer, "diloco(3)"):
        assert everywhere_equal(weights(model))
        assert rank or same_bits(weights(model), before)
        list(go(model, optimizer, rank, range(3)))
        assert everywhere_equal(weights(model))


def test_bare_modules_start_as_the_first_ranks() -> None:
    ranks(2, bare)


WRONG = {
    "local_sgd(0)": "period must be at least 1, got 0; to average gradients at every step use ddp()",
    "local_sgd(2.5)": "period must be a whole number of steps, got 2.5",
    "diloco(outer_lr=0.0)": "lr must be above 0, got 0.0",
    "diloco(outer_momentum=1.0)": "momentum must be above 0 and below 1, got 1.0",
    "slowmo(beta=-0.1)": "beta must be at least 0 and below 1",
    "streaming_diloco(4, fragments=5)": "fragments must be at most the period",
    "streaming_diloco(4, delay=4)": "delay must be below the period",
    "streaming_diloco(blend=1.5)": "blend must be from 0",
    "streaming_diloco(carry=1)": "carry must be True or False",
    "streaming_diloco(order='random')": "order must be one of strided, contiguous, bytes",
    "streaming_diloco(QSR(4, 0.1))": "fragments need their places",
    "hierarchical_sgd({})": "a hierarchy needs",
    "hierarchical_sgd({0: 2})": "period must be at least 1",
    "hierarchical_sgd({-4: 2})": "period must be at least 1",
    "hierarchical_sgd({4: 4, 8: 2})": "longer periods need larger groups",
    "hierarchical_sgd({4: 0})": "at least 1 rank",
    "local_sgd(buffers='mean')": "buffers must be one of average, local, broadcast",
    "local_sgd(moments='sum')": "moments must be one of",
    "local_sgd(moments={'exp_avg': 0})": "period must be at least 1",
    "post_local_sgd(-1)": "warmup must be 0 or more",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_say_what_was_wanted(text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        laconic.strategy(text)
    assert WRONG[text] in str(caught.value)


def refused(rank: int) -> None:
    model = chain()
    optimizer = adam(model)
    for text, why in (
        ("hierarchical_sgd({4: 3, 8: 4})", "2 ranks can't be divided into groups of 3"),
        ("hierarchical_sgd({4: 1})", "must hold all 2 ranks"),
        ("streaming_diloco(64, fragments=60)", "60 fragments can't be made of 13 layers"),
        ("local_sgd(4, warmup=3)", "needs a DistributedDataParallel"),
        ("post_local_sgd(0, 4, subgroup='rack')", "subgroup 'rack' is neither"),
    ):
        with pytest.raises(ValueError, match=why):
            laconic.attach(model, optimizer, text)
    ddp = build(Odd, find_unused_parameters=True)
    with pytest.raises(ValueError, match="communicates with all ranks in every backward"):
        laconic.attach(ddp, adam(ddp), "post_local_sgd(2, 4, subgroup='node')")
    short = build(chain)
    optimizer = adam(short)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with laconic.attach(short, optimizer, "post_local_sgd(100, 4)"):
            list(go(short, optimizer, rank, range(3)))
    assert any("never began: its warm-up of 100 steps" in str(w.message) for w in caught)


def test_what_does_not_fit_is_refused() -> None:
    ranks(2, refused)


def foretold(rank: int, text: str) -> None:
    model = build(Odd)
    optimizer = adam(model)
    with laconic.attach(model, optimizer, text) as run:
        for step in range(14):
            model(images(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = run.stats()
        layout = run.layout() if stats.exchanges else []
    predicted = laconic.predict(text, model, world_size=2, step=0, steps=14, buckets=layout)
    assert stats.wire_bytes == predicted.wire_bytes
    assert stats.payload_bytes == predicted.payload_bytes
    assert stats.exchanges or stats.collectives == predicted.collectives, "DDP's first backward has other buckets"


@pytest.mark.parametrize(
    "text",
    [
        "local_sgd(4)",
        "local_sgd(3, buffers='broadcast')",
        "diloco(4, moments={'exp_avg': 3, 'exp_avg_sq': 4})",
        "post_local_sgd(2, 4)",
        "slowmo(4)",
        "diloco(4, reducer=ErrorFeedback(PowerSGD(2)))",
        "streaming_diloco(6, fragments=3, delay=1)",
        "hierarchical_sgd({2: 1, 4: 2})",
        "sparseloco(4, buffers='local')",
        "local_sgd(period=QSR(base=3, alpha=1e-9))",
        # Something is due in the very step after the warm-up.
        "streaming_diloco(6, fragments=2, delay=2, warmup=5)",
        "diloco(1, warmup=3, reducer=Warmup(5, Quantized(4)))",
        "local_sgd(1, warmup=3)",
        "ddp(reducer=Warmup(3, Cast('bf16', accumulate='wire')))",
    ],
)
def test_predicted_bytes_are_counted_bytes(text: str) -> None:
    ranks(2, foretold, text)


def nothing_lost(rank: int) -> None:
    """A lossy reducer's residual goes into the parameters when another strategy takes over: the mean is as without it."""
    means = []
    for text in ("local_sgd(1, reducer=ErrorFeedback(TopK(0.1)))", "local_sgd(1)"):
        torch.manual_seed(0)
        model = nn.Linear(30, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(model, optimizer, text) as run:
            for step in range(7):
                torch.manual_seed(10 * step + rank)
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)  # the same whatever the parameters are
                optimizer.step()
            run.swap("silent()")
        means.append(parameters(model))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*means, strict=True))


def test_a_swap_loses_no_residual() -> None:
    ranks(2, nothing_lost)


def sixteen(rank: int) -> None:
    for text in ("diloco(3)", "streaming_diloco(4, fragments=2, delay=2)", "local_sgd(2)", "local_sgd(2, reducer=Sign())"):
        model = chain(3).bfloat16()
        optimizer = adam(model)
        with laconic.attach(model, optimizer, text) as run:
            for step in range(10):
                model(vectors(rank, step).bfloat16()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert engine_of(run).local.drifted or everywhere_equal(parameters(model))
            deltas = engine_of(run).local.deltas
            anchors = deltas.anchors.by_name if deltas else {}
            assert all(anchor.dtype == torch.float32 for anchor in anchors.values())
        assert everywhere_equal(parameters(model))
        assert all(parameter.dtype == torch.bfloat16 for parameter in parameters(model))


def test_sixteen_bit_parameters_have_anchors_in_fp32() -> None:
    ranks(2, sixteen)


class Tied(nn.Module):
    """One weight under two names, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.middle.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)).tanh())
        return y


def tied(rank: int) -> None:
    for text in ("local_sgd(3)", "diloco(3)", "streaming_diloco(4, fragments=2, delay=2, order='bytes')"):
        model = Tied()
        optimizer = adam(model)
        with laconic.attach(model, optimizer, text):
            frozen = model.middle.weight.detach().clone()
            list(go(model, optimizer, rank, range(7)))
        assert everywhere_equal(parameters(model))
        assert model.last.weight is model.first.weight
        assert torch.equal(frozen, model.middle.weight)


def test_tied_and_frozen_parameters() -> None:
    ranks(2, tied)
