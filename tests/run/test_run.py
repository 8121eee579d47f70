"""The live object: swap, detach, silent, consensus, state, copies, clocks."""

import copy
import functools
import io
import pickle
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic.comm.ledger import Ledger
from laconic.run.run import engine_of
from tests.live import POLL_SECONDS, ranks
from tests.models import Odd, build, chain, everywhere_equal, images, same_bits, vectors, weights


def some_steps(model: nn.Module, optimizer: Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        model(vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain(rank: int, steps: int) -> list[Tensor]:
    model = build(chain)
    some_steps(model, sgd(model), rank, range(steps))
    return weights(model)


def swap(rank: int) -> None:
    model = build(chain)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, "ddp()") as run:
        some_steps(model, optimizer, rank, range(5))
        before = run.stats()
        run.swap("bf16()")
        assert str(run.strategy) == "bf16()"
        hook = engine_of(run).hook
        assert hook is not None
        assert hook.strategy == "bf16()", "an error in backward names it"
        some_steps(model, optimizer, rank, range(5, 10))
        after = run.stats()
        assert after.collectives - before.collectives == 2 * 5 * len(run.layout())
        each = 5 * len(run.layout())
        assert after.collectives_by_kind == {"AllReduce": before.collectives, "AllToAll": each, "AllGather": each}
        assert sum(after.wire_bytes_by_kind.values()) == after.wire_bytes
        assert after.wire_bytes_by_kind["AllReduce"] == before.wire_bytes
        assert everywhere_equal(weights(model))
        with pytest.raises(ValueError, match="did you mean 'bf16'"):
            run.swap("bf61()")
        with pytest.raises(ValueError, match=r"rank 2 has strategy fp16\(\), .* strategy int8\(\)"):
            run.swap("fp16()" if rank == 2 else "int8()")
        assert str(run.strategy) == "bf16()", "nothing has changed"
        run.swap("silent")
        some_steps(model, optimizer, rank, range(10, 15))
        assert run.stats().wire_bytes == after.wire_bytes
        assert not everywhere_equal(weights(model))
        run.swap("ddp")
        assert everywhere_equal(weights(model)), "gradients are averaged over equal replicas"
        some_steps(model, optimizer, rank, range(15, 17))
    assert everywhere_equal(weights(model)), "leaving the block makes replicas equal"
    assert run.stats().steps == 17


def test_swap_in_the_middle_of_a_run() -> None:
    ranks(3, swap)


def still_apart(rank: int) -> None:
    """From one strategy of local steps to another, in the middle of a period: what has drifted, has drifted."""
    model = build(chain)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, "local_sgd(2)") as run:
        some_steps(model, optimizer, rank, range(5))
        run.swap("silent()")
        run.swap("silent()")
        assert engine_of(run).drifted == (not everywhere_equal(weights(model)))
        assert run.stats().syncs == 2, "those before the swap count"
    assert everywhere_equal(weights(model))


def test_replicas_that_are_apart_at_a_swap_end_equal() -> None:
    ranks(2, still_apart)


def detach(rank: int) -> None:
    model = build(chain)
    optimizer = sgd(model)
    run = laconic.attach(model, optimizer, "ddp()")
    some_steps(model, optimizer, rank, range(4))
    run.detach()
    run.detach()
    some_steps(model, optimizer, rank, range(4, 8))
    assert run.stats().steps == 4
    assert same_bits(weights(model), plain(rank, 8)), "a detached DDP is a plain one"
    again = laconic.attach(model, optimizer, "fp16()")
    some_steps(model, optimizer, rank, range(3))
    assert again.stats().steps == 3
    with pytest.raises(RuntimeError, match="sync\\(\\) needs a run that is attached"):
        run.sync()
    again.detach()


def test_detach_gives_plain_ddp_back_and_attach_works_again() -> None:
    ranks(3, detach)


def dropped(rank: int) -> None:
    model = build(chain)
    optimizer = sgd(model)
    laconic.attach(model, optimizer, "silent()")
    some_steps(model, optimizer, rank, range(3))
    assert not everywhere_equal(weights(model))


