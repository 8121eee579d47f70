"""The probe on live ranks."""

import torch

from laconic._torch.process_groups import default_group
from laconic.advisor.probe import Sample, fitted, samples
from laconic.comm.group import TorchGroup
from tests.live import ranks


def probed(rank: int) -> tuple[list[Sample], list[float]]:
    told: list[float] = []
    return samples(TorchGroup(default_group()), torch.device("cpu"), seconds=0.6, progress=told.append), told


def test_every_kind_is_timed_and_ranks_find_the_same() -> None:
    (first, told), (second, _) = ranks(2, probed)
    assert first == second, "the slowest rank's seconds, on all"
    assert {each.kind for each in first} == {"AllReduce", "AllGather", "AllToAll"}
    assert all(each.seconds > 0 and each.wire_bytes > 0 for each in first)
    assert told == sorted(told)
    assert told[-1] == 1.0
    speeds = fitted(first)
    small, large = (max(row.wire_bytes for row in first if row.kind == "AllReduce") * share for share in (0.5, 1.0))
    assert 0 < speeds["AllReduce"][2].seconds(small) < speeds["AllReduce"][2].seconds(large) < 10
