"""Workers that are killed, join and leave: laconic.elastic beside torchft's DiLoCo, and a world that grows and shrinks.

python -m benchmarks elastic              # all parts
python -m benchmarks.elastic failures     # or one; fragments, growth
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.elastic_growth import growth
from benchmarks.elastic_hosts import Outcome, Plan, progress, run, sync_times
from benchmarks.elastic_workers import State, held_out, saved_states
from benchmarks.harness import Ratio, mean_ratio, report
from benchmarks.peers import PERIOD, STREAMING
from laconic.lab.tasks import BytesGPT

# Failures
HOSTS, LINK, SIZE, SECONDS = 4, "100mbit", "1m", 60.0
KILLS: Mapping[int, Sequence[tuple[float, int]]] = {0: [(20.0, 2)], 1: [(20.0, 0)]}  # by seed: when, and which worker
UNDISTURBED = (0,)  # seeds of the runs without a kill
OUTER = (1.0, 0.2)
DILOCO = f"diloco({PERIOD}, outer_lr={OUTER[0]}, outer_momentum={OUTER[1]}"
TORCHFT, FRAGMENTS = f"torchft DiLoCo, {PERIOD}", f"torchft DiLoCo, {PERIOD}, 4 fragments, delay 5"
METHODS = {
    TORCHFT: "torchft 1 0",
    "laconic diloco, fp32": f"{DILOCO})",
    "laconic diloco, int8": f"{DILOCO}, reducer=ErrorFeedback(Quantized(8)))",
    "laconic sparseloco": f"sparseloco({PERIOD})",
    FRAGMENTS: "torchft 4 5",
    "laconic streaming_diloco": STREAMING,
}
BESIDE = {label: FRAGMENTS if "streaming" in label else TORCHFT for label in METHODS if label.startswith("laconic")}


@dataclass(frozen=True)
class Figures:
    """Of one run of the first part."""

    samples: float  # a minute, of all workers
    committed: float  # those of them that are in a sync
    loss: float
    sent: float  # bytes on all cables
    steps: int
    syncs: int
    dropped: int
    standstill: float  # the longest time in which nobody made a step
    waited: float  # and in which one worker that was never killed made none
    between: float  # and in which no sync was made
    deaths: Sequence[str]


def newest(states: Sequence[State], fragments: int) -> Tensor:
    """The mean of the newest states: with fragments, replicas differ, and those count that are as new but for some of these."""
    last = states[-1].version
    return torch.stack([state.parameters for state in states if state.version > last - fragments]).mean(0)


def longest(times: Sequence[float], plan: Plan) -> float:
    """The longest time between two of them, from the start to the end of the run."""
    return max(after - before for before, after in pairwise([0.0, *times, plan.seconds]))


def figures(outcome: Outcome, states: Sequence[State], fragments: int) -> Figures:
    """What a run has come to."""
    plan, moments = outcome.plan, outcome.moments
    lives = {(moment.rank, moment.life): moment for moment in moments}  # the last one of each
    killed = {rank for _, rank in plan.kills}
    survivors = [rank for rank in range(plan.hosts) if rank not in killed]
    syncs = sync_times(moments)
    share = BytesGPT.BATCH * 60 / plan.seconds
    return Figures(
        share * sum(moment.steps for moment in lives.values()),
        share * sum(moment.committed for moment in lives.values()),
        held_out(plan.size, newest(states, fragments)),
        sum(sent or 0 for sent in outcome.sent),
        sum(moment.steps for moment in lives.values()),
        len(syncs),
        max(moment.dropped for moment in lives.values() if moment.rank in survivors),
        longest([moment.time for moment in moments], plan),
        max(longest([moment.time for moment in moments if moment.rank == rank], plan) for rank in survivors),
        longest(syncs, plan),
        outcome.deaths,
    )


def measure(label: str, seed: int, kills: Sequence[tuple[float, int]]) -> Figures:
    """One run behind the link."""
    plan = Plan(METHODS[label], seed, SIZE, HOSTS, SECONDS, LINK, PERIOD, OUTER, kills=kills)
    with run(plan) as outcome:
        found = figures(outcome, saved_states(outcome.folder), 4 if BESIDE.get(label, label) == FRAGMENTS else 1)
    progress(
        f"seed {seed}, {label}, {'kills' if kills else 'undisturbed'}: {found.samples:.0f} samples a minute, "
        f"loss {found.loss:.4f}, {found.sent / 1e6:.1f} MB, {found.dropped} dropped, standstill {found.standstill:.1f} s"
    )
    for death in found.deaths:
        progress(death)
    return found


Runs = Mapping[str, Mapping[int, Figures]]


def row(label: str, kind: str, runs: Mapping[int, Figures], undisturbed: Mapping[int, Figures]) -> dict[str, object]:
    """One line of the table."""

    def mean(of: Callable[[Figures], float]) -> float:
        return statistics.mean(of(one) for one in runs.values())

    shares = [runs[seed].samples / undisturbed[seed].samples for seed in runs if seed in undisturbed]
    return {
        "": label,
        "one kill a minute": kind,
        "samples a minute": f"{mean(lambda one: one.samples):.0f}",
        "of its own undisturbed": " ".join(f"{share:.2f}" for share in shares) if runs is not undisturbed else "",
        "in committed syncs": f"{mean(lambda one: one.committed):.0f}",
        "held-out loss": " ".join(f"{one.loss:.3f}" for one in runs.values()),
        "MB": f"{mean(lambda one: one.sent) / 1e6:.1f}",
        "kB a step": f"{mean(lambda one: one.sent / one.steps) / 1e3:.1f}",
        "syncs": f"{mean(lambda one: one.syncs):.0f}",
        "dropped": " ".join(str(one.dropped) for one in runs.values()),
        "no step, s": f"{max(one.standstill for one in runs.values()):.1f}",
        "of one survivor": f"{max(one.waited for one in runs.values()):.1f}",
        "no sync, s": f"{max(one.between for one in runs.values()):.1f}",
        "other deaths": sum(len(one.deaths) for one in runs.values()),
    }


def ratios_of(label: str, killed: Runs, undisturbed: Runs) -> list[Ratio]:
    """Of ours: against its own undisturbed runs, and against torchft's with the same kills."""
    ours, alone, theirs = killed[label], undisturbed[label], killed[BESIDE[label]]
    both = [seed for seed in ours if seed in alone]
    beside, seeds = f"{BESIDE[label]}'s, with kills", list(ours)
    return [
        mean_ratio(f"{label}: samples undisturbed over with kills", *([of[s].samples for s in both] for of in (alone, ours))),
        mean_ratio(f"{label}: 1 / samples over {beside}", *([of[s].samples for s in seeds] for of in (theirs, ours))),
        mean_ratio(
            f"{label}: 1 / committed samples over {beside}", *([of[s].committed for s in seeds] for of in (theirs, ours))
        ),
        mean_ratio(f"{label}: loss over {beside}", *([of[s].loss for s in seeds] for of in (ours, theirs))),
        mean_ratio(f"{label}: bytes over {beside}", *([of[s].sent for s in seeds] for of in (ours, theirs))),
    ]


