"""The lab's cost model against a real link: a timing, so in the soak."""

import pytest

from benchmarks.link import FRAMING, bounds, measure
from tests.lab.test_link import needs_link


@needs_link
@pytest.mark.soak
def test_a_step_of_ddp_lies_between_its_bounds_and_the_kernel_agrees() -> None:
    found = measure()
    least, most, measured = bounds(found)
    assert 0.85 * least <= measured <= 1.15 * most, (least, measured, most)
    for row in found["collectives"]:
        if row["wire"] >= 128_000:
            assert row["kernel"] == pytest.approx(1, rel=0.05), row
        else:
            assert row["kernel"] * row["wire"] == pytest.approx(row["wire"] + FRAMING[row["kind"]], rel=0.05), row
