"""Compressors with error feedback at work: GradScaler, swaps, warm-ups that never end."""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.run.run import engine_of
from laconic.strategies.recipe import recipes
from tests.live import ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights
from tests.reducers.every import Memory, bits, run, tensors

COMPRESSED = [name for name in sorted(recipes()) if name not in ("auto", "ddp", "silent") and not recipes()[name]().averaging]


def overflowing(rank: int, text: str, one_layer: bool = False) -> None:
    def fit(bad_step: int | None) -> list[Tensor]:
        model = build(chain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, growth_factor=16.0)
        with laconic.attach(model, optimizer, text, scaler=scaler):
            for step in range(8):
                for bad in [True, False] if step == bad_step else [False]:
                    loss = model(vectors(rank, step)).square().mean()
                    if bad and rank == 1:
                        loss = loss + list(model.parameters())[8].sum() * float("inf") if one_layer else loss * float("inf")
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    if not bad:
                        scaler.update()
                    else:
                        scaler._per_optimizer_states.clear()  # as update() does, but with the scale kept
                    optimizer.zero_grad()
            assert everywhere_equal(weights(model))
        return weights(model)

    clean, disturbed = fit(None), fit(5)
    assert all(t.isfinite().all() for t in disturbed)
    assert same_bits(clean, disturbed), "a skipped step leaves no trace"


@pytest.mark.parametrize("name", [name for name in COMPRESSED if name != "randomk"])
def test_an_overflow_on_one_rank_skips_on_all_and_leaves_no_trace(name: str) -> None:
    ranks(2, overflowing, f"{name}()" if name in ("fp16", "bf16", "int8", "int4", "fp8") else f"{name}(warmup=2)")


@pytest.mark.parametrize("text", ["int4(warmup=2)", "powersgd(rank=1, warmup=2)", "sign(warmup=2)", "topk(warmup=2)"])
def test_an_overflow_in_one_bucket_leaves_no_trace_in_the_others(text: str) -> None:
    ranks(2, overflowing, text, one_layer=True)


def swapping(rank: int, scaled: bool, last: str) -> None:
    """What error feedback holds is not lost when another strategy takes over, whatever the loss is scaled by then."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(40, 30, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.module.weight.detach().clone()
    truth = torch.zeros_like(start)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3, growth_factor=4.0, enabled=scaled)
    with laconic.attach(model, optimizer, "topk(ratio=0.02, warmup=0)", scaler=scaler) as run:
        for step in range(12):
            if step == 5:
                run.swap("powersgd(rank=1, warmup=0)")
            if step == 9:
                run.swap(last)
            weight = torch.randn(30, 40, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(torch.eye(40)) * weight.T).sum()
            torch.autograd.backward(scaler.scale(loss))
            both = [torch.randn(30, 40, generator=torch.Generator().manual_seed(1000 * step + r)) for r in range(2)]
            truth += torch.stack(both).mean(0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step >= 9:
                assert torch.allclose(start - model.module.weight, truth, atol=1e-3), "everything has been applied"
                assert "error" not in run.state_dict()["memory"]["weight"], "what has been sent is not kept"
                hook = engine_of(run).hook
                assert hook is not None
                assert hook.reducer == laconic.Exact(), "nothing is left to release"
            else:
                assert not torch.allclose(start - model.module.weight, truth, atol=1e-1)


@pytest.mark.parametrize(
    ("scaled", "last"),
    [(False, "ddp()"), (True, "ddp()"), (False, "ddp(reducer=Release(Exact()))")],
    ids=["plain", "GradScaler", "named Release"],
)
def test_residuals_pass_on_at_a_swap_or_go_into_the_next_exchange(scaled: bool, last: str) -> None:
    ranks(2, swapping, scaled, last)


def disabled(rank: int) -> None:
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with laconic.attach(model, optimizer, "local_sgd(8)", scaler=scaler) as run:
        for step in range(3):
            if step == 2:
                run.swap("ddp()")
            torch.autograd.backward(scaler.scale(model(vectors(rank, step)).square().mean()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert run.step == 3
        assert everywhere_equal(weights(model))


def test_a_disabled_grad_scaler_has_no_scale_to_make_equal() -> None:
    ranks(2, disabled)


def going_back(rank: int) -> None:
    """Rank 1 has no residuals, so it is done with releasing them one exchange before rank 0, where they were kept."""
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)

    def step(bad: bool = False) -> None:
        loss = model(vectors(rank, 0)).sum() * (1 - rank)
        scaler.scale(loss * float("inf") if bad and rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with laconic.attach(model, optimizer, "topk(ratio=0.02, warmup=0)", scaler=scaler) as run:
        step()
        run.swap("int8()")
        step(bad=True)
        state = run.state_dict()
        assert any("error" in slot for slot in state["memory"].values()) == (rank == 0)
        step()
        run.load_state_dict(state)
        step()
        assert everywhere_equal(weights(model))


def test_ranks_that_hold_residuals_and_ranks_that_do_not_go_back_to_one_order_of_collectives() -> None:
    ranks(2, going_back)


def short(rank: int) -> None:
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(UserWarning, match=r"powersgd\(warmup=3\) never began: its warm-up of 3 steps lasted for all 3"):  # noqa: SIM117
        with laconic.attach(model, optimizer, "powersgd(warmup=3)"):
            for step in range(3):
                model(vectors(rank, step)).square().mean().backward()
                optimizer.step()


def test_a_warm_up_that_never_ends_is_said() -> None:
    ranks(2, short)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_without_a_residual_has_the_same_mean(rank: int) -> None:
    """After a resume on more ranks, say. Those that hold one write it and the mean in one go, where the rank is low."""
    reducer = laconic.ErrorFeedback(laconic.PowerSGD(rank, min_compression_rate=1))
    memory: Memory = [{} for _ in range(3)]
    for step in range(3):
        if step == 2:
            for slot in memory[1].values():
                del slot["error"]
        inputs = [tensors([(40, 17), (5,), (9, 30)], 10 * step + each) for each in range(3)]
        results, _ = run(reducer, inputs, memory, step)
        assert all(torch.equal(bits(result.mean), bits(results[0].mean)) for result in results)


def test_a_wrapper_between_feedback_and_low_rank_loses_nothing() -> None:
    """The momentum of the gradient is not the gradient: its error must not be written as the gradient's."""
    reducer = laconic.ErrorFeedback(laconic.Momentum(laconic.PowerSGD(1, min_compression_rate=1)))
    memory: Memory = [{} for _ in range(2)]
    applied = truth = size = torch.zeros(())
    for step in range(12):
        inputs = [tensors([(20, 9), (5,)], 10 * step + rank) for rank in range(2)]
        results, _ = run(reducer, inputs, memory, step)
        exact = torch.stack([torch.cat([tensor.reshape(-1) for tensor in row]) for row in inputs]).double().mean(0)
        applied, truth, size = applied + results[0].mean.double(), truth + exact, size + exact.abs()
    kept = [torch.cat([slot["error"].reshape(-1) for slot in slots.values()]) for slots in memory]
    residual = torch.stack(kept).double().mean(0)
    assert ((applied + residual - truth).abs() <= 1e-5 * size.max()).all()
