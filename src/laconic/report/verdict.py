"""A comparison in words: what to take, and what that rests on."""

import math
import re
import statistics

from laconic.report.comparison_records import Results
from laconic.report.summary import BASE, LIMIT, TOO_FAST, Row, above, interval_ms, rows

GOOD = 0.02  # a loss above ddp()'s by no more than this share is as good as it
WIDEST = 0.05  # nor, however noisy ddp() itself is, one above it by more than this
NOTHING_APART = 0.005  # where a run without communication is so near to the best, averaging did not matter
LONGER = 4  # times as many steps, or seconds, are proposed where a comparison was too short
APART = 3  # spreads over seeds between two losses that differ
SAME_TIME = 0.2  # a time so near to the one that was asked for, as a share, is it
HELD_UP = 0.7  # with less than this share of the rate without communication, a strategy sends much for the link
SENDS_LITTLE = "streaming_diloco(32, fragments=4, delay=4)"
NOTHING = 0.02  # a difference between two step times that is no more than this share is none


def verdict(results: Results) -> str:
    """One paragraph: which to take, and what it rests on."""
    table = {row.strategy: row for row in rows(results)}
    others = [row for name, row in table.items() if name not in (BASE, LIMIT)]
    if BASE not in table or not others:
        return f"Without {BASE} and another strategy there is nothing to compare."
    base, limit = table[BASE], table.get(LIMIT)
    again = "" if base.seeds > 1 else f" One seed: a hint, not a verdict.{_command(results)}"
    if results.seconds is None:
        choice = _by_speed(base, others, limit)
        if _tell_nothing(base, limit):
            again = _longer(results, "steps", base.steps)
    elif late := _unequal_times(results, results.seconds, _compared(base, others, limit)):
        choice, again = late, _at_equal_steps(results)
    elif unhelped := _no_gain(base, others, limit, results.seconds):
        choice = unhelped
        little = SENDS_LITTLE in choice and results.command
        again = f' Add it:\n{results.command} -s "{SENDS_LITTLE}"' if little else _longer(results, "seconds", results.seconds)
    else:
        choice = _by_time(base, others, results.seconds)
    warm = f"{results.warm} warm steps, " if results.warm else ""
    measured = (
        f"{results.task}, {warm}{results.who}, link {results.link}"
        f"{' (NOT limited: ' + results.link_note + ')' if results.link_note else ''}, "
        f"{base.seeds} seed{'s' if base.seeds > 1 else ''}, {results.machine.get('cores')} cores"
    )
    predicted = " Speeds are PREDICTED for that link." if results.link_note else ""
    if results.link_note and results.seconds is not None:
        predicted = " Steps and losses are of the time without that link, speeds are PREDICTED for it."
    return f"{choice} Measured on {measured}.{predicted}{again}"


def _command(results: Results) -> str:
    return f" For three seeds:\n{results.command} --seeds 3 --resume" if results.command else " Give --seeds 3."


def _longer(results: Results, option: str, now: float) -> str:
    """The command that gives all runs more of it, and how long that takes."""
    more = f"--{option} {LONGER * now:.{0 if option == 'steps' else 1}f}".removesuffix(".0")
    if not results.command:
        return f" Give {more}."
    minutes = LONGER * sum(run.seconds for run in results.runs) / 60
    return f" Run it for longer, about {max(1, round(minutes))} min:\n{re.sub(f'--{option} [0-9.]+', more, results.command)}"


def _tell_nothing(base: Row, limit: Row | None) -> bool:
    """Whether a run that never communicates ended as low as ddp(); with several seeds, as near as these are to each other."""
    if base.loss is None or limit is None or limit.loss is None:
        return False
    within = tolerance(base)
    if base.seeds > 1 and limit.seeds > 1:
        within = min(within, max(NOTHING_APART, APART * max(base.loss_spread or 0.0, limit.loss_spread or 0.0)))
    return limit.loss <= above(base.loss, within)


def _compared(base: Row, others: list[Row], limit: Row | None) -> set[str]:
    """Those on whose losses the words rest: ddp(), the best of the others, and silent() where it is as good."""
    best = _best([base, *others])
    near = limit is not None and limit.loss is not None and best is not None and limit.loss <= above(best.loss or 0.0, GOOD)
    lowest = _best(others)
    return {row.strategy for row in (base, lowest, limit if near else None) if row is not None}


