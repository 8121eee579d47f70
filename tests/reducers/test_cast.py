"""What sixteen bits on the wire promise."""

import math

import pytest
import torch

from laconic.reducers.base import Reducer
from laconic.reducers.cast import DTYPES, Cast
from tests.reducers.every import Memory, bits, bucket, run, tensors

both = pytest.mark.parametrize("dtype", list(DTYPES))


def mean(reducer: Reducer, *values: torch.Tensor) -> torch.Tensor:
    memory: Memory = [{} for _ in values]
    return run(reducer, [[value] for value in values], memory, 0)[0][0].mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [(5e4, 5e4), (1e5, 0.0), (7e4, 3e4), (4e5, 0, 0, 0, 0, 0, 0, 0), (1.5e5, 0, 0)])
def test_fp16_takes_numbers_n_times_as_large_as_the_mean(values: tuple[float, ...], dtype: torch.dtype) -> None:
    got = mean(Cast("fp16"), *(torch.tensor([float(value)], dtype=dtype) for value in values))
    assert got.item() == pytest.approx(5e4, rel=2 * torch.finfo(dtype).eps + 2**-10)


@pytest.mark.parametrize("accumulate", ["fp32", "wire"])
def test_fp16_keeps_small_numbers_as_torch_does(accumulate: str) -> None:
    got = mean(Cast("fp16", accumulate=accumulate), *[torch.tensor([1e-6])] * 8)  # type: ignore[arg-type]
    assert got.item() == pytest.approx(1e-6, rel=0.06)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_fp16_shrinks_no_more_than_the_world_needs(world: int) -> None:
    smallest = torch.tensor([2.0**-24 * 2 ** math.ceil(math.log2(world))])
    assert torch.equal(mean(Cast("fp16"), *[smallest] * world), smallest)


@both
@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_identical_replicas_come_back_bit_for_bit(dtype: str, world: int) -> None:
    value = torch.cat([tensors([(997,)], 1, DTYPES[dtype], size)[0] for size in (1e-7, 1e-4, 1.0, 3e3)])
    for _ in range(10):
        got = mean(Cast(dtype), *[value] * world)
        assert torch.equal(bits(got), bits(value))


@both
def test_the_error_does_not_grow_with_the_world(dtype: str) -> None:
    def error(world: int, accumulate: str) -> float:
        values = [tensors([(4001,)], rank)[0] + 1 for rank in range(world)]
        truth = torch.stack(values).double().mean(0)
        got = mean(Cast(dtype, accumulate=accumulate), *values)  # type: ignore[arg-type]
        return (got.double() - truth).square().mean().sqrt().item()

    assert error(8, "fp32") <= error(2, "fp32") * 1.05
    assert error(8, "wire") > error(8, "fp32") * 1.5, "else this test couldn't tell"


def test_bytes_are_half_of_fp32_at_any_world() -> None:
    count = 1024
    for world in range(1, 6):
        for reducer in Cast.examples():
            _, ledger = run(reducer, [tensors([(count * world,)], rank) for rank in range(world)], [{}] * world, 0)
            assert ledger.total.wire_bytes == 2 * (world - 1) * count * 2


def test_torch_dtypes_are_understood_and_others_refused() -> None:
    assert Cast(torch.bfloat16) == Cast("bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of fp16, bf16, got 'int3'"):
        Cast("int3")
    with pytest.raises(ValueError, match="'fp32' or 'wire', got 'fp64'"):
        Cast("bf16", accumulate="fp64")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_pieces_give_the_bits_of_the_whole(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [tensors([(33, 7), (5,), (101,)], rank) for rank in range(3)]
    whole = run(Cast(dtype), inputs, [{} for _ in range(3)], 0, feedback=True)[0]
    monkeypatch.setattr("laconic.reducers.cast.PIECE", 16)
    pieces = run(Cast(dtype), inputs, [{} for _ in range(3)], 0, feedback=True)[0]
    for one, other in zip(whole, pieces, strict=True):
        assert one.error is not None
        assert other.error is not None
        assert torch.equal(bits(one.mean), bits(other.mean))
        assert torch.equal(bits(one.error), bits(other.error))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 130, 131])
def test_a_message_in_the_place_of_its_numbers_gives_the_same_mean(
    dtype: str, given: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.reducers.cast.PIECE", 32)
    monkeypatch.setattr("laconic.reducers.cast.FIRST", 8)
    inputs = [tensors([(count,)], rank, given) for rank in range(3)]
    apart = run(Cast(dtype), inputs, [{} for _ in range(3)], 0, feedback=True)[0]
    in_place = run(Cast(dtype), inputs, [{} for _ in range(3)], 0)[0]
    for one, other in zip(apart, in_place, strict=True):
        assert torch.equal(bits(one.mean), bits(other.mean))


def test_a_message_takes_no_memory_of_its_own() -> None:
    one = bucket([torch.ones(1000)], {}, 0, 2, 0, feedback=False)
    collective = next(Cast("fp16").reduce(one))
    assert collective.tensor.untyped_storage().data_ptr() == one.flat.untyped_storage().data_ptr()