def test_a_run_that_nobody_keeps_lives_on() -> None:
    ranks(2, dropped)


def silent(rank: int, ddp: bool) -> None:
    torch.manual_seed(0)
    module: nn.Module = Odd()
    model = DistributedDataParallel(module, find_unused_parameters=True) if ddp else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    alone = copy.deepcopy(module)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    pointers = [p.data_ptr() for p in model.parameters()]
    with laconic.attach(model, optimizer, "silent()") as run:
        for step in range(3):
            for one, its in ((model, optimizer), (alone, alone_optimizer)):
                one(images(rank, step)).square().mean().backward()
                its.step()
                its.zero_grad()
        assert same_bits(weights(module), weights(alone)), "a silent rank is a process alone, buffers included"
        assert run.stats().collectives == 0
        mine = weights(module)
        with run.consensus():
            means = weights(module)
            assert everywhere_equal(means)
            with pytest.raises(RuntimeError, match="inside consensus"):
                run.sync()
        assert same_bits(weights(module), mine), "and back, bit for bit"
        assert run.stats().wire_bytes == 0
        assert run.stats().background_bytes > 0
    assert same_bits(weights(module), means)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, operator]
    if isinstance(model, DistributedDataParallel):
        assert model.require_backward_grad_sync
        assert model.forward_sync_buffers


@pytest.mark.parametrize("ddp", [True, False], ids=["DDP", "bare"])
def test_silent_ranks_are_alone_and_end_equal(ddp: bool) -> None:
    ranks(3, silent, ddp)


