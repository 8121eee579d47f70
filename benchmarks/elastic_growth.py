"""A world that grows and shrinks: the second part of `elastic`."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.elastic_hosts import Outcome, Plan, progress, run, sync_times
from benchmarks.elastic_workers import State, held_out, saved_states
from benchmarks.harness import mean_ratio, report

WORLDS, PHASE_SECONDS, GROWTH_SEEDS = (2, 4, 3), 15.0, tuple(range(6))
GROWING = Plan("diloco(8, outer_lr=1.0, outer_momentum=0.2)", 0, "500k", 4, PHASE_SECONDS, period=8, sleep_seconds=0.08)
LINE, SKIPPED = 5, 10  # syncs that a straight line goes through, and those at the start in which the loss falls steeply


@dataclass(frozen=True)
class Phase:
    """A part of a run in which the world stays the same."""

    world: int
    rate: float  # steps a second of a worker, once everybody is there
    staying: float  # of those who were there before, from the change on
    settled: float  # seconds until the first sync of this world


def rate(outcome: Outcome, ranks: Sequence[int], begin: float, end: float) -> float:
    """Steps a second of one worker."""
    made = sum(1 for moment in outcome.moments if moment.rank in ranks and begin <= moment.time < end)
    return made / (end - begin) / len(ranks)


def phases(outcome: Outcome) -> list[Phase]:
    """The three of a run that grows and shrinks."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for moment in outcome.moments:
        begins.setdefault(moment.rank, moment.time)
        ends[moment.rank] = moment.time
    gone = [rank for _, rank in outcome.plan.leaves]
    there = [outcome.plan.first, [*range(GROWING.hosts)], [rank for rank in range(GROWING.hosts) if rank not in gone]]
    found = []
    for number, ranks in enumerate(there):
        begin, end = number * PHASE_SECONDS, (number + 1) * PHASE_SECONDS
        left = max((ends[rank] for rank in range(GROWING.hosts) if rank not in ranks and ends[rank] < end), default=None)
        # Who leaves takes part in one more sync; in the next one it is missing.
        without = [] if left is None else [moment for moment in sync_times(outcome.moments) if moment > left][1:2]
        settled = max([begin, *without, *(begins[rank] for rank in ranks)])
        staying = [rank for rank in ranks if begins[rank] < max(begin, 1.0)]
        found.append(Phase(len(ranks), rate(outcome, ranks, settled, end), rate(outcome, staying, begin, end), settled - begin))
    return found


def misses(losses: Sequence[float]) -> list[float | None]:
    """How much each loss is above the straight line through the `LINE` before it."""
    found: list[float | None] = [None] * min(len(losses), SKIPPED)
    for place in range(SKIPPED, len(losses)):
        slope, start = statistics.linear_regression(range(LINE), losses[place - LINE : place])
        found.append(losses[place] - (start + slope * LINE))
    return found


@dataclass(frozen=True)
class Change:
    """The loss beside a change of the world."""

    before: float
    after: float
    jump: float  # what the worst sync from the change to the first of the new world is off, less than what all are on average
    noise: float  # by how much all others are off


def changes(states: Sequence[State], found: Sequence[Phase]) -> list[Change]:
    """At the two changes of a run."""
    losses = [held_out(GROWING.size, state.parameters) for state in states]
    off = misses(losses)
    spans = []
    for number in (1, 2):
        begin = number * PHASE_SECONDS
        settled = begin + found[number].settled
        first = next(place for place, state in enumerate(states) if state.time >= begin)
        spans.append(range(first, next(place for place, state in enumerate(states) if state.time > settled) + 1))
    calm = [miss for place, miss in enumerate(off) if miss is not None and not any(place in span for span in spans)]
    mean, noise = statistics.mean(calm), statistics.stdev(calm)
    return [
        Change(losses[span[0] - 1], losses[span[-1]], max(off[place] or 0.0 for place in span) - mean, noise) for span in spans
    ]


def growth() -> None:
    """Part two: 2, 4, then 3 workers in one run, beside fixed worlds."""
    late = {2: PHASE_SECONDS, 3: PHASE_SECONDS}
    changing = replace(GROWING, seconds=3 * PHASE_SECONDS, joins=late, leaves=[(2 * PHASE_SECONDS, 1)], keep=True)
    parts: list[list[Phase]] = []
    beside: list[list[Change]] = []
    fixed: dict[int, list[float]] = defaultdict(list)
    for seed in GROWTH_SEEDS:
        with run(replace(changing, seed=seed)) as outcome:
            parts.append(phases(outcome))
            beside.append(changes(saved_states(outcome.folder), parts[-1]))
        progress(f"growth, seed {seed}: " + ", ".join(f"{part.world}: {part.rate:.2f} steps/s" for part in parts[-1]))
        for world in WORLDS if seed == GROWTH_SEEDS[0] else ():
            with run(replace(GROWING, seed=seed, hosts=world)) as outcome:
                fixed[world].append(rate(outcome, range(world), 0.0, PHASE_SECONDS))
            progress(f"fixed world of {world}: {fixed[world][-1]:.2f} steps/s")
    rows, ratios = [], []
    for number, world in enumerate(WORLDS):
        mine, there = [of[number] for of in parts], statistics.mean(fixed[world])
        change = [of[number - 1] for of in beside] if number else []
        rows.append(
            {
                "workers": world,
                "steps/s a worker": f"{statistics.mean(part.rate for part in mine):.2f}",
                "fixed world": f"{there:.2f}",
                "of fixed": " ".join(f"{part.rate / there:.3f}" for part in mine),
                "with the change in it": " ".join(f"{part.staying / there:.3f}" for part in mine),
                "settled after, s": " ".join(f"{part.settled:.1f}" for part in mine),
                "loss before": " ".join(f"{one.before:.3f}" for one in change),
                "loss after": " ".join(f"{one.after:.3f}" for one in change),
                "jump": " ".join(f"{one.jump:+.4f}" for one in change),
                "noise": " ".join(f"{one.noise:.4f}" for one in change),
            }
        )
        ratios.append(
            mean_ratio(f"{world} workers: 1 / steps over a fixed world's", [there] * len(mine), [p.rate for p in mine])
        )
        whole = [part.staying for part in mine]
        ratios.append(mean_ratio(f"{world} workers: the same, with the change in it", [there] * len(mine), whole))
    legend = (
        f"One run of {3 * PHASE_SECONDS:.0f} s: 2 workers; two more join after {PHASE_SECONDS:.0f} s; one leaves (SIGTERM) "
        f"after {2 * PHASE_SECONDS:.0f} s. {GROWING.method}, byte-level transformer of 0.47 million parameters, processes on "
        f"one machine, no limit to the link. A step sleeps for {GROWING.sleep_seconds * 1e3:.0f} ms and then trains, because "
        "two cores are too few for four workers that compute all the time. Those who join were started before and wait, for "
        f"an import of torch would take the cores. Seeds: {', '.join(map(str, GROWTH_SEEDS))}; where a column has several "
        "figures, one a seed. 'of fixed': once all are there, over the steps of a world that has as many workers from the "
        f"start ({PHASE_SECONDS:.0f} s, the first seed). 'with the change in it': of those who were there before, from the "
        "change on. 'loss': held out, at the last sync before the change and at the first that all of the new world made. "
        f"'jump': how much higher the worst sync between them is than the straight line through the {LINE} before it, less "
        "what syncs are on average; 'noise': one standard deviation of the same for all other syncs."
    )
    report("elastic-growth", "A world that grows and shrinks", rows, legend, ratios)
