"""What a limited link makes of collectives and of a step: timings, so in the soak."""

import io

import pytest
from rich.console import Console

from benchmarks.link import FRAMING, bounds, measure
from laconic.cost.link import Link
from laconic.lab.compare import Comparison, begin, train
from laconic.report.live_comparison import Board
from tests.lab.test_link import needs_link


@needs_link
@pytest.mark.soak
@pytest.mark.alone
def test_a_step_of_ddp_lies_between_its_bounds_and_the_kernel_agrees() -> None:
    found = measure()
    least, most, measured = bounds(found)
    assert 0.85 * least <= measured <= 1.15 * most, (least, measured, most)
    for row in found["collectives"]:
        if row["wire"] >= 128_000:
            assert row["kernel"] == pytest.approx(1, rel=0.05), row
        else:
            assert row["kernel"] * row["wire"] == pytest.approx(row["wire"] + FRAMING[row["kind"]], rel=0.05), row


@needs_link
@pytest.mark.soak
def test_what_is_in_the_air_during_a_look_is_on_the_cable_too() -> None:
    chosen = "streaming_diloco(5, fragments=1, delay=3, blend=0.0, warmup=2)"  # of 8 looks in 24 steps, some meet an exchange
    comparison = Comparison("bytes-gpt:500k", [chosen], 2, Link(50_000_000), 24)
    with Board(Console(file=io.StringIO()), [chosen], "24 steps", 1) as board:
        (streaming,) = train(list(comparison.jobs()), comparison, begin(comparison), board)
    sent = streaming.wire_bytes_per_step
    assert sent["kernel"] is not None
    assert sent["counted"] is not None
    assert 1 < sent["kernel"] / sent["counted"] < 1.05, "0.967 without waiting for what is outstanding"
