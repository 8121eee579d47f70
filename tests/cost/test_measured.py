"""What a probe's record says, its file, and the network that is made of it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cost.found_link import HEADERS, ONE_HOST, delay_of, link_of, most_on_a_node, slow_ranks
from laconic.cost.line_fit import line
from laconic.cost.link import Link
from laconic.cost.measured import VERSION, Fit, LeftOut, Probe, Sample, Worker, fitted, parse, read
from laconic.cost.network import Network

RATE = 100e6 / 8
SIZES = [1 << power for power in range(10, 21, 2)]


def sample(kind: str = "AllReduce", ranks: int = 4, size: int = 1 << 20, seconds: float = 0.1, in_flight: int = 1) -> Sample:
    return Sample(kind, ranks, in_flight, size, seconds, 0.9 * seconds, 1.2 * seconds, 10, 0.02)


def workers(*sends: float, nodes: list[int] | None = None, trip: float = 1e-4, spread: float = 0.02) -> list[Worker]:
    where = nodes or list(range(len(sends)))
    return [Worker(rank, "vm", where[rank], rate, rate, spread, trip) for rank, rate in enumerate(sends)]


def probe(**changes: Any) -> Probe:
    samples = [
        sample(kind, 4, size, alpha + size / RATE)
        for kind, alpha in (("AllReduce", 6e-3), ("AllGather", 3e-3), ("AllToAll", 1e-3))
        for size in SIZES
    ]
    made = Probe(
        world=4,
        per_node=1,
        device="cpu",
        backend="gloo",
        seconds=3.0,
        asked_seconds=4.0,
        wire_bytes=10_000_000,
        workers=workers(95e6, 95e6, 95e6, 95e6),
        samples=samples,
        left_out=[LeftOut("AllReduce", 4, 1, 1 << 26, "too long")],
        fits=fitted(samples),
        bits_per_second=100e6,
        delay_seconds=0.0,
        link_note="seen",
        slow=[],
        slow_down=0.1,
        slow_downs={"AllReduce": 0.1},
        versions={"laconic": "0"},
    )
    return dataclasses.replace(made, **changes)


@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-5), st.sampled_from([1, 2, 3, 4]), st.floats(1e-3, 1e3))
def test_a_line_is_found_though_a_size_in_the_middle_is_off(alpha: float, beta: float, off: int, by: float) -> None:
    points = [(float(size), (alpha + beta * size) * (by if place == off else 1.0)) for place, size in enumerate(SIZES)]
    found = line(points)
    for place, (size, seconds) in enumerate(points):
        assert place == off or found[0] + found[1] * size == pytest.approx(seconds, rel=1e-6)


def test_the_only_large_size_is_not_taken_for_an_outlier() -> None:
    alpha, beta = line([(512, 2e-4), (2048, 1.6e-4), (8192, 1.5e-4), (1 << 20, 0.09)])
    assert 1e-4 < alpha < 3e-4
    assert alpha + beta * (1 << 20) == pytest.approx(0.09, rel=0.01)


def test_times_that_fall_with_the_size_have_no_negative_part() -> None:
    for points in ([(1e3, 2.0), (1e6, 1.0)], [(1e3, 1e-6), (1e6, 1.0), (1e7, 100.0)]):
        assert min(line(points)) >= 0


def test_a_fit_has_the_ranges_of_the_quartiles_and_its_errors() -> None:
    rows = [sample(size=size, seconds=1e-3 + size / RATE) for size in SIZES]
    (fit,) = fitted([*rows, sample("AllGather")])
    assert (fit.kind, fit.ranks, fit.in_flight) == ("AllReduce", 4, 1), "one size alone is no line"
    assert fit.alpha_seconds == pytest.approx(1e-3)
    assert fit.seconds_per_byte == pytest.approx(1 / RATE)
    assert list(fit.alpha_range) == pytest.approx([0.9e-3, 1.2e-3])
    assert list(fit.per_byte_range) == pytest.approx([0.9 / RATE, 1.2 / RATE])
    assert fit.error == pytest.approx(0, abs=1e-9)
    rows[2] = dataclasses.replace(rows[2], seconds=2 * rows[2].seconds)
    (fit,) = fitted(rows)
    assert fit.seconds_per_byte == pytest.approx(1 / RATE)
    assert fit.worst_error == pytest.approx(1.0), "twice as long as the line says"
    rows[2] = dataclasses.replace(rows[2], seconds=rows[2].seconds / 4)
    assert fitted(rows)[0].worst_error == pytest.approx(1.0), "half as long"


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    for made in (probe(), probe(bits_per_second=None, workers=[Worker(rank, "a", 0) for rank in range(4)], per_node=4)):
        path.write_text(made.text())
        assert read(path) == made
    assert json.loads(probe().text())["version"] == VERSION


def damaged(**changes: Any) -> str:
    return json.dumps({**probe().as_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no probe, or a damaged one"),
        (probe().text()[:500], "is no probe, or a damaged one"),
        ("[]", "it has no version"),
        ('{"steps": 3}', "it has no version"),
        (damaged(version=2), "a probe of version 2, and this laconic reads version 1"),
        (damaged(version=None), "a probe of version None"),
        (json.dumps({"version": 1}), "damaged probe: the file lacks 'world'"),
        (damaged(colour="red"), "the file has a field 'colour' that nobody knows"),
        (damaged(world="4"), "world must be a whole number, got '4'"),
        (damaged(world=True), "world must be a whole number, got True"),
        (damaged(world=5), "its 4 workers are not the ranks 0 to 4"),
        (damaged(world=1), "it has 1 workers"),
        (damaged(per_node=0), "0 on a node"),
        (damaged(slow_down=-0.5), "slow_down must not be negative, got -0.5"),
        (damaged(slow_down=math.nan), "slow_down must be a number, got nan"),
        (damaged(seconds=math.inf), "seconds must be a number, got inf"),
        (damaged(bits_per_second=0), "bits_per_second is 0"),
        (damaged(samples={}), "samples must be a list"),
        (damaged(samples=[3]), r"samples\[0\] must be an object, got 3"),
        (damaged(fits=[]), "no collective of all workers was measured"),
        (damaged(fits=[{**probe().as_dict()["fits"][0], "alpha_range": [1.0]}]), r"fits\[0\].alpha_range must be a list of 2"),
        (damaged(slow_downs=[]), "slow_downs must be an object"),
        (damaged(link_note=3), "link_note must be a text, got 3"),
    ],
)
def test_a_file_that_is_none_is_refused_with_what_to_do(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"some\.json .*{said}.*laconic probe"):
        read(path)
    with pytest.raises(ValueError, match=said):
        parse(text, "it")


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json can't be read: .*laconic probe --out"):
        read(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="can't be read"):
        read(tmp_path / "binary")


def test_a_probe_of_another_number_of_workers_is_refused() -> None:
    probe().check_world(4)
    with pytest.raises(
        ValueError, match=r"measured 4 workers, and 16 are asked for; measure again .* on 16 workers, or .* --link"
    ):
        probe().network(world=16)


def test_the_network_takes_as_long_as_what_was_measured() -> None:
    found = probe().network(world=4)
    assert found.link == Link(100_000_000)
    assert (found.slow_down, found.per_node) == (0.1, 1)
    assert found.host_seconds("AllReduce", 1 << 20, 4) == pytest.approx(6e-3 + (1 << 20) / RATE)
    assert found.framing["AllReduce"] == pytest.approx(1.0)
    slower = [dataclasses.replace(fit, seconds_per_byte=1.3 * fit.seconds_per_byte) for fit in probe().fits]
    assert probe(fits=slower).network().framing["AllToAll"] == pytest.approx(1.3)
    free = probe(bits_per_second=None).network()
    assert free.link == Link()
    assert free.framing == Network().framing


def test_several_at_once_are_no_speed_of_the_hosts() -> None:
    other = Fit("AllReduce", 4, 4, 1.0, 1.0, (1.0, 1.0), (1.0, 1.0), 0.0, 0.0)
    assert probe(fits=[*probe().fits, other]).network() == probe().network()


def test_a_delay_is_the_link_s_and_not_the_hosts_too() -> None:
    found = probe(delay_seconds=1e-3).network()
    assert found.link.delay_seconds == 1e-3
    for kind, alpha in (("AllReduce", 6e-3), ("AllGather", 3e-3), ("AllToAll", 1e-3)):
        total = found.host_speed(kind, 4).alpha_seconds + found.delay_seconds(kind, 4)
        assert total == pytest.approx(alpha, abs=1e-9), "once, and not twice"


def test_another_link_may_be_slower_than_the_one_that_was_found_and_no_faster() -> None:
    assert probe().network(Link(10_000_000)).link == Link(10_000_000)
    for faster in (Link(1_000_000_000), Link()):
        with pytest.raises(ValueError, match=f"found a link of 100mbit, .*; {faster} is faster, .* measure again"):
            probe().network(faster)
    assert probe(bits_per_second=None).network(Link(10**10, 0.01)).link == Link(10**10, 0.01)


def test_ranks_on_one_host_have_no_link() -> None:
    assert link_of([], workers(95e6, 95e6, nodes=[0, 0]), 0.0) == (None, ONE_HOST)
    assert slow_ranks(workers(95e6, 5e6, nodes=[0, 0])) == []
    assert delay_of(workers(95e6, 95e6, nodes=[0, 0], trip=0.1)) == 0.0


def test_transfers_that_there_was_no_time_for_are_no_link() -> None:
    rate, note = link_of([], [Worker(0, "a", 0), Worker(1, "b", 1)], 0.0)
    assert rate is None
    assert "no time for transfers between hosts; give more --seconds" in note


def test_steady_transfers_between_idle_hosts_are_a_link() -> None:
    rate, note = link_of([sample(seconds=(1 << 20) / RATE)], workers(95e6, 96e6, 94e6, 95e6), 0.05)
    assert rate == pytest.approx(HEADERS * 95e6)
    assert "99.3 Mbit/s" in note


@pytest.mark.parametrize(
    ("busy", "spread", "seconds", "said"),
    [
        (0.5, 0.02, 0.1, "processors are busy for 50%"),
        (0.05, 0.6, 0.1, "they differ by 60%"),
        (0.05, 0.02, 0.01, "an AllReduce reached 731 Mbit/s"),
    ],
)
def test_what_is_no_evidence_is_no_link(busy: float, spread: float, seconds: float, said: str) -> None:
    rate, note = link_of([sample(seconds=seconds)], workers(95e6, 95e6, 95e6, 95e6, spread=spread), busy)
    assert rate is None
    assert said in note


def test_ranks_of_a_node_share_its_cable() -> None:
    shared = workers(48e6, 50e6, 49e6, 48e6, nodes=[0, 0, 1, 1], spread=1.5)
    assert most_on_a_node(shared) == 2
    rate, _ = link_of([], shared, 0.05)
    assert rate == pytest.approx(HEADERS * 96e6), "as long as the slower of the two takes"


def test_who_is_slow_is_named_and_the_link_is_as_slow() -> None:
    found = workers(95e6, 95e6, 95e6, 12e6)
    (said, again) = slow_ranks(found)
    assert said == "rank 3 (vm) sends at 12 Mbit/s, the others at 95 Mbit/s"
    assert again == "rank 3 (vm) receives at 12 Mbit/s, the others at 95 Mbit/s"
    assert link_of([], found, 0.05)[0] == pytest.approx(HEADERS * 12e6)
    two = [Worker(0, "a", 0, 95e6, 12e6, 0.0, 1e-4), Worker(1, "b", 1, 12e6, 95e6, 0.0, 1e-4)]
    assert slow_ranks(two) == ["rank 1 (b) sends at 12 Mbit/s, the others at 95 Mbit/s"], "or 0 receives: once is enough"
    assert slow_ranks(workers(95e6, 90e6, 99e6, 60e6)) == []
    far = [*workers(95e6, 95e6, 95e6), Worker(3, "far", 3, 95e6, 95e6, 0.0, 0.04)]
    assert slow_ranks(far) == ["rank 3 (far) has a round trip of 40 ms, the others of 0.1 ms"]


def test_a_round_trip_is_a_delay_where_it_is_more_than_hosts_need() -> None:
    assert delay_of(workers(95e6, 95e6, trip=0.04)) == pytest.approx(0.02)
    assert delay_of(workers(95e6, 95e6, trip=1e-4)) == 0.0
