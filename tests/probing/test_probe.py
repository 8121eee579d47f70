"""The probe on live ranks of one host, and its parts that need no ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.comm.group import CommunicationError
from laconic.cost.found_link import ONE_HOST
from laconic.cost.measured import Probe, parse
from laconic.probing.collectives import FEWEST, MOST_BYTES, PRIMING_BYTES, SIZES, fits, most_priming, most_repeats
from laconic.probing.paths import rounds_of
from laconic.probing.probe import check, promise
from tests.live import last_ranks, ranks


def probed(rank: int) -> tuple[Probe, list[float], bool]:
    told: list[float] = []
    torch.manual_seed(3)
    before = (torch.get_rng_state(), torch.get_num_threads())
    found = laconic.probe(seconds=2.0, progress=told.append)
    return found, told, bool(torch.equal(before[0], torch.get_rng_state())) and before[1] == torch.get_num_threads()


def test_ranks_find_the_same_and_no_link_between_ranks_of_one_host() -> None:
    (first, told, untouched), (second, _, also) = ranks(2, probed)
    assert first == second
    assert untouched
    assert also
    assert parse(first.text(), "the file") == first
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert (first.world, first.per_node, first.backend, first.device) == (2, 2, "gloo", "cpu")
    assert (first.bits_per_second, first.link_note, first.slow, first.delay_seconds) == (None, ONE_HOST, [], 0.0)
    assert {fit.kind for fit in first.fits} == {"AllReduce", "AllGather", "AllToAll"}
    assert all(0 < each.low_seconds <= each.seconds <= each.high_seconds for each in first.samples)
    assert all(each.repeats >= FEWEST for each in first.samples)
    assert 0 < first.wire_bytes <= promise(2, 1, 2.0).wire_bytes
    network = first.network(world=2)
    assert network.link.bits_per_second is None
    assert 0 < network.host_seconds("AllReduce", 1024, 2) < 10


def in_a_part(rank: int) -> int | str:
    pair = dist.new_group([0, 2])
    assert pair is not None
    try:
        return laconic.probe(pair, seconds=0.5).world
    except ValueError as error:
        return str(error)


def test_a_part_of_the_ranks_can_be_probed() -> None:
    first, outside, last = ranks(3, in_a_part)
    assert (first, last) == (2, 2)
    assert "this rank is not in the group" in str(outside)


def refused(rank: int, seconds: float) -> str:
    with pytest.raises(ValueError, match=r"prob|differ") as error:
        laconic.probe(seconds=seconds + rank)
    return str(error.value)


def test_what_can_not_be_probed_is_refused_by_all_ranks() -> None:
    assert "two ranks at least, got one" in ranks(1, refused, 1.0)[0]
    assert (
        ranks(2, refused, 1.0) == ["the ranks were given different things:\n  rank 1 has seconds 2, rank 0 has seconds 1"] * 2
    )
    for seconds in (0.0, -1.0, 61.0, float("nan")):
        with pytest.raises(ValueError, match=r"from 0\.1 to 60 seconds, got"):
            check(2, seconds)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        laconic.probe()


def dies(rank: int) -> None:
    def leave(share: float) -> None:
        if rank == 1 and share > 0.2:
            os._exit(9)

    try:
        laconic.probe(seconds=5.0, progress=leave)
    except CommunicationError as error:
        raise AssertionError(f"rank {rank} heard: {error}") from error


def test_a_rank_that_dies_ends_the_probe_of_the_others() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 heard: \w+ of \d+ bytes among 2 ranks failed") as error:
        last_ranks(2, dies)
    assert "the process died" in str(error.value)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_partners_are_each_other_s_and_on_other_nodes(places: list[int]) -> None:
    known = sorted(set(places))
    nodes = [known.index(place) for place in places]
    rounds = rounds_of(nodes)
    for pairs in rounds:
        assert all(pairs[other] == rank != other for rank, other in pairs.items())
        assert len(known) == 1 or all(nodes[rank] != nodes[other] for rank, other in pairs.items())


@pytest.mark.parametrize("number", range(2, 12))
def test_every_rank_has_two_partners_where_there_are_two(number: int) -> None:
    rounds = rounds_of(range(number))
    for rank in range(number):
        assert len({pairs[rank] for pairs in rounds if rank in pairs}) >= min(2, number - 1)


@given(st.sampled_from(SIZES))
def test_repeats_have_a_limit_of_their_bytes(size: int) -> None:
    assert FEWEST * size <= most_repeats(size) * size <= max(MOST_BYTES, FEWEST * size)
    assert (most_priming(size) - 1) * size < PRIMING_BYTES


def test_a_size_is_begun_only_where_the_fewest_repeats_fit() -> None:
    assert fits(0.1, 0.4)
    assert not fits(0.1, 0.39)


def test_more_ranks_and_nodes_are_promised_more_bytes() -> None:
    few, many, nodes = promise(2, 1, 30.0), promise(64, 64, 30.0), promise(64, 8, 30.0)
    assert few.seconds == many.seconds == 30.0
    assert few.wire_bytes < many.wire_bytes < nodes.wire_bytes < 20e9
