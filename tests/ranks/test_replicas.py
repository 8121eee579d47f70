"""Digests of replicas: bits that differ show, wherever they are; bits that don't, don't."""

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from laconic.comm.collectives import Collective
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.ranks.replicas import ReplicaError, compare, digest

PIECE = 1 << 20


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_every_number_and_its_place_count(count: int, dtype: torch.dtype) -> None:
    tensor = (torch.arange(count) % 7 % 2).to(dtype)
    seen = {tuple(digest(tensor).tolist())}
    for place in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[place] = 1 - other[place].int()
        seen.add(tuple(digest(other).tolist()))
    assert len(seen) == 1 + len({0, count // 2, count - 1})


def test_numbers_that_changed_places_are_not_the_same() -> None:
    """Also where they are as far from each other as a piece is long, and past the first piece."""
    tensor = torch.zeros(PIECE + 8, dtype=torch.int32)
    tensor[3] = 5
    first = digest(tensor).tolist()
    assert first == [5, 4 * 5]
    for place in (4, 3 + PIECE):
        other = torch.zeros_like(tensor)
        other[place] = 5
        assert digest(other).tolist() == [5, (place + 1) * 5]


def test_what_lies_differently_in_memory_is_the_same() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert torch.equal(digest(tensor), digest(tensor.contiguous(memory_format=torch.channels_last)))
    assert torch.equal(digest(tensor.half()), digest(tensor.half().clone().requires_grad_()))
    assert digest(torch.empty(0)).tolist() == [0, 0]


class Told:
    """An all-gather whose answer is known."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        return self.rows

    def future(self) -> Future[Tensor]:
        raise AssertionError("nobody asks for it")

    def when_done(self, call: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it")

    def settle(self, seconds: float) -> bool:
        return True


class Three(TorchGroup):
    """Ranks 4, 7 and 9, of which this is the first, and what they have."""

    members, rank, world = [4, 7, 9], 0, 3
    places: Mapping[int, str] = {}

    def __init__(self, replicas: list[dict[str, Tensor]]) -> None:
        self.replicas = replicas

    def launch(self, collective: Collective) -> Told:
        rows = torch.stack([torch.stack([digest(tensor) for tensor in one.values()]) for one in self.replicas])
        assert torch.equal(rows[0], collective.tensor)
        return Told(rows)


@pytest.mark.parametrize(
    ("spoilt", "sentence"),
    [
        ({}, None),
        ({0: "b"}, "after 6 steps, b is not the same on rank 4 as on rank 7"),
        ({1: "c"}, "after 6 steps, c is not the same on rank 7 as on rank 4"),
        ({2: "cab"}, "after 6 steps, a is not the same on rank 9 as on rank 4; neither are 2 others"),
        ({0: "b", 1: "b", 2: "c"}, "after 6 steps, b is not the same on rank 9 as on rank 4; neither are 1 others"),
    ],
)
def test_the_first_that_differs_is_named_with_the_ranks_that_are_alone(spoilt: dict[int, str], sentence: str | None) -> None:
    replicas = [{name: torch.arange(5.0) for name in "abc"} for _ in range(3)]
    for rank, names in spoilt.items():
        for name in names:
            replicas[rank][name] = torch.arange(5.0).flip(0)
    ledger = Ledger()
    arguments = (replicas[0], Three(replicas), ledger, torch.device("cpu"), 6)
    if sentence is None:
        compare(*arguments)
    else:
        with pytest.raises(ReplicaError, match=f"^{re.escape(sentence)}$"):
            compare(*arguments)
    assert ledger.total.wire_bytes == 2 * 16 * 3, "as many bytes as the docstring says"