def _best(table: list[Row]) -> Row | None:
    return min((row for row in table if row.loss is not None), key=lambda row: row.loss or 0.0, default=None)


def _unequal_times(results: Results, seconds: float, compared: set[str]) -> str:
    """What to say where runs had another time than was asked for: their pace changed after it had been measured."""
    times: dict[str, list[float]] = {}
    for run in results.runs:
        if run.strategy in compared:
            times.setdefault(run.strategy, []).append(run.seconds)
    off = {name: had for name, had in times.items() if any(abs(one / seconds - 1) > SAME_TIME for one in had)}
    if not off:
        return ""
    had = ", ".join(f"{name} had {' and '.join(f'{one:.2g}' for one in ones)} s" for name, ones in off.items())
    return (
        f"No recommendation: the runs did not have the same time. Of the {seconds:g} s that were asked for, {had}. The pace of "
        "the machine changed, so that speeds tell little, too: run it again when nothing else runs here, or at equal steps."
    )


def _at_equal_steps(results: Results) -> str:
    """The command for as many steps as ddp() has made."""
    steps = f"--steps {max(run.steps for run in results.runs if run.strategy == BASE)}"
    return " At equal steps:\n" + re.sub("--seconds [0-9.]+", steps, results.command) if results.command else f" Give {steps}."


def _no_gain(base: Row, others: list[Row], limit: Row | None, seconds: float) -> str:
    """What to say where a run that never communicates ended as low as the best of the others; else nothing."""
    best = _best([base, *others])
    if base.loss is None or best is None or best.loss is None or limit is None or limit.loss is None:
        return ""
    if limit.loss > above(best.loss, NOTHING_APART):
        return ""
    what = (
        f"No recommendation: averaging gained nothing within {seconds:g} s. {LIMIT}, whose replicas never communicate, ended "
        f"at {limit.loss:.4f}, and the best of the others, {best.strategy}, at {best.loss:.4f}."
    )
    fastest = max((row.share or 0.0 for row in (base, *others)), default=0.0)
    if fastest >= HELD_UP or any(row.strategy.startswith("streaming_diloco") for row in others):
        return f"{what} More steps tell more: more seconds, or a warmer start (--warm)."
    return (
        f"{what} All of these send too much for this link: the fastest has {fastest:.0%} of the rate of {LIMIT}. Compare one "
        f"that sends less, such as {SENDS_LITTLE}."
    )


def _nothing_to_choose(base: Row, sane: list[Row]) -> str:
    rest = f"Not so: {', '.join(row.strategy for row in sane)}." if sane else "So did all others."
    return f"{BASE} itself diverged{_of_seeds(base)}: there is no loss to compare with. {rest}"


def _by_time(base: Row, others: list[Row], seconds: float) -> str:
    """Of runs that had the same time: the lowest loss."""
    sane = [row for row in others if row.loss is not None]
    if base.loss is None:
        return _nothing_to_choose(base, sane)
    if not sane:
        return f"Stay with {BASE}: all others diverged."
    best = min(sane, key=lambda row: row.loss or 0.0)
    assert best.loss is not None
    cut = noise_of(base, best)
    then = (
        "" if best.at_equal_steps is None else f"; at equal steps, its loss is {_change(best.at_equal_steps)} against {BASE}'s"
    )
    facts = (
        f"after {seconds:g} s a loss {_against(best.loss, base.loss)} against {BASE}'s, in {best.steps / base.steps:.2g} "
        f"times as many steps, of which each sends {_part(best.bytes_per_step, base.bytes_per_step)} of its bytes"
        f"{_share(best)}{then}."
    )
    if best.loss < above(base.loss, -cut):
        return f"Take {best.strategy}: {facts}"
    return (
        f"Stay with {BASE}: within {seconds:g} s none ends below its loss by more than {_percent(cut)}. The lowest is "
        f"{best.strategy}: {facts}"
    )


