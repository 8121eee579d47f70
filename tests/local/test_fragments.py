"""Which parameters travel together, and at which steps they leave."""

import pytest
import torch

import laconic
from laconic.local.agenda import Agenda
from laconic.local.fragments import fragments

SIZES = {
    "embed.weight": 6,
    "body.0.a": 1,
    "body.0.b": 1,
    "body.1.a": 2,
    "body.1.b": 2,
    "body.2.a": 3,
    "head.weight": 1,
    "head.bias": 1,
}
MODEL = {name: torch.empty(size) for name, size in SIZES.items()}


def split(count: int, order: str) -> list[list[str]]:
    return fragments(MODEL, count, order)


def test_by_layer_in_turn_or_in_runs_of_about_equal_bytes() -> None:
    zero, one, head = ["body.0.a", "body.0.b"], ["body.1.a", "body.1.b"], ["head.weight", "head.bias"]
    assert split(2, "strided") == [["embed.weight", *one, *head], [*zero, "body.2.a"]]
    assert split(2, "contiguous") == [["embed.weight", *zero], [*one, "body.2.a", *head]]
    assert split(3, "strided") == [["embed.weight", "body.2.a"], [*zero, *head], one]
    assert split(3, "bytes") == [["embed.weight"], [*zero, *one], ["body.2.a", *head]]
    assert split(1, "strided") == split(1, "bytes") == [list(MODEL)]


@pytest.mark.parametrize(("order", "most"), [("strided", 5), ("contiguous", 5), ("bytes", 8)])
def test_no_fragment_is_empty_and_none_has_a_parameter_twice(order: str, most: int) -> None:
    for count in range(1, most + 1):
        found = split(count, order)
        assert all(found)
        assert len(found) == count
        assert sorted(name for part in found for name in part) == sorted(MODEL)
    what = "parameters" if order == "bytes" else r"layers \(or use order='bytes'\)"
    with pytest.raises(ValueError, match=f"{most + 1} fragments can't be made of {most} {what}; ask for {most} at most"):
        split(most + 1, order)


def test_fragments_are_balanced_by_bytes_not_by_numbers() -> None:
    model = {
        "a": torch.empty(4, dtype=torch.float64),
        "b": torch.empty(4).half(),
        "c": torch.empty(4).half(),
        "d": torch.empty(4),
    }
    assert fragments(model, 2, "bytes") == [["a"], ["b", "c", "d"]]
    tail = {name: torch.empty(size) for name, size in (("a", 1), ("b", 1), ("c", 1), ("d", 100))}
    assert fragments(tail, 3, "bytes") == [["a", "b"], ["c"], ["d"]], "as many as are left to fill the others"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Fragment f of F completes (f + 1) / F into a period, which begins after the warm-up, and leaves `delay` steps before.
        ("streaming_diloco(6, fragments=2, delay=0)", [[3, 9, 15], [6, 12, 18]]),
        ("streaming_diloco(6, fragments=2, delay=2, warmup=4)", [[5, 11, 17], [8, 14, 20]]),
        ("streaming_diloco(6, fragments=2, delay=5, warmup=4)", [[8, 14, 20], [5, 11, 17]]),
        ("streaming_diloco(7, fragments=3, delay=1, warmup=3)", [[4, 11, 18], [6, 13, 20], [9, 16]]),
    ],
)
def test_when_each_fragment_leaves(text: str, wanted: list[list[int]]) -> None:
    averaging = laconic.strategy(text).averaging
    assert averaging is not None
    agenda = Agenda(averaging)
    assert [[step for step in range(21) if fragment in agenda.departures(step)] for fragment in range(len(wanted))] == wanted
