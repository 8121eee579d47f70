"""Which syncs are out of line."""

import math

import pytest

from laconic.local.outliers import ENOUGH, MEMORY, Norms


def fed(limit: float | None, norms: list[float]) -> list[str | None]:
    history = Norms(limit)
    return [history.problem([norm**2, norm**2]) for norm in norms]


def test_nothing_is_out_of_line_before_there_are_enough() -> None:
    assert fed(3, [1.0] * (ENOUGH - 1) + [100.0]) == [None] * ENOUGH


def test_a_large_round_is_and_the_next_good_one_is_not() -> None:
    steady = [1 + 0.1 * (place % 3) for place in range(ENOUGH)]
    *good, bad, after = fed(3, [*steady, 5.0, 1.1])
    assert good == [None] * ENOUGH
    assert bad is not None
    assert "5 from the anchor" in bad
    assert after is None


def test_small_rounds_are_in_line() -> None:
    assert fed(3, [1.0] * ENOUGH + [1e-6]) == [None] * (ENOUGH + 1)


def test_without_a_limit_only_what_is_not_finite_is() -> None:
    assert fed(None, [1.0] * ENOUGH + [1e9]) == [None] * (ENOUGH + 1)
    history = Norms(None)
    assert history.problem([1.0, math.inf]) == "the parameters of a replica are not finite"
    assert history.problem([math.nan, 1.0]) is not None
    assert history.norms == []


def test_a_norm_is_the_root_mean_square_over_ranks_and_few_are_kept() -> None:
    history = Norms(3)
    history.problem([9.0, 1.0])
    assert history.norms == [pytest.approx(math.sqrt(5))]
    for _ in range(2 * MEMORY):
        history.problem([1.0, 1.0])
    assert len(history.norms) == MEMORY


def test_a_spread_of_nothing_is_a_thousandth_of_the_mean() -> None:
    assert fed(3, [2.0] * ENOUGH + [2.005]) == [None] * (ENOUGH + 1)
    assert fed(3, [2.0] * ENOUGH + [2.007])[-1] is not None


def test_a_limit_is_in_standard_deviations_of_what_was_accepted() -> None:
    steady = [1.0, 3.0] * (ENOUGH // 2)  # 2 ± 1
    assert fed(3, [*steady, 4.99])[-1] is None
    assert fed(3, [*steady, 5.01])[-1] is not None
    assert all(fed(3, [*steady, *[5.01] * 20])[ENOUGH:]), "what was refused changes nothing for those after it"


def test_the_newest_rounds_are_kept() -> None:
    history = Norms(None)
    for place in range(MEMORY + 5):
        history.problem([float(place**2)])
    assert history.norms == list(range(5, MEMORY + 5))
