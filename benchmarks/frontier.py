"""The loss that each budget of bytes buys: simulated workers, learning rates tuned for ddp, three seeds, two regimes.

The methods were chosen on another model (140k parameters, batches of 2, 4 and 16); here are a larger one and another task.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import report
from benchmarks.simulation import Job, Outcome, Setting, outcomes, percent, tuned

SEEDS, BUDGETS = (0, 1, 2), (4, 8, 16, 32, 64, 128)
RATES = {"adamw": (1e-3, 2e-3, 4e-3, 8e-3), "sgd": (0.05, 0.1, 0.2, 0.4)}
SMALL_BATCH = Setting("transformer 470k", 2, 0.0, 320, warm=700)
LARGE_BATCH = replace(SMALL_BATCH, batch=8)
SCRATCH = Setting("transformer 470k", 2, 0.0, 1200)
DIGITS = Setting("digits", 8, 0.0, 200, warm=100, beta2=0.999)
SGD = replace(SMALL_BATCH, optimizer="sgd")
SCRATCH_SGD = replace(DIGITS, optimizer="sgd", steps=300, warm=0)
SETTINGS = (SMALL_BATCH, LARGE_BATCH, SCRATCH, DIGITS, SGD, SCRATCH_SGD)


def methods(setting: Setting) -> dict[str, str]:
    """Strategies by family."""
    return with_adam(setting) if setting.optimizer == "adamw" else with_sgd(setting)


def with_adam(setting: Setting) -> dict[str, str]:
    """From a warm model none needs a warm-up of its own; from scratch each gets the one it asks for: PowerSGD an exact one."""
    short, long = (0, 0) if setting.warm else (setting.steps // 20, setting.steps // 5)
    four_bits = "reducer=ErrorFeedback(Quantized(4))"

    def momentum(inner: str) -> str:
        return f"ddp(reducer=Momentum(ErrorFeedback({inner})), second_moment='slow', warmup={long}, warmup_{four_bits})"

    found = {
        "int4()": "gradients",
        f"powersgd(rank=4, warmup={short})": "gradients",
        f"local_adam(1, warmup={short}, {four_bits})": "local_adam",
        f"local_adam(2, warmup={short}, {four_bits})": "local_adam",
        f"local_adam(2, warmup={short})": "local_adam",
        f"local_adam(warmup={short})": "local_adam",
        f"local_adam(8, warmup={short}, refresh=128)": "local_adam",
        momentum("Quantized(2)"): "momentum",
        momentum("Ternary()"): "momentum",
        f"diloco(16, warmup={short}, warmup_{four_bits}, reducer=Quantized(8))": "diloco",
        "silent()": "",
    }
    if setting.model != "digits" and not setting.warm:
        found[f"local_adam(3, warmup={setting.steps // 12})"] = "local_adam"
    if setting in (SMALL_BATCH, DIGITS):
        found |= {
            "int8()": "gradients",
            "sign(warmup=0)": "gradients",
            "topk(ratio=0.03, warmup=0)": "gradients",
            "ddp(reducer=ErrorFeedback(Ternary()), second_moment='slow')": "gradients",
            f"onebit_adam(warmup={long})": "momentum",
            "local_sgd(16)": "averaging",
            "local_sgd(16, moments='average')": "averaging",
            "diloco(16)": "diloco",
            "diloco(16, outer_lr=1.0, outer_momentum=0.5)": "diloco",
            "sparseloco(16)": "diloco",
            "local_adam(second_moment='local', refresh=0, warmup=0)": "local_adam",
            "local_adam(second_moment='slow', refresh=0, warmup=0)": "local_adam",
            "local_adam(warmup=0, reducer=Exact())": "local_adam",
            "local_adam(delay=1, warmup=0)": "local_adam",
        }
    return found


def with_sgd(setting: Setting) -> dict[str, str]:
    """What knows of Adam has no part here."""
    start = "" if setting.warm else f", warmup={setting.steps // 20}, warmup_reducer=ErrorFeedback(Quantized(4))"
    plain = "outer_lr=1.0, outer_momentum=0.0"
    return {
        "int8()": "gradients",
        "int4()": "gradients",
        "powersgd(rank=4, warmup=0)": "gradients",
        "powersgd(rank=1, warmup=0)": "gradients",
        "ddp(reducer=ErrorFeedback(Quantized(2)))": "gradients",
        "ddp(reducer=ErrorFeedback(Ternary()))": "gradients",
        "sign(warmup=0)": "gradients",
        "topk(ratio=0.03, warmup=0)": "gradients",
        "topk(ratio=0.01, warmup=0)": "gradients",
        f"local_sgd(4{start})": "averaging",
        f"local_sgd(16{start})": "averaging",
        f"diloco(4, {plain}, reducer=ErrorFeedback(Ternary()){start})": "diloco",
        f"diloco(8, {plain}, reducer=ErrorFeedback(Ternary()){start})": "diloco",
        f"diloco(16{start})": "diloco",
        f"diloco(16, reducer=Quantized(8){start})": "diloco",
        f"diloco(16, reducer=ErrorFeedback(Quantized(4)){start})": "diloco",
        "silent()": "",
    }


@dataclass(frozen=True)
class Point:
    """A strategy in one setting."""

    strategy: str
    family: str
    part: float  # of ddp's bytes: one in so many
    worse: Sequence[float]  # percent above ddp's loss, by seed


def points(found: Mapping[Job, Outcome], setting: Setting) -> list[Point]:
    """All of one setting."""
    base = found[setting, "ddp()", 0].bytes_per_step
    return [
        Point(name, family, base / max(found[setting, name, 0].bytes_per_step, 1e-9), percent(found, setting, name, SEEDS))
        for name, family in methods(setting).items()
    ]


def best(candidates: Sequence[Point], budget: int) -> Point | None:
    """The lowest loss of those that send at most one in `budget` of ddp's bytes; silent() sends none and is no answer."""
    within = [point for point in candidates if point.family and point.part >= budget]
    return min(within, key=lambda point: statistics.mean(point.worse), default=None)


