"""The cost model where its answer is known in closed form."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from laconic.comm import collectives
from laconic.cost.link import Link
from laconic.cost.network import BOTH_WAYS, CROSSING_BYTES, HALF_BYTES, HEADERS, Cable, Network, Speed, framing
from laconic.cost.step_time import Compute, Event, Exchange, Step, slowest_of, step_time

RATE = 1_000_000  # bytes a second
KINDS = ("AllReduce", "AllGather", "AllToAll")
NO_FRAMING = dict.fromkeys(KINDS, 1.0)
COMPUTE = Compute(0.1, 0.2, 0.1)


@dataclass(frozen=True)
class Round:
    wire_bytes: float
    kind: str = "AllReduce"
    world: int = 4


def network(delay: float = 0.0, burst: float = 0.0, slow_down: float = 0.0, host: float = 0.0) -> Network:
    hosts = {kind: {4: Speed(0.0, host)} for kind in KINDS}
    return Network(Link(8 * RATE, delay), hosts, burst, slow_down, NO_FRAMING)


def exchange(*sizes: float, work: float = 0.0, kind: str = "AllReduce", numbers: int = 1) -> Exchange:
    return Exchange([Round(size, kind) for size in sizes], [work] * (len(sizes) + 1), numbers)


def test_what_is_waited_for_takes_its_bytes_at_the_rate() -> None:
    found = step_time([Step(after=[exchange(50_000)])], COMPUTE, network())
    assert found.waiting == pytest.approx(0.05)
    assert found.seconds == pytest.approx(0.45)
    assert found.share == pytest.approx(0.4 / 0.45)


def test_a_sync_in_one_step_of_four_is_a_quarter_of_it() -> None:
    steps = [Step(), Step(), Step(), Step(after=[exchange(50_000)])]
    assert step_time(steps, COMPUTE, network()).waiting == pytest.approx(0.0125)


def test_one_bucket_is_ready_when_backward_is_over() -> None:
    assert step_time([Step([exchange(50_000)])], COMPUTE, network()).waiting == pytest.approx(0.05)


def test_of_two_buckets_the_first_travels_while_the_second_is_computed() -> None:
    steps = [Step([exchange(50_000), exchange(50_000)])]
    assert step_time(steps, COMPUTE, network()).waiting == pytest.approx(0.05)
    slow = step_time([Step([exchange(150_000), exchange(50_000)])], COMPUTE, network())
    assert slow.waiting == pytest.approx(0.05 + 0.05), "half of backward hides 100 of 150 ms, and the second goes behind it"


def test_the_first_bucket_s_second_round_leaves_when_the_second_bucket_is_ready() -> None:
    twice = step_time([Step([exchange(50_000, 50_000), exchange(50_000, 50_000)])], COMPUTE, network())
    # 50 hidden; at the end of backward there are three left: the last bucket's first, then both second rounds.
    assert twice.waiting == pytest.approx(0.15)


def test_work_is_counted_before_each_round_and_after_the_last() -> None:
    found = step_time([Step(after=[exchange(50_000, 50_000, work=0.01)])], COMPUTE, network())
    assert found.work == pytest.approx(0.03)
    assert found.waiting == pytest.approx(0.1)


def test_outstanding_exchanges_cost_nothing_while_they_fit_into_their_delay() -> None:
    steps = [*[Step()] * 7, Step(outstanding=[exchange(700_000)], delay=2)]
    assert step_time(steps, COMPUTE, network()).waiting == pytest.approx(0.0, abs=1e-9)
    late = [*[Step()] * 7, Step(outstanding=[exchange(1_000_000)], delay=2)]
    assert step_time(late, COMPUTE, network()).waiting == pytest.approx(0.2 / 8), "1 s, of which two steps hide 0.8"


def test_the_hosts_work_on_what_is_outstanding_slows_training_down() -> None:
    steps = [*[Step()] * 7, Step(outstanding=[exchange(700_000)], delay=2)]
    found = step_time(steps, COMPUTE, network(slow_down=0.5, host=1e-7))
    assert found.work == pytest.approx(0.5 * 700_000 * 1e-7 / 8)


def test_hosts_that_are_slower_than_the_link_are_what_counts() -> None:
    found = step_time([Step(after=[exchange(50_000)])], COMPUTE, network(host=2 / RATE))
    assert found.waiting == pytest.approx(0.1)


@pytest.mark.parametrize(("kind", "messages"), [("AllReduce", 6), ("AllGather", 3), ("AllToAll", 1)])
def test_a_delay_counts_for_each_message_that_waits_for_another(kind: str, messages: int) -> None:
    found = step_time([Step(after=[exchange(50_000, kind=kind)])], COMPUTE, network(delay=0.01))
    assert found.waiting == pytest.approx(0.05 + 0.01 * messages)


def test_an_emulated_link_lets_pass_at_once_what_became_free_while_it_was_idle() -> None:
    cable = Cable(network(burst=30_000))
    assert cable.launch(0.0, "AllReduce", 50_000, 4) == pytest.approx(0.02)
    assert cable.launch(0.02, "AllReduce", 50_000, 4) == pytest.approx(0.07), "nothing has become free"
    assert cable.launch(0.08, "AllReduce", 50_000, 4) == pytest.approx(0.12), "10 ms have freed 10,000 bytes"
    assert cable.launch(9.0, "AllReduce", 50_000, 4) == pytest.approx(9.02), "no more than the bucket holds"


def test_without_a_limit_the_hosts_alone_count() -> None:
    free = Network(Link(), {"AllReduce": {2: Speed(0.001, 1e-9), 8: Speed(0.005, 2e-9)}})
    assert free.host_seconds("AllReduce", 1_000_000, 2) == pytest.approx(0.002)
    assert free.host_seconds("AllReduce", 1_000_000, 7) == pytest.approx(0.007), "the nearest number of ranks"
    assert step_time([Step(after=[Exchange([Round(1e6, world=2)], [0, 0])])], COMPUTE, free).waiting == pytest.approx(0.002)


def test_what_becomes_free_while_hosts_are_slower_than_the_link_is_there_for_the_next() -> None:
    hosts = {"AllReduce": {4: Speed(0.0, 2 / RATE)}, "AllGather": {4: Speed(0.0, 0.0)}}
    cable = Cable(Network(Link(8 * RATE), hosts, 30_000, framing=NO_FRAMING))
    assert cable.launch(0.0, "AllReduce", 10_000, 4) == pytest.approx(0.02)
    assert cable.launch(0.02, "AllGather", 50_000, 4) == pytest.approx(0.04), "the bucket is full again"


def test_a_round_begins_when_the_slowest_worker_launches_it() -> None:
    uneven = Compute(0.1, 0.2, 0.1, jitter=0.03)
    lag = 0.03 * slowest_of(4)
    found = step_time([Step(after=[exchange(50_000)])], uneven, network())
    assert found.waiting == pytest.approx(0.05 + lag)
    rare = step_time([*[Step()] * 15, Step(after=[exchange(50_000)])], uneven, network())
    assert rare.waiting == pytest.approx((0.05 + 4 * lag) / 16), "after 16 steps they are four times as far apart"


def test_two_rounds_wait_for_the_slowest_once() -> None:
    found = step_time([Step(after=[exchange(50_000, 50_000)])], Compute(0.1, 0.2, 0.1, 0.03), network())
    assert found.waiting == pytest.approx(0.1 + 0.03 * slowest_of(4))


def test_what_is_outstanding_gives_the_slowest_worker_time() -> None:
    steps = [*[Step()] * 7, Step(outstanding=[exchange(50_000)], delay=2)]
    assert step_time(steps, Compute(0.1, 0.2, 0.1, 0.03), network()).waiting == pytest.approx(0.0, abs=1e-9)


def test_workers_of_a_node_share_its_cable() -> None:
    shared = replace(network(), per_node=2)
    assert Cable(shared).launch(0.0, "AllReduce", 50_000, 4) == pytest.approx(0.05), "a ring leaves a node once"
    assert Cable(shared).launch(0.0, "AllToAll", 60_000, 4) == pytest.approx(0.08), "2 send to 2 others each, of 3 peers"
    assert Cable(shared).launch(0.0, "AllReduce", 50_000, 2) == pytest.approx(0.0), "what stays on a node"


def test_groups_side_by_side_share_a_cable() -> None:
    assert Cable(replace(network(), groups=3)).launch(0.0, "AllReduce", 50_000, 4) == pytest.approx(0.15)


def test_a_delay_is_not_met_within_a_node() -> None:
    slow = replace(network(delay=0.01), per_node=2)
    assert [slow.delay_seconds("AllReduce", world) for world in (2, 4)] == [0.0, pytest.approx(0.02)], "2 nodes: 2 messages"


def test_alpha_comes_on_top_of_the_cable_s_time() -> None:
    hosts = {"AllReduce": {4: Speed(0.004, 0.0)}}
    limited = Network(Link(8 * RATE), hosts, framing=NO_FRAMING)
    assert Cable(limited).launch(0.0, "AllReduce", 50_000, 4) == pytest.approx(0.054)


def test_long_messages_both_ways_take_longer_than_their_bytes() -> None:
    rate = 100e6
    for kind in KINDS:
        small, large = (framing(kind, size, 4, rate) for size in (1e3, 1e9))
        most = 0.0 if kind == "AllGather" else BOTH_WAYS["AllReduce"]
        assert [small, large] == pytest.approx([HEADERS, HEADERS + most], abs=1e-3)
    assert framing("AllToAll", 3 * HALF_BYTES, 4, rate) == pytest.approx(HEADERS + BOTH_WAYS["AllToAll"] / 2)
    assert framing("AllGather", HALF_BYTES, 2, rate) == pytest.approx(HEADERS + BOTH_WAYS["AllGather"] / 2)
    lab = Network(Link(int(rate)), both_ways=True)
    assert lab.cable_bytes("AllToAll", 3 * HALF_BYTES, 4) == pytest.approx(3 * HALF_BYTES * (HEADERS + 0.45))


def test_messages_that_are_received_first_lose_as_little_as_an_all_reduce() -> None:
    assert CROSSING_BYTES == collectives.CROSSING_BYTES
    for kind, world in (("AllToAll", 2), ("AllToAll", 4), ("AllGather", 2)):
        below, above = (framing(kind, (world - 1) * size, world, 100e6) for size in (CROSSING_BYTES - 1, CROSSING_BYTES))
        assert below > HEADERS + BOTH_WAYS["AllReduce"] > above


def test_a_link_s_headers_or_what_a_probe_has_measured() -> None:
    assert Network(Link(8 * RATE)).cable_bytes("AllToAll", 1e6, 4) == HEADERS * 1e6
    assert Network(Link(8 * RATE), framing={"AllToAll": 1.5}).cable_bytes("AllToAll", 1e6, 4) == 1.5e6
    assert Network().cable_bytes("AllToAll", 1e6, 4) == 1e6, "no link, no headers that matter"


def test_between_steps_four_exchanges_are_outstanding_at_a_time() -> None:
    many = [exchange(10_000, work=0.004) for _ in range(6)]
    found = step_time([Step(after=many)], COMPUTE, network())
    # Encoding of the first four, 16 ms, hides 12 of the first one's 10 ms; each later one is encoded while others travel.
    alone = step_time([Step(after=[exchange(10_000, work=0.004)])], COMPUTE, network())
    assert found.waiting < 6 * alone.waiting - 0.01, "one after the other would wait for each"
    assert found.work == pytest.approx(6 * 0.008)


def test_what_hosts_do_for_a_hidden_bucket_is_taken_from_backward() -> None:
    buckets = [exchange(50_000), exchange(50_000)]
    found = step_time([Step(buckets)], COMPUTE, network(slow_down=0.5, host=4e-7))
    assert found.work == pytest.approx(0.5 * 50_000 * 4e-7), "of the first; the last one is waited for"


def test_rounds_of_what_is_outstanding_leave_at_their_steps() -> None:
    """Of two rounds and a delay of 4, the second leaves after 2 steps: what it takes beyond two more steps is waited for."""
    steps = [*[Step()] * 15, Step(outstanding=[exchange(100_000, 900_000)], delay=4)]
    found = step_time(steps, COMPUTE, network())
    assert found.waiting == pytest.approx((0.9 - 2 * 0.4) / 16)


def test_compute_is_what_was_given_however_small() -> None:
    tiny = Compute(1e-300, 1e-300)
    assert step_time([Step(after=[exchange(50_000)])], tiny, network()).compute == tiny.seconds


def test_a_trace_has_all_that_happens_and_changes_nothing() -> None:
    steps = [
        Step([exchange(50_000, 20_000, work=0.01), exchange(90_000, work=0.01)], work=0.002),
        Step(after=[exchange(30_000)], outstanding=[exchange(200_000, 100_000, work=0.003)], delay=2),
        Step(),
    ]
    over = network(slow_down=0.5, host=1e-7)
    trace: list[Event] = []
    found = step_time(steps, COMPUTE, over, cycles=2, trace=trace)
    assert found == step_time(steps, COMPUTE, over, cycles=2)
    thread = [event for event in trace if event.what != "wire"]
    assert thread[0].begin == 0
    assert [event.begin for event in thread[1:]] == [event.end for event in thread[:-1]], "one after the other, without a gap"
    second = [event for event in thread if event.begin >= thread[-1].end - 3 * found.seconds - 1e-9]
    for what, seconds in (
        ("work", found.work),
        ("waiting", found.waiting),
        ("forward", 0.1),
        ("backward", 0.2),
        ("optimizer", 0.1),
    ):
        spent = sum(event.end - event.begin for event in second if event.what == what)
        assert spent == pytest.approx(3 * seconds), what
    wire = [event for event in trace if event.what == "wire"]
    assert [event.wire_bytes for event in wire[:3]] == [50_000, 90_000, 20_000], "the first bucket's second round goes last"
    assert all(event.begin >= before.end for before, event in pairwise(wire)), "one round at a time"
    assert sum(event.wire_bytes for event in wire) == 2 * 490_000
