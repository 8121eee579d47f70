"""A comparison in numbers."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from laconic.report.comparison_records import Record, Results

BASE, LIMIT = "ddp()", "silent()"
NEAR = 0.001  # a loss so near to another one, as a share, is no other one
TOO_FAST = 1.005  # a share of the rate without communication that is noise and no share
LAST_LOOKS = 4  # of a curve, from which its noise is judged where there is one seed


@dataclass(frozen=True)
class Row:
    """One strategy over all its seeds."""

    strategy: str
    seeds: int
    diverged: int  # so many of the seeds
    loss: float | None  # None: of a seed at least it is no finite number
    loss_ratio: float | None  # against ddp; None: that has none above 0, where a ratio says something
    loss_spread: float | None  # as a share: over seeds, or, with one, what the last looks of its curve scatter by
    steps: float
    at_equal_steps: float | None  # as `loss_ratio`, after as many steps as every run has made
    bytes_per_step: float
    predicted: float | None
    kernel: float | None
    step_ms: float
    predicted_ms: float | None  # over the link that could not be had
    model_ms: float | None  # what the cost model said of `step_ms` before the run
    spread: float | None  # of the step time over seeds, as a share
    noise_ms: float  # standard error of the step time; 0 where nothing is known of it
    speed: float | None  # against ddp, as `share` over the link: predicted, where it could not be had
    share: float | None  # of the rate without communication
    to_base_loss: float | None  # seconds until the final loss of ddp with the same seed, of the seeds that reached it
    reached: int  # so many of the seeds
    compared: int  # so many of them had such a loss to reach
    wait_ms: float | None

    @property
    def link_ms(self) -> float:
        """A step over the link that was asked for: measured, or predicted where it could not be had."""
        return self.step_ms if self.predicted_ms is None else self.predicted_ms

    @property
    def model_error(self) -> float | None:
        """How far off the cost model was, as a share of what was measured."""
        return None if self.model_ms is None else self.model_ms / self.step_ms - 1


def rows(results: Results) -> list[Row]:
    """The table: ddp first, the limit last, the others as they were given."""
    by_strategy: dict[str, list[Record]] = {}
    for run in results.runs:
        by_strategy.setdefault(run.strategy, []).append(run)
    base, limit = by_strategy.get(BASE), by_strategy.get(LIMIT)
    targets = {run.seed: run.val_loss for run in base or () if run.val_loss is not None}
    base_loss = _known([run.val_loss for run in base]) if base else None
    common = min((run.steps for run in results.runs), default=0)
    base_then = _loss_after(base, common) if base else None
    base_ms, limit_ms = (_link_ms(runs) if runs else None for runs in (base, limit))
    found = []
    for strategy, runs in sorted(by_strategy.items(), key=lambda item: (item[0] != BASE, item[0] == LIMIT)):
        step_ms, link_ms, loss = _mean([run.step_ms for run in runs]), _link_ms(runs), _known([run.val_loss for run in runs])
        times = [seconds_to(_points(run), above(targets[run.seed], NEAR)) for run in runs if run.seed in targets]
        reached = [seconds for seconds in times if seconds is not None]
        then = _loss_after(runs, common)
        found.append(
            Row(
                strategy,
                len(runs),
                sum(run.val_loss is None for run in runs),
                loss,
                loss / base_loss if base_loss and base_loss > 0 and loss is not None else None,
                _loss_spread(runs, loss),
                _mean([run.steps for run in runs]),
                then / base_then if then is not None and base_then is not None and base_then > 0 else None,
                _mean([run.wire_bytes_per_step["counted"] or 0.0 for run in runs]),
                _known([run.wire_bytes_per_step["predicted"] for run in runs]),
                _known([run.wire_bytes_per_step["kernel"] for run in runs]),
                step_ms,
                _known([run.predicted_step_ms for run in runs]),
                _known([run.expected_step_ms for run in runs]),
                statistics.pstdev([run.step_ms for run in runs]) / step_ms if len(runs) > 1 else None,
                _noise_ms(runs),
                base_ms / link_ms if base_ms else None,
                limit_ms / link_ms if limit_ms else None,
                _mean(reached) if reached else None,
                len(reached),
                len(times),
                _known([run.wait_ms for run in runs]),
            )
        )
    return found


def above(loss: float, share: float) -> float:
    """A loss that is worse by a share, whatever its sign.

    >>> above(2.0, 0.5), above(-2.0, 0.5)
    (3.0, -1.0)
    """
    return loss + share * abs(loss)


def labels(results: Results) -> dict[str, str]:
    """A short name for each strategy: without its arguments where that is enough to tell it from the others."""
    texts = list(dict.fromkeys(run.strategy for run in results.runs))
    names = [text.split("(")[0] for text in texts]
    return {text: name if names.count(name) == 1 else text for text, name in zip(texts, names, strict=True)}


def stretch(run: Record) -> float:
    """How much longer the run would have taken over the link that was asked for, where it could not be had."""
    return 1.0 if run.predicted_step_ms is None else run.predicted_step_ms / run.step_ms


def interval_ms(run: Record) -> list[float]:
    """A step's time from one look to the next."""
    looks = [(step, seconds) for step, seconds, *_ in run.curve if step is not None and seconds is not None]
    return [(after[1] - before[1]) / (after[0] - before[0]) * 1e3 for before, after in pairwise(looks)]