def failures(chosen: Callable[[str], bool], name: str, title: str) -> None:
    """Kills behind a link: torchft's method, and ours beside it."""
    killed: dict[str, dict[int, Figures]] = defaultdict(dict)
    undisturbed: dict[str, dict[int, Figures]] = defaultdict(dict)
    names = [label for label in METHODS if chosen(BESIDE.get(label, label))]
    for turn, (seed, kills) in enumerate(KILLS.items()):
        first = turn * len(names) // len(KILLS)
        for label in names[first:] + names[:first]:
            killed[label][seed] = measure(label, seed, kills)
            if seed in UNDISTURBED:
                undisturbed[label][seed] = measure(label, seed, ())
    rows = []
    for label in names:
        rows += [row(label, "yes", killed[label], undisturbed[label])]
        rows += [row(label, "no", undisturbed[label], undisturbed[label])]
    ratios = [ratio for label in names if label in BESIDE for ratio in ratios_of(label, killed, undisturbed)]
    moments = "; ".join(f"seed {s}: " + ", ".join(f"worker {who} at {at:.0f} s" for at, who in k) for s, k in KILLS.items())
    legend = (
        f"Byte-level transformer of 0.87 million parameters, AdamW, batch {BytesGPT.BATCH} x {BytesGPT.CONTEXT}, {HOSTS} "
        f"processes on one machine, each behind {LINK} (network namespaces, tbf both ways), {SECONDS:.0f} s a run, period "
        f"{PERIOD}, outer rate {OUTER[0]} and momentum {OUTER[1]} (sparseloco: its own, 1 and none). kill -9 of {moments}; "
        "it is started again at once as a new process, which imports torch and joins. Seeds with kills: "
        f"{', '.join(map(str, KILLS))}; undisturbed: {', '.join(map(str, UNDISTURBED))}. Runs one after the other: a "
        "method's runs of a seed are neighbours, and methods begin with another one for each seed. For all of them: torchft "
        "0.2.0, its own lighthouse with its defaults (dead after 5 s without a heartbeat), 10 s for a collective. Where its "
        "train_diloco.py sets something, so is torchft's DiLoCo here: one replica is enough, 30 s for the manager, HTTP "
        "transport, and the inner optimizer's memory is sent to who joins. 'samples': of all steps that workers made. 'in "
        "committed syncs': without steps that were thrown away, such as those of a torchft worker before it has joined, and "
        "without those that no sync has had yet. 'held-out loss': of the newest state in the end, seed by seed; with "
        "fragments, of the mean of the replicas. 'MB': all that the kernel counted on four cables, heartbeats and what a "
        "joiner is sent included. 'dropped': syncs, counted by the worker that saw most of them and was never killed. 'no "
        "step': the longest time in which no worker made one; 'of one survivor': in which one that was never killed made "
        "none. 'other deaths': processes that ended without a kill."
    )
    report(name, title, rows, legend, ratios)


PARTS: Mapping[str, Callable[[], None]] = {
    "failures": lambda: failures(lambda base: base == TORCHFT, "elastic-failures", "Workers that are killed"),
    "fragments": lambda: failures(
        lambda base: base == FRAGMENTS, "elastic-fragments", "Workers that are killed, with exchanges that stay outstanding"
    ),
    "growth": growth,
}


def main(parts: Sequence[str] = tuple(PARTS)) -> None:
    """Three tables."""
    torch.set_num_threads(1)
    for part in parts:
        PARTS[part]()


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(PARTS))
