"""At which steps a schedule is due, told the last time and the learning rate of then."""

import pytest

import laconic
from laconic.strategies.schedules import QSR, Schedule


def syncs(schedule: Schedule, steps: int, rate: float) -> list[int]:
    """How many steps were completed at each sync, at this learning rate."""
    found: list[int] = []
    for step in range(steps):
        if schedule.due(step, found[-1] if found else 0, rate if found else None):
            found.append(step + 1)
    return found


def test_a_period_that_follows_the_learning_rate_begins_at_its_start() -> None:
    assert syncs(QSR(base=2, alpha=0.02), 12, rate=0.01) == [2, 6, 10]
    assert syncs(QSR(base=2, alpha=0.02, start=7), 20, rate=0.01) == [9, 13, 17], "first base steps after it"
    assert syncs(QSR(base=1, alpha=0.02, start=3), 13, rate=0.01) == [4, 8, 12]


def test_a_warm_up_is_the_start_of_such_a_period() -> None:
    for text in ("local_sgd(QSR(2, 0.02), warmup=7)", "post_local_sgd(7, QSR(2, 0.02))", "diloco(QSR(2, 0.02), warmup=7)"):
        averaging = laconic.strategy(text).averaging
        assert averaging is not None
        assert syncs(averaging.route.legs[0][0], 20, rate=0.01) == [9, 13, 17], text


def test_a_period_that_follows_the_learning_rate_is_a_whole_number_and_base_at_least() -> None:
    rule = QSR(base=4, alpha=0.02)
    assert [rule.period(rate) for rate in (None, 0.0, -1.0, 0.02, 0.01, 0.0085, 0.006)] == [4, 4, 4, 4, 4, 5, 11]
    assert not rule.due(2)
    assert rule.due(3)
    assert not rule.due(13, last=4, rate=0.006)
    assert rule.due(14, last=4, rate=0.006)


def test_a_phase_may_be_the_whole_period_and_no_longer() -> None:
    assert [step for step in range(7) if laconic.Every(3, phase=3).due(step)] == [2, 5]
    with pytest.raises(ValueError, match="phase must be within the period of 3 steps, got 4"):
        laconic.Every(3, phase=4)
    with pytest.raises(ValueError, match="phase must be within the period of 3 steps, got -1"):
        laconic.Every(3, phase=-1)


def test_the_first_leg_that_is_due_wins_by_the_last_sync_and_the_rate_of_then() -> None:
    route = laconic.Route(((QSR(2, 0.02), "world"), (laconic.Every(1), "node")))
    assert [route.at(step, 4, 0.01) for step in range(4, 9)] == ["node", "node", "node", "world", "world"]
    assert route.scopes == {"world", "node"}
    assert route.communicates
    quiet = laconic.Route(((laconic.Never(), "world"), (laconic.Every(2), 3)))
    assert quiet.scopes == {3}
    assert not laconic.silent().route.communicates