def seconds_to(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a curve of (seconds, loss) falls to a loss for good, between two looks by a straight line; None: never.

    >>> seconds_to([(1.0, 3.0), (2.0, 1.0)], 2.0)
    1.5
    >>> seconds_to([(1.0, 1.0), (2.0, 3.0), (3.0, 1.0)], 2.0), seconds_to([(1.0, 1.0), (2.0, 3.0)], 2.0)
    (2.5, None)
    """
    after: tuple[float, float] | None = None
    for point in reversed(points):
        if point[1] > loss:
            return None if after is None else point[0] + (after[0] - point[0]) * (point[1] - loss) / (point[1] - after[1])
        after = point
    return None if after is None else after[0]


def _loss_after(runs: list[Record], steps: float) -> float | None:
    """The mean loss after so many steps, between two looks by a straight line; None where a curve doesn't say it."""
    found: list[float | None] = []
    for run in runs:
        looks = [(step, loss) for step, _, _, loss in run.curve if step is not None and loss is not None]
        before = max((look for look in looks if look[0] <= steps), default=None)
        after = min((look for look in looks if look[0] >= steps), default=None)
        if before is None or after is None:
            return None
        share = (steps - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        found.append(before[1] + share * (after[1] - before[1]))
    return _known(found)


def _loss_spread(runs: list[Record], loss: float | None) -> float | None:
    """Over seeds; with one, of its last looks around a straight line through them."""
    if not loss:
        return None
    if len(runs) > 1:
        return statistics.stdev([run.val_loss for run in runs if run.val_loss is not None]) / abs(loss)
    last = [(step, look) for step, _, _, look in runs[0].curve[-LAST_LOOKS:] if step is not None and look is not None]
    if len(last) < LAST_LOOKS:
        return None
    line = statistics.linear_regression(*zip(*last, strict=True))
    left = [look - (line.slope * step + line.intercept) for step, look in last]
    return math.sqrt(sum(each * each for each in left) / (LAST_LOOKS - 2)) / abs(loss)


def _points(run: Record) -> list[tuple[float, float]]:
    """Seconds over the link and loss at each look, without those at which the loss was no number."""
    looks = [(seconds, loss) for _, seconds, _, loss in run.curve if seconds is not None and loss is not None]
    return [(stretch(run) * seconds, loss) for seconds, loss in looks]


def _link_ms(runs: list[Record]) -> float:
    return _mean([stretch(run) * run.step_ms for run in runs])


def _noise_ms(runs: list[Record]) -> float:
    """Over seeds, or, with one, over the times from look to look."""
    times = [run.step_ms for run in runs] if len(runs) > 1 else interval_ms(runs[0])
    return statistics.stdev(times) / math.sqrt(len(times)) if len(times) > 1 else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _known(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return _mean(found) if found and len(found) == len(values) else None