def main() -> None:
    """Tune, run, and write the table of all, with the best of each budget marked."""
    chosen: dict[Setting, float] = {}
    for kind in ("adamw", "sgd"):
        chosen |= tuned([setting for setting in SETTINGS if setting.optimizer == kind], RATES[kind])
    settings = {setting: replace(setting, lr=chosen[setting]) for setting in SETTINGS}
    jobs = [
        (tuned_to, name, seed)
        for setting, tuned_to in settings.items()
        for name in ("ddp()", *methods(setting))
        for seed in SEEDS
    ]
    found = outcomes(jobs)
    rows: list[dict[str, object]] = []
    for setting, tuned_to in settings.items():
        here = {(setting, name, seed): outcome for (one, name, seed), outcome in found.items() if one == tuned_to}
        candidates = points(here, setting)
        winners = {budget: best(candidates, budget) for budget in BUDGETS}
        for point in candidates:
            rows.append(
                {
                    "setting": str(tuned_to),
                    "loss of ddp": f"{statistics.mean(here[setting, 'ddp()', seed].loss for seed in SEEDS):.4f}",
                    "strategy": point.strategy,
                    "family": point.family,
                    "bytes": f"1/{point.part:.1f}" if point.family else "0",
                    "above ddp, %": f"{statistics.mean(point.worse):+.2f} ± {statistics.stdev(point.worse):.2f}",
                    "best at": ", ".join(f"1/{budget}" for budget, winner in winners.items() if winner is point),
                }
            )
    legend = (
        "Held-out loss of the averaged model at equal steps, in percent above ddp() with the same seed: mean and standard "
        f"deviation over {len(SEEDS)} seeds. 4 simulated workers; AdamW, weight decay 0.01, betas 0.9, 0.95 (digits: 0.999), "
        f"or SGD with momentum 0.9; norms clipped to 1, cosine. The learning rate is ddp()'s best of {RATES['adamw']} "
        f"or {RATES['sgd']} for all. bytes: of one worker over the whole run, warm-up and refreshes included, against ddp(). "
        "best at: the lowest loss within that budget."
    )
    report("frontier", "What each budget of bytes buys", rows, legend)


if __name__ == "__main__":
    main()
