"""Laws that every reducer obeys, found by discovery: a new file in `reducers/` is tested without a line here."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.comm.bucket import RESIDUAL, Bucket
from laconic.comm.collectives import Traffic
from laconic.comm.dryrun import predict
from laconic.comm.flat_tensors import unflatten
from laconic.reducers.base import Reducer
from laconic.reducers.error_feedback import ErrorFeedback, Release
from laconic.reducers.momentum import Momentum
from laconic.strategies.gradient_recipes import ddp
from laconic.strategies.parsing import strategy
from laconic.strategies.strategy import render
from tests.reducers.every import EVERY, NAMES, Memory, Shapes, bits, is_frozen_dataclass, names, run, tensors

every = pytest.mark.parametrize("reducer", EVERY, ids=NAMES)
BARE = [reducer for reducer in EVERY if RESIDUAL not in reducer.all_memory()]
quick = settings(max_examples=25, deadline=None)
worlds = st.integers(1, 5)
shape = st.lists(st.integers(0, 7), max_size=4).map(tuple)
some_shapes = st.lists(shape, min_size=1, max_size=5)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(reducer: Reducer, dtype: torch.dtype) -> float:
    """How far mean + mean error may be from the truth, in units of the largest number."""
    if "accumulate='wire'" in render(reducer):
        return 2.0**-6  # the backend's own roundings are nobody's error
    # A gradient that is worked out of a momentum has its roundings so many times.
    times = 1 / (1 - reducer.beta) if isinstance(reducer, Momentum) else 1.0
    return times * max(16 * torch.finfo(dtype).eps, 1e-5)


@every
@quick
@given(world=worlds, shapes=some_shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))
def test_ranks_agree_and_what_is_not_in_the_mean_is_in_the_error(
    reducer: Reducer, world: int, shapes: Shapes, dtype: torch.dtype, seed: int
) -> None:
    memory: Memory = [{} for _ in range(world)]
    for step in range(4):
        inputs = [tensors(shapes, 100 * seed + 10 * step + rank, dtype) for rank in range(world)]
        given_up = copy.deepcopy(memory)
        plain, _ = run(reducer, inputs, given_up, step)
        results, _ = run(reducer, inputs, memory, step, feedback=True)
        for result in [*results, *plain]:
            assert result.mean.dtype == dtype
            assert torch.equal(bits(result.mean), bits(results[0].mean)), "on all ranks, whether or not an error is asked for"
        if RESIDUAL in reducer.all_memory() and not isinstance(reducer, Release):
            return  # it keeps for itself what is not in the mean
        whole = torch.stack([torch.cat([t.reshape(-1) for t in row]).double() for row in inputs])
        errors = [torch.zeros_like(whole[0]) if r.error is None else r.error.double() for r in results]
        left = torch.stack(errors).mean(0)
        largest = whole.abs().max().item() if whole.numel() else 0.0
        assert torch.allclose(results[0].mean.double() + left, whole.mean(0), rtol=0, atol=tolerance(reducer, dtype) * largest)


@pytest.mark.parametrize("reducer", BARE, ids=str)
def test_error_feedback_loses_nothing(reducer: Reducer) -> None:
    """The sum of the means, plus the mean residual, is the sum of the truths: over 50 steps, to 1e-6 of what was summed."""
    shapes: Shapes = [(), (0,), (33, 7), (5,), (4, 3, 2, 2), (101,)]
    wrapped, world = ErrorFeedback(reducer), 4
    memory: Memory = [{} for _ in range(world)]
    applied = truth = size = torch.zeros(())
    for step in range(50):
        inputs = [tensors(shapes, 100 * step + rank) for rank in range(world)]
        results, _ = run(wrapped, inputs, memory, step)
        exact = torch.stack([torch.cat([t.reshape(-1) for t in row]) for row in inputs]).double().mean(0)
        applied, truth, size = applied + results[0].mean.double(), truth + exact, size + exact.abs()
    labels = list(zip(names(shapes), shapes, strict=True))
    kept = [[slots[name].get("error", torch.zeros(shape)) for name, shape in labels] for slots in memory]
    residual = torch.stack([torch.cat([t.reshape(-1) for t in row]) for row in kept]).double().mean(0)
    bound = 2.0**-6 if "accumulate='wire'" in render(reducer) else 1e-5 if isinstance(reducer, Momentum) else 1e-6
    assert ((applied + residual - truth).abs() <= bound * size.max()).all()


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
@given(world=worlds, shapes=some_shapes, step=st.integers(0, 4))
def test_predicted_bytes_are_counted_bytes(reducer: Reducer, world: int, shapes: Shapes, step: int) -> None:
    _, ledger = run(reducer, [tensors(shapes, rank) for rank in range(world)], [{} for _ in range(world)], step)
    assert forecast(reducer, world, shapes, step) == ledger.total


@every
def test_bytes_depend_on_the_warm_up_and_the_parity_of_the_exchange_alone(reducer: Reducer) -> None:
    """`laconic.predict` takes one exchange for all that are alike in this."""
    shapes: Shapes = [(), (0,), (33, 7), (5,)]
    seen: dict[tuple[object, ...], Traffic] = {}
    for step in (0, 1, 2, 3, 4, 7, 100, 101):
        key = (step % 2, *(step >= end for end in reducer.changes_at()))
        assert seen.setdefault(key, forecast(reducer, 3, shapes, step)) == forecast(reducer, 3, shapes, step)


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
def test_memory_is_declared_and_what_is_shared_is_the_same_on_all_ranks(reducer: Reducer) -> None:
    """On another number of ranks it is dealt by this declaration."""
    shapes: Shapes = [(), (0,), (33, 7), (5,)]
    memory: Memory = [{} for _ in range(3)]
    for step in range(5):
        run(reducer, [tensors(shapes, 10 * step + rank) for rank in range(3)], memory, step)
    declared = reducer.all_memory()
    for name, slot in memory[0].items():
        assert slot.keys() <= declared.keys(), name
        for key in (key for key in slot if declared[key] == "shared"):
            assert all(torch.equal(bits(slots[name][key]), bits(slot[key])) for slots in memory), (name, key)


@every
@pytest.mark.parametrize(("bad", "where"), [(float("nan"), 0), (float("inf"), 0), (float("-inf"), 1)])
def test_non_finite_values_reach_every_rank_and_leave_no_trace(reducer: Reducer, bad: float, where: int) -> None:
    shapes: Shapes = [(5, 7), (11,)]
    memory: Memory = [{} for _ in range(3)]
    for step in range(6):
        inputs = [tensors(shapes, 10 * step + rank) for rank in range(3)]
        if step == 3:
            before = copy.deepcopy(memory)
            inputs[1][where].view(-1)[10] = bad  # in a matrix, and in what low rank sends as it is
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
