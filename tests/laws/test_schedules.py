"""At which steps a schedule is due, told the last time and the learning rate of then."""

import laconic
from laconic.schedules import QSR, Schedule


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