def _by_speed(base: Row, others: list[Row], limit: Row | None) -> str:
    """Of runs that made as many steps: the fastest whose loss is as good."""
    sane = [row for row in others if row.loss is not None]
    if base.loss is None:
        return _nothing_to_choose(base, sane)
    within = tolerance(base)
    untold = _tell_nothing(base, limit)
    if not untold and limit is not None and limit.loss is not None:  # who is as good as ddp() is better than one that is alone
        within = min(within, (limit.loss - base.loss) / abs(base.loss)) if base.loss else within
    good = [row for row in sane if row.loss is not None and row.loss <= above(base.loss, within)]
    if not good:
        near = min(sane, key=lambda row: row.loss or 0.0, default=None)
        rest = f"the nearest is {near.strategy} with {near.loss:.4f}" if near else "all of them diverged"
        none = f"No strategy came within {_percent(within)} of {BASE}'s loss of {base.loss:.4f}; {rest}."
        return f"{none} {LIMIT}, whose replicas never communicate, did: more steps tell more." if untold else none
    best = min(good, key=lambda row: row.link_ms)
    assert best.loss is not None
    facts = (
        f"a loss {_against(best.loss, base.loss)} against {BASE}'s, at {_part(best.bytes_per_step, base.bytes_per_step)} of "
        f"its bytes and {base.link_ms / best.link_ms:.2g} times its speed{_share(best)}."
    )
    noise = max(NOTHING, 2 * math.hypot(best.noise_ms, base.noise_ms) / base.link_ms)
    if untold:
        slower = f"{BASE} is the fastest; the next that came so near is {best.strategy}"
        which = slower if best.link_ms >= base.link_ms else f"{best.strategy} is the fastest that came so near"
        return f"{_too_short(base, within)} By speed alone, {which}: {facts}"
    if best.link_ms < (1 - noise) * base.link_ms:
        return f"Take {best.strategy}: {facts}"
    return (
        f"Stay with {BASE}: none that comes within {_percent(within)} of its loss is faster by more than the "
        f"noise, {noise:.0%}. The fastest of them is {best.strategy}: {facts}"
    )


def _too_short(base: Row, within: float) -> str:
    return (
        f"No recommendation: the losses tell nothing apart. {LIMIT}, whose replicas never communicate, ended no more "
        f"than {_percent(within)} above {BASE}'s loss, so this was too short."
    )


def tolerance(base: Row) -> float:
    """How far above ddp()'s a loss may be, as a share, to be as good: by ddp()'s own noise alone.

    A strategy's own spread is no excuse: the wilder its curve was, the more easily its loss would pass.
    """
    return min(WIDEST, max(GOOD, base.loss_spread or 0.0))


def noise_of(base: Row, row: Row) -> float:
    """By how much a loss must be below ddp()'s, as a share, to be lower: by more than the spread of either."""
    return max(GOOD, base.loss_spread or 0.0, row.loss_spread or 0.0)


def _share(row: Row) -> str:
    if not row.share:
        return ""
    if row.share >= TOO_FAST:
        return ", as fast as a run that never communicates"
    return f", {row.share:.0%} of the rate of a run that never communicates"


def _percent(share: float) -> str:
    return f"{round(100 * share, 1):g}%"


def _change(ratio: float) -> str:
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"


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
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}: number {', '.join(map(str, seeds))}. "
        f"Equal for all: initial weights, data and its order, {'time' if results.seconds else 'steps and samples'}, optimizer, "
        "link and machine. Not equal: they ran one after the other, so a slow minute of the machine hits one of them, and all "
        "workers share "
        f"its cores. Noise: {noise or 'not known'}{'' if over else '; one seed, so nothing is known over seeds'}."
        f"{_model(results)}"
    )


def _model(results: Results) -> str:
    """How far off the cost model was; of silent() it knows the answer."""
    off = {row.strategy: row.model_error for row in rows(results) if row.strategy != LIMIT}
    known = {strategy: error for strategy, error in off.items() if error is not None}
    if not known:
        return ""
    worst = max(known, key=lambda strategy: abs(known[strategy]))
    middle = statistics.median(abs(error) for error in known.values())
    return f" The cost model was off by {middle:.0%} of the step time (median), at most by {known[worst]:+.0%} ({worst})."
