"""Laws that every reducer obeys, found by discovery: a new file in `reducers/` is tested without a line here."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.bucket import Bucket, unflatten
from laconic.dryrun import predict
from laconic.recipes import ddp, render
from laconic.reducers.base import Reducer
from laconic.spec import strategy
from laconic.wire import Traffic
from tests.laws.reducers import EVERY, NAMES, Memory, Shapes, bits, is_frozen_dataclass, names, run, tensors

every = pytest.mark.parametrize("reducer", EVERY, ids=NAMES)
quick = settings(max_examples=25, deadline=None)
worlds = st.integers(1, 5)
shape = st.lists(st.integers(0, 7), max_size=4).map(tuple)
some_shapes = st.lists(shape, min_size=1, max_size=5)
EPSILON = {torch.float32: 2.0**-7, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-7}  # two 16-bit roundings of N terms


@every
@quick
@given(world=worlds, shapes=some_shapes, dtype=st.sampled_from(list(EPSILON)), seed=st.integers(0, 1000))
def test_ranks_agree_on_the_mean(reducer: Reducer, world: int, shapes: Shapes, dtype: torch.dtype, seed: int) -> None:
    memory: Memory = [{} for _ in range(world)]
    for step in range(4):
        inputs = [tensors(shapes, 100 * seed + 10 * step + rank, dtype) for rank in range(world)]
        results, _ = run(reducer, inputs, memory, step)
        for result in results:
            assert torch.equal(bits(result.mean), bits(results[0].mean))
        truth = sum(torch.cat([t.reshape(-1) for t in row]).double() for row in inputs) / world
        largest = max([t.abs().max().item() for row in inputs for t in row if t.numel()], default=0.0)
        assert results[0].mean.dtype == dtype
        assert torch.allclose(results[0].mean.double(), torch.as_tensor(truth), rtol=0, atol=EPSILON[dtype] * largest)


@every
@quick
@given(world=worlds, shapes=some_shapes)
def test_zero_in_zero_out(reducer: Reducer, world: int, shapes: Shapes) -> None:
    memory: Memory = [{} for _ in range(world)]
    for step in range(3):
        results, _ = run(reducer, [tensors(shapes, 0, size=0.0)] * world, memory, step)
        assert all(not result.mean.any() for result in results)


@every
@quick
@given(world=worlds, shapes=some_shapes, seed=st.integers(0, 1000))
def test_error_is_what_the_peers_did_not_get(reducer: Reducer, world: int, shapes: Shapes, seed: int) -> None:
    """mean + mean of errors = truth, up to the second rounding of two-phase sums."""
    memory: Memory = [{} for _ in range(world)]
    for step in range(3):
        inputs = [tensors(shapes, 100 * seed + 10 * step + rank) for rank in range(world)]
        plain, _ = run(reducer, inputs, copy.deepcopy(memory), step)
        results, _ = run(reducer, inputs, memory, step, feedback=True)
        assert torch.equal(bits(plain[0].mean), bits(results[0].mean)), "asking for the error must not change the mean"
        truth = torch.stack([torch.cat([t.reshape(-1) for t in row]) for row in inputs]).mean(0)
        errors = [result.error for result in results]
        left = torch.stack([torch.zeros_like(truth) if error is None else error for error in errors]).mean(0)
        largest = truth.abs().max().item() if truth.numel() else 0.0
        assert torch.allclose(results[0].mean + left, truth, rtol=0, atol=2.0**-7 * max(largest, 1))


@every
@quick
@given(world=worlds, shapes=some_shapes, step=st.integers(0, 4))
def test_predicted_bytes_are_counted_bytes(reducer: Reducer, world: int, shapes: Shapes, step: int) -> None:
    _, ledger = run(reducer, [tensors(shapes, rank) for rank in range(world)], [{} for _ in range(world)], step)
    assert forecast(reducer, world, shapes, step) == ledger.total


@every
def test_saving_and_loading_changes_no_bit(reducer: Reducer) -> None:
    shapes: Shapes = [(), (0,), (5, 7), (3, 2, 2, 2)]
    one: Memory = [{} for _ in range(3)]
    for step in range(6):
        inputs = [tensors(shapes, 10 * step + rank) for rank in range(3)]
        if step == 3:
            other = copy.deepcopy(one)
        if step >= 3:
            again, _ = run(reducer, inputs, other, step)
        results, _ = run(reducer, inputs, one, step)
        assert step < 3 or torch.equal(bits(results[0].mean), bits(again[0].mean))


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_reach_every_rank_and_leave_no_trace(reducer: Reducer, bad: float) -> None:
    shapes: Shapes = [(5, 7), (11,)]
    memory: Memory = [{} for _ in range(3)]
    for step in range(6):
        inputs = [tensors(shapes, 10 * step + rank) for rank in range(3)]
        if step == 3:
            before = copy.deepcopy(memory)
            inputs[1][0][2, 3] = bad
        results, _ = run(reducer, inputs, memory, step)
        for result in results:
            assert bool(result.mean.isfinite().all()) == (step != 3)
        if step == 3:
            for then, now in zip(before, memory, strict=True):
                assert {n: list(s) for n, s in then.items()} == {n: list(s) for n, s in now.items()}
                assert all(torch.equal(then[n][k], now[n][k]) for n in then for k in then[n])


@every
def test_text_gives_the_reducer_back(reducer: Reducer) -> None:
    assert strategy(str(ddp(reducer=reducer))) == ddp(reducer=reducer)
    assert strategy(f"ddp(reducer={render(reducer)})").reducer == reducer
    assert is_frozen_dataclass(reducer)
    assert hash(reducer) == hash(copy.deepcopy(reducer))


def forecast(reducer: Reducer, world: int, shapes: Shapes, step: int) -> Traffic:
    like = [torch.empty(shape, device="meta") for shape in shapes]
    flat = torch.empty(sum(tensor.numel() for tensor in like), device="meta")
    one = Bucket(flat, unflatten(flat, like), names(shapes), [{} for _ in shapes], 0, world, step, step)
    return predict(reducer.reduce(one), world)
