"""What `auto()` chooses by, with made-up numbers."""

from dataclasses import replace

import pytest

from laconic.advisor import auto
from laconic.advisor.advice import Candidate
from laconic.advisor.risk import Risk
from laconic.cost.around import Flow
from laconic.cost.link import Link
from laconic.cost.measured import Fit, Probe, Worker
from laconic.cost.network import Network, Speed
from laconic.cost.step_time import Compute, Exchange, Step
from laconic.strategies.strategy import Advised


def exchange(seconds: float, kind: str = "AllReduce") -> Exchange:
    return Exchange([Flow(kind, seconds * 1e6, 4)], [0.0, 0.0], 100)


def test_the_choice_rests_on_what_was_timed_and_probed() -> None:
    network = Network(Link(8_000_000), {"AllReduce": {4: Speed(0.0, 0.0)}}, framing={"AllReduce": 1.0})
    ddp = Candidate("ddp()", Risk.SAME, [Step([exchange(0.5)])])
    half = Candidate("bf16()", Risk.ROUNDING, [Step([exchange(0.25)])])
    few = Candidate("int8()", Risk.ROUNDING, [Step([exchange(0.02)])])
    families, timed = [[ddp], [half], [few]], Compute(0.3, 0.6, 0.1)
    found = auto.choose(timed, 0.5, families, network, Advised("rounding", 0.9, None, 5, 1.0))
    assert found.choice.strategy == "int8()"
    assert [round(row.share, 2) for row in found.rows] == [0.67, 0.8, 0.98], "the wait is none of the compute"
    assert auto.choose(timed, 0.5, families, network, Advised("rounding", 0.6, None, 5, 1.0)).choice.strategy == "ddp()"
    assert auto.choose(timed, 0.5, families, network, Advised("same", 0.9, None, 5, 1.0)).choice.strategy == "ddp()"
    short, slow = Compute(0.03, 0.06, 0.01), replace(network, link=Link(800_000))
    with pytest.raises(ValueError, match=r"by the probe, a step of ddp\(\) takes 5.1 s, and it took 0.1 s.*auto\(seconds=2\)"):
        auto.choose(short, 0.0, families, slow, Advised("same", 0.9, None, 5, 1.0))
    auto.choose(short, 0.0, families, slow, Advised("same", 0.9, "800kbit", 5, 1.0))  # a link that nobody has probed


def test_a_link_between_the_ranks_of_one_host_is_as_if_each_had_its_own() -> None:
    fits = [Fit("AllReduce", 2, 1, 1e-3, 1e-9, (1e-3, 1e-3), (1e-9, 1e-9), 0.0, 0.0)]
    workers = [Worker(rank, "here", 0) for rank in range(2)]
    probe = Probe(2, 2, "cpu", "gloo", 1.0, 1.0, 0, workers, [], [], fits, None, 0.0, "", [], 0.5, {})
    assert auto._network(probe, Advised("same", 0.9, None, 5, 1.0)).per_node == 1
    own = auto._network(probe, Advised("same", 0.9, "1gbit", 5, 1.0))
    assert (own.per_node, own.link, own.slow_down) == (1, Link(10**9), 0.5)
