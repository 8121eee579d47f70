"""A comparison in words: what to take, and what that rests on."""

import math
import statistics

from laconic.report.comparison_records import Results
from laconic.report.summary import BASE, LIMIT, Row, above, interval_ms, rows

GOOD = 0.02  # a loss that is worse than ddp's by no more than this share is as good
NOTHING = 0.02  # a difference between two step times that is no more than this share is none


def verdict(results: Results) -> str:
    """One paragraph: which to take, and what it rests on."""
    table = {row.strategy: row for row in rows(results)}
    others = [row for name, row in table.items() if name not in (BASE, LIMIT)]
    if BASE not in table or not others:
        return f"Without {BASE} and another strategy there is nothing to compare."
    base = table[BASE]
    measured = (
        f"{results.task}, {results.workers} workers, link {results.link}"
        f"{' (NOT limited: ' + results.link_note + ')' if results.link_note else ''}, "
        f"{base.seeds} seed{'s' if base.seeds > 1 else ''}, {results.machine.get('cores')} cores"
    )
    predicted = " Speeds are PREDICTED for that link." if results.link_note else ""
    return f"{_choice(base, others, table.get(LIMIT))} Measured on {measured}.{predicted}"


def _choice(base: Row, others: list[Row], limit: Row | None) -> str:
    sane = [row for row in others if row.loss is not None]
    if base.loss is None:
        rest = f"Not so: {', '.join(row.strategy for row in sane)}." if sane else "So did all others."
        return f"{BASE} itself diverged{_of_seeds(base)}: there is no loss to compare with. {rest}"
    good = [row for row in sane if row.loss is not None and row.loss <= above(base.loss, GOOD)]
    if not good:
        near = min(sane, key=lambda row: row.loss or 0.0, default=None)
        rest = f"the nearest is {near.strategy} with {near.loss:.4f}" if near else "all of them diverged"
        return f"No strategy came within {GOOD:.0%} of {BASE}'s loss of {base.loss:.4f}; {rest}."
    best = min(good, key=lambda row: row.link_ms)
    share = f", {best.share:.0%} of the rate of a run that never communicates" if best.share else ""
    assert best.loss is not None
    facts = (
        f"a loss {_against(best.loss, base.loss)} against {BASE}'s, at {_part(best.bytes_per_step, base.bytes_per_step)} of "
        f"its bytes and {base.link_ms / best.link_ms:.2g} times its speed{share}."
    )
    noise = max(NOTHING, 2 * math.hypot(best.noise_ms, base.noise_ms) / base.link_ms)
    if best.link_ms < (1 - noise) * base.link_ms:
        advice = f"Take {best.strategy}: {facts}"
    else:
        advice = (
            f"Stay with {BASE}: none that comes within {GOOD:.0%} of its loss is faster by more than the noise, {noise:.0%}. "
            f"The fastest of them is {best.strategy}: {facts}"
        )
    if limit is not None and limit.loss is not None and limit.loss <= above(base.loss, GOOD):
        return (
            f"The losses tell nothing apart: {LIMIT}, whose replicas never communicate, ended within {GOOD:.0%} of {BASE}, "
            f"too, so this was too short; give more --steps. By speed alone: {advice}"
        )
    return advice


def _part(part: float, whole: float) -> str:
    return f"{part / whole:.2g}" if whole else "all"


def _against(loss: float, base: float) -> str:
    """The difference as a share, where that says something."""
    return f"{round(loss / base - 1, 3) + 0.0:+.1%}" if base > 0 else f"of {loss:.4f}"


def _of_seeds(row: Row) -> str:
    return f" with {row.diverged} of {row.seeds} seeds" if row.seeds > 1 else ""


def ground(results: Results) -> str:
    """What was equal for all, what wasn't, and how noisy it was."""
    seeds = sorted({run.seed for run in results.runs})
    times = [interval_ms(run) for run in results.runs if run.strategy in (BASE, LIMIT)]
    spread = max((statistics.stdev(ms) / statistics.mean(ms) for ms in times if len(ms) > 1), default=None)
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
