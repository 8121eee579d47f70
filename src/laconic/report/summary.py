"""A comparison in numbers and in words."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.report.records import Record, Results

BASE, LIMIT = "ddp()", "silent()"
NEAR = 0.001  # a loss so near to another one, as a share, is no other one


@dataclass(frozen=True)
class Row:
    """One strategy over all its seeds."""

    strategy: str
    seeds: int
    loss: float
    loss_ratio: float | None  # against ddp
    bytes_per_step: float
    predicted: float | None
    kernel: float | None
    step_ms: float
    predicted_ms: float | None  # over the link that could not be had
    spread: float | None  # of the step time over seeds, as a share
    speed: float | None  # against ddp
    share: float | None  # of the rate without communication
    to_base_loss: float | None  # seconds until ddp's final loss; None: never
    wait_ms: float | None


def rows(results: Results) -> list[Row]:
    """The table: ddp first, the limit last, the others as they were given."""
    by_strategy: dict[str, list[Record]] = {}
    for run in results.runs:
        by_strategy.setdefault(run.strategy, []).append(run)
    base, limit = by_strategy.get(BASE), by_strategy.get(LIMIT)
    base_loss = _mean([run.val_loss for run in base]) if base else None
    base_ms = _mean([run.step_ms for run in base]) if base else None
    limit_ms = _mean([run.step_ms for run in limit]) if limit else None
    found = []
    for strategy, runs in sorted(by_strategy.items(), key=lambda item: (item[0] != BASE, item[0] == LIMIT)):
        step_ms, loss = _mean([run.step_ms for run in runs]), _mean([run.val_loss for run in runs])
        times = [
            None if base_loss is None else seconds_to([(look[1], look[3]) for look in run.curve], base_loss * (1 + NEAR))
            for run in runs
        ]
        found.append(
            Row(
                strategy,
                len(runs),
                loss,
                loss / base_loss if base_loss else None,
                _mean([run.wire_bytes_per_step["counted"] or 0.0 for run in runs]),
                _known([run.wire_bytes_per_step["predicted"] for run in runs]),
                _known([run.wire_bytes_per_step["kernel"] for run in runs]),
                step_ms,
                _known([run.predicted_step_ms for run in runs]),
                statistics.pstdev([run.step_ms for run in runs]) / step_ms if len(runs) > 1 else None,
                base_ms / step_ms if base_ms else None,
                limit_ms / step_ms if limit_ms else None,
                _known(times),
                _known([run.wait_ms for run in runs]),
            )
        )
    return found


def verdict(results: Results) -> str:
    """One paragraph: which to take, and what it rests on."""
    table = rows(results)
    base = next((row for row in table if row.strategy == BASE), None)
    others = [row for row in table if row.strategy not in (BASE, LIMIT)]
    if base is None or not others:
        return "Without ddp() and another strategy there is nothing to compare."
    good = [row for row in others if row.loss <= 1.02 * base.loss]
    measured = (
        f"{results.task}, {results.workers} workers, link {results.link}"
        f"{' (NOT limited: ' + results.link_note + ')' if results.link_note else ''}, "
        f"{base.seeds} seed{'s' if base.seeds > 1 else ''}, {results.machine.get('cores')} cores"
    )
    if not good:
        near = min(others, key=lambda row: row.loss)
        return (
            f"No strategy came within 2 % of ddp()'s loss of {base.loss:.4f}; the nearest is {near.strategy} with "
            f"{near.loss:.4f}. Measured on {measured}."
        )
    best = min(good, key=lambda row: row.step_ms)
    share = f", {best.share:.0%} of the rate of a run that never communicates" if best.share else ""
    return (
        f"Take {best.strategy}: a loss {round(best.loss / base.loss - 1, 3) + 0.0:+.1%} against ddp()'s, at "
        f"{best.bytes_per_step / base.bytes_per_step:.2g} of its bytes and {base.step_ms / best.step_ms:.2g} times its "
        f"speed{share}. Measured on {measured}."
    )


def labels(results: Results) -> dict[str, str]:
    """A short name for each strategy: without its arguments where that is enough to tell it from the others."""
    texts = list(dict.fromkeys(run.strategy for run in results.runs))
    names = [text.split("(")[0] for text in texts]
    return {text: name if names.count(name) == 1 else text for text, name in zip(texts, names, strict=True)}


def ground(results: Results) -> str:
    """What was equal for all, what wasn't, and how noisy it was."""
    seeds = sorted({run.seed for run in results.runs})
    times = [(run, _interval_ms(run)) for run in results.runs if run.strategy in (BASE, LIMIT)]
    spread = max((statistics.stdev(ms) / statistics.mean(ms) for _, ms in times if len(ms) > 1), default=None)
    over = [row.spread for row in rows(results) if row.spread is not None]
    noise = f"within a run, the step time of {BASE} and {LIMIT} varied by up to {spread:.0%}" if spread is not None else ""
    noise += f"{'; ' if noise else ''}over seeds by up to {max(over):.0%}" if over else ""
    return (
        f"Machine: {results.machine.get('cores')} cores, {results.machine.get('cpu')}. "
        f"Link: {results.link}{' (NOT limited: ' + results.link_note + ')' if results.link_note else ''}. "
        f"Seeds: {', '.join(map(str, seeds))}. "
        "Equal for all: initial weights, data and its order, steps and samples, optimizer, link and machine. "
        "Not equal: they ran one after the other, so a slow minute of the machine hits one of them, and all workers share "
        f"its cores. Noise: {noise or 'not known'}{'' if over else '; one seed, so nothing is known over seeds'}."
    )


def _interval_ms(run: Record) -> list[float]:
    """A step's time from one look to the next."""
    pairs = zip(run.curve, run.curve[1:], strict=False)
    return [(after[1] - before[1]) / (after[0] - before[0]) * 1e3 for before, after in pairs]


def seconds_to(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a curve of (seconds, loss) first falls to a loss, between two looks by a straight line; None: never.

    >>> seconds_to([(1.0, 3.0), (2.0, 1.0)], 2.0)
    1.5
    """
    before: tuple[float, float] | None = None
    for point in points:
        if point[1] <= loss:
            if before is None or before[1] == point[1]:
                return point[0]
            return before[0] + (point[0] - before[0]) * (before[1] - loss) / (before[1] - point[1])
        before = point
    return None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _known(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return _mean(found) if found and len(found) == len(values) else None
