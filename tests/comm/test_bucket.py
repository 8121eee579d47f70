"""Buckets: memory follows a parameter's name into any layout, tensors are seen as they lie in memory, runs have a limit."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from laconic.comm.bucket import Bucket, Slot, joined
from laconic.comm.flat_tensors import CHUNK, flatten, pack, squared_norm, stored

SHAPES = {"a": (3, 2), "b": (6,), "c": (2, 3), "d": (4,)}


def laid_out(names: Sequence[str], memory: dict[str, Slot], dtype: torch.dtype = torch.float32) -> Bucket:
    flat, views = flatten([torch.zeros(SHAPES[name], dtype=dtype) for name in names])
    return Bucket(flat, views, list(names), [memory[name] for name in names], 0, 1)


def numbered(place: int, name: str) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(SHAPES[name]).numel()).view(SHAPES[name]) + 10 * place


@pytest.mark.parametrize(
    ("first", "then"),
    [
        *((["abcd"], then) for then in (["abcd"], ["cbad"], ["bacd"], ["ab", "cd"], ["d", "cba"], ["bcd", "a"])),
        (["cbd", "a"], ["ab", "cd"]),  # as far from the start as before, and in another tensor
    ],
    ids="|".join,
)
def test_memory_follows_the_name_into_another_layout(first: list[str], then: list[str]) -> None:
    """Some parameters have as many numbers as others: a layout is not known by sizes."""
    memory: dict[str, Slot] = {name: {} for name in SHAPES}
    for names in first:
        assert joined(laid_out(names, memory), "error") is None
        whole = joined(laid_out(names, memory), "error", create=True)
        assert whole is not None
        whole.copy_(torch.cat([numbered(list(SHAPES).index(name), name).view(-1) for name in names]))
    for names in then:
        again = joined(laid_out(names, memory), "error")
        assert again is not None
        wanted = torch.cat([numbered(list(SHAPES).index(name), name).view(-1) for name in names])
        assert torch.equal(again, wanted)
        again += 1
        for name in names:
            assert torch.equal(memory[name]["error"], numbered(list(SHAPES).index(name), name) + 1), "and is written there"
    if first == then == ["abcd"]:
        assert again is not None
        assert whole is not None
        assert again.data_ptr() == whole.data_ptr(), "found again, not copied"


def test_memory_that_only_some_parameters_have_or_that_is_of_another_kind() -> None:
    memory: dict[str, Slot] = {name: {} for name in SHAPES}
    memory["b"]["error"] = torch.ones(6, dtype=torch.float64)
    found = joined(laid_out("ab", memory), "error")
    assert found is not None
    assert found.tolist() == [0.0] * 6 + [1.0] * 6
    assert found.dtype == torch.float32
    half = joined(laid_out("ab", memory, torch.bfloat16), "error")
    assert half is not None
    assert half.dtype == torch.bfloat16
    assert half.tolist() == found.tolist()


def test_memory_lies_as_the_gradient_does() -> None:
    """DDP's views of channels_last gradients are: the same numbers in another order."""
    flat = torch.zeros(24)
    slot: Slot = {"error": torch.arange(24.0).view(2, 3, 2, 2)}
    wanted = slot["error"].clone()
    view = flat.as_strided((2, 3, 2, 2), (12, 1, 6, 3))
    found = joined(Bucket(flat, [view], ["conv"], [slot], 0, 1), "error")
    assert found is not None
    flat += found
    assert torch.equal(view, wanted)
    assert torch.equal(slot["error"], wanted)


def test_tensors_as_they_lie_in_memory() -> None:
    base = torch.arange(48.0)
    single = base.as_strided((12, 1, 4), (1, 5, 12))  # the stride of a single row means nothing
    for dense in (
        base,
        base.view(4, 12).t(),
        single,
        base[8:32].view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    ):
        found = stored(dense)
        assert found is not None
        assert sorted(found.tolist()) == sorted(dense.flatten().tolist())
        assert found.data_ptr() == dense.data_ptr()
    transposed = stored(base[8:32].view(4, 6).t())
    assert transposed is not None
    assert transposed.tolist() == list(range(8, 32)), "a part of a larger one"
    assert stored(base.view(6, 8)[:, :5]) is None
    assert stored(base.view(6, 8)[::2]) is None
    assert stored(torch.ones(1).expand(5)) is None


def test_squares_are_summed_over_all_pieces_and_kinds_in_fp64() -> None:
    gaps = torch.full((6, 8), 2.0)[:, :5]
    assert squared_norm([gaps, gaps.t(), torch.empty(0)]) == 2 * 30 * 4.0
    assert squared_norm([]) == 0.0
    assert squared_norm([torch.ones(2 * CHUNK + 3)]) == 2 * CHUNK + 3
    assert squared_norm([torch.tensor([1e4, 1e-3])]) == pytest.approx(1e8 + 1e-6, rel=1e-15, abs=0)
    assert squared_norm([torch.full((5,), 300.0, dtype=torch.float16)]) == 450_000, "more than 16 bits hold"


def test_runs_are_of_one_kind_and_no_longer_than_the_limit() -> None:
    single, double = torch.float32, torch.float64
    tensors = [torch.empty(n, dtype=kind) for n, kind in [(2, single), (1, double), (3, single), (1, single), (9, single)]]
    tensors += [torch.empty(1, dtype=single), torch.empty(2, dtype=double)]
    assert pack(tensors, 20) == [[0, 2], [3], [4], [5], [1], [6]], "20 bytes fit into 20"
    assert pack(tensors, 24) == [[0, 2, 3], [4], [5], [1, 6]]
    assert pack([], 24) == []