def replicas_of_16_bits(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = chain().to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    before = weights(module)
    with laconic.attach(module, optimizer, "silent()") as run:
        for _ in range(10):
            optimizer.step()
            run.sync()
    assert same_bits(weights(module), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averaging_identical_16_bit_replicas_changes_no_bit(dtype: torch.dtype) -> None:
    ranks(3, replicas_of_16_bits, dtype)


def resume(rank: int) -> None:
    model = build(chain)
    optimizer = sgd(model)
    run = laconic.attach(model, optimizer, "bf16(warmup=3)")
    some_steps(model, optimizer, rank, range(4))
    buffer = io.BytesIO()
    torch.save({"run": run.state_dict(), "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    run.detach()
    other = build(chain)
    other_optimizer = sgd(other)
    new = laconic.attach(other, other_optimizer, "bf16(warmup=3)")
    for bad, wanted in [
        ({}, "version"),
        ({**saved["run"], "version": 99}, "got 99"),
        ({**saved["run"], "strategy": "ddp()"}, "the state is of the strategy ddp\\(\\), attached is bf16\\(warmup=3\\)"),
        ({**saved["run"], "memory": {"nobody": {}}}, "'nobody'"),
        ({key: value for key, value in saved["run"].items() if key != "exchanges"}, "damaged: KeyError: 'exchanges'"),
        ({**saved["run"], "whose": {"error": "mine"}}, "damaged: ValueError: memory is 'own' or 'shared', got 'mine'"),
        ({**saved["run"], "memory": {"0.weight": {"error": 3}}, "kept": ["0.weight: error"]}, "must be tensors"),
        ({**saved["run"], "memory": {"0.weight": {"error": torch.zeros(1)}}}, "save laconic.checkpoint.RankState"),
        ({**saved["run"], "rank": 7}, "this is the state of rank 7, and here is rank"),
        ({**saved["run"], "counts": {**saved["run"]["counts"], "steps": "four"}}, "damaged: ValueError: .*'four'"),
        ({**saved["run"], "counts": {**saved["run"]["counts"], "wait_seconds": "long"}}, "damaged: ValueError: .*'long'"),
    ]:
        with pytest.raises(ValueError, match=wanted):
            new.load_state_dict(bad)
    assert new.stats().steps == 0
    new.load_state_dict({**saved["run"], "strategy": "ddp(reducer=Cast('bf16'), warmup=3)"})  # the same, in other words
    new.load_state_dict(saved["run"])
    assert new.stats().steps == 4
    with pytest.warns(UserWarning, match=r"the state is of ddp\(warmup=0\), and the run goes on by bf16\(warmup=3\)"):
        new.load_state_dict({**saved["run"], "strategy": "ddp( warmup=0 )"}, strict=False)
    assert str(new.strategy) == "bf16(warmup=3)"
    new.load_state_dict(saved["run"])
    other.module.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    some_steps(other, other_optimizer, rank, range(4, 8))
    buffer.seek(0)
    saved = torch.load(buffer)  # once more: an optimizer adopts the tensors it loads
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    again = laconic.attach(model, optimizer, "bf16(warmup=3)")
    again.load_state_dict(saved["run"])
    some_steps(model, optimizer, rank, range(4, 8))
    assert same_bits(weights(model), weights(other))
    assert new.state_dict()["step"] == 8


def test_state_comes_back_and_misfits_are_refused() -> None:
    ranks(2, resume)


def copies(rank: int, strategy: str) -> None:
    model = build(chain)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, strategy):
        some_steps(model, optimizer, rank, range(3))
        with pytest.warns(UserWarning, match="a plain one, attached to no laconic run"):
            ema = copy.deepcopy(model)
        with pytest.warns(UserWarning, match="a plain one, attached to no laconic run"):
            revived = pickle.loads(pickle.dumps(model))
        assert same_bits(weights(ema), weights(model))
        for part in (ema, revived):
            with torch.no_grad():
                part(vectors(rank, 0))
            some_steps(part, sgd(part), 0, range(2))
            assert part.require_backward_grad_sync
            dist.barrier()
        some_steps(model, optimizer, rank, range(3, 5))
    fresh = laconic.attach(ema, sgd(ema), "bf16()")
    some_steps(ema, torch.optim.SGD(ema.parameters(), lr=0.1), rank, range(2))
    assert fresh.stats().exchanges == 2
    fresh.detach()


@pytest.mark.parametrize("strategy", ["bf16()", "silent()"])
def test_a_copied_ddp_is_a_plain_one(strategy: str) -> None:
    ranks(2, copies, strategy)


class Once(nn.Module):
    """One parameter whose gradient overflows when the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def scaled(rank: int, strategy: str) -> None:
    model = DistributedDataParallel(Once())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with laconic.attach(model, optimizer, strategy, scaler=scaler) as run:
        for step in range(6):
            overflow = rank == 0 and step == 2
            scaler.scale(model(torch.full((4,), float("inf") if overflow else 1.0))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert run.stats().steps == 6, "a skipped step counts"
        local = 6 - (strategy != "silent()" or rank == 0)
        assert torch.allclose(model.module.weight, torch.full((4,), 1 - 0.1 * local))
    assert "step" not in vars(scaler)


@pytest.mark.parametrize("strategy", ["ddp()", "fp16()", "silent()"])
def test_a_scaler_that_skips_keeps_the_clocks_together(strategy: str) -> None:
    ranks(2, scaled, strategy)


def several(rank: int, later: bool) -> None:
    model = build(chain)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:4], lr=0.1), torch.optim.Adam(parameters[4:], lr=0.01)]
    with laconic.attach(model, [*optimizers[: 1 if later else 2]], "bf16()") as run:
        if later:
            engine_of(run).add_optimizer(optimizers[1])
            with pytest.raises(ValueError, match="attached"):
                laconic.attach(build(chain), optimizers[1], "bf16()")
        for step in range(4):
            model(vectors(rank, step)).square().mean().backward()
            optimizers[0].step()
            assert run.stats().steps == step
            optimizers[1].step()
            assert run.stats().steps == step + 1
            model.zero_grad()


@pytest.mark.parametrize("later", [False, True])
def test_a_step_is_done_when_every_optimizer_has_made_one(later: bool) -> None:
    ranks(2, several, later)


def alone(rank: int) -> None:
    for text in ("ddp()", "bf16()", "silent()"):
        model = build(chain)
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, text) as run:
            some_steps(model, optimizer, rank, range(3))
            with run.consensus():
                pass
        assert run.stats().wire_bytes == 0
        assert run.stats().steps == 3
        if text != "bf16()":
            assert same_bits(weights(model), plain(rank, 3))


def test_a_world_of_one_simply_works() -> None:
    ranks(1, alone)


def quiet(rank: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = build(chain)
        optimizer = sgd(model)
        with laconic.attach(model, optimizer, "bf16(warmup=2)"):
            some_steps(model, optimizer, rank, range(3))
    assert [str(one.message) for one in seen] == []


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    ranks(2, quiet)


def no_sync_and_swaps(rank: int) -> None:
    model = build(chain)
    optimizer = sgd(model)
    run = laconic.attach(model, optimizer, "ddp()")
    with model.no_sync():
        model(vectors(rank, 0)).sum().backward()
        run.swap("silent()")
    some_steps(model, optimizer, rank, range(2))
    assert run.stats().exchanges == 0
    with model.no_sync():
        run.swap("ddp()")
        model(vectors(rank, 0)).sum().backward()
    assert run.stats().exchanges == 0
    some_steps(model, optimizer, rank, range(2))
    assert run.stats().exchanges == 2
    run.detach()
    assert model.require_backward_grad_sync


def test_no_sync_and_local_phases_do_not_confuse_each_other() -> None:
    ranks(2, no_sync_and_swaps)


def frozen_and_ignored(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(3, 3))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.bias"])  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(module, find_unused_parameters=True)
    first, _, last = model.module
    first.bias.requires_grad_(False)
    with torch.no_grad():
        last.bias.fill_(rank)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, "bf16()") as run:
        some_steps(model, optimizer, rank, range(2))
        run.swap("silent()")
        optimizer.step()
    assert not everywhere_equal([last.bias]), "what DDP was told to ignore is nobody's business"
    assert everywhere_equal([p for name, p in module.named_parameters() if name != "2.bias"])


def test_frozen_and_ignored_parameters() -> None:
    ranks(2, frozen_and_ignored)


def in_a_subgroup(rank: int) -> str:
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    if rank == 0:
        return ""
    torch.manual_seed(0)
    model = DistributedDataParallel(chain(), process_group=groups[1], bucket_cap_mb=0.001)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, "bf16()") as run:
        some_steps(model, optimizer, rank, range(3))
    assert run.stats().exchanges == 3
    for text in ("streaming_diloco(2, fragments=1, delay=1)", "hierarchical_sgd({1: 1, 2: 2})"):  # with groups of their own
        with laconic.attach(model, optimizer, text):
            some_steps(model, optimizer, rank, range(4))
        both = [torch.empty_like(w) for w in 2 * [next(model.parameters()).detach()]]
        dist.all_gather(both, next(model.parameters()).detach(), group=groups[1])
        assert torch.equal(*both)
    with pytest.raises(ValueError, match="different things") as caught:
        laconic.attach(model, optimizer, ["bf16()", "ddp()"][rank - 1])
    return str(caught.value)


def test_a_ddp_over_some_of_the_ranks() -> None:
    messages = ranks(3, in_a_subgroup)
    assert messages[1] == messages[2]
    assert "rank 2 has strategy ddp(), rank 1 has strategy bf16()" in messages[1]


def late(average: Callable[[Ledger], None], ledger: Ledger) -> None:
    time.sleep(1)
    average(ledger)


def slow_exit(rank: int) -> None:
    import laconic.comm.group

    laconic.comm.group.POLL_SECONDS = 0.2
    try:
        module = chain()
        optimizer = sgd(module)
        with laconic.attach(module, optimizer, "silent()") as run:
            some_steps(module, optimizer, rank, range(2))
            if rank == 1:
                engine_of(run).local.equalise = functools.partial(late, engine_of(run).local.equalise)  # type: ignore[method-assign]
        assert everywhere_equal(weights(module))
    finally:
        laconic.comm.group.POLL_SECONDS = POLL_SECONDS


def test_a_slow_final_average_is_no_reason_to_worry() -> None:
    ranks(2, slow_exit)
