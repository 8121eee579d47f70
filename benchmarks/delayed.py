"""Gradients that arrive late: every worker applies the mean of some steps ago, so that the wire has those steps to hide in.

laconic has no such strategy. This is why: simulated workers, from a warm model, beside local steps that hide as much.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.frontier import LARGE_BATCH, SEEDS, SMALL_BATCH
from benchmarks.harness import report
from benchmarks.simulation import Setting, falling, outcome, started
from laconic.reducers.exact import Exact

SETTINGS = (replace(SMALL_BATCH, lr=2e-3), replace(LARGE_BATCH, lr=4e-3))  # as `frontier` tunes them for ddp()
BESIDE = ("local_adam(warmup=0)", "local_adam(delay=1, warmup=0)", "local_adam(8, warmup=0, refresh=128)")


@dataclass(frozen=True)
class Late:
    """The mean of `delay` steps ago. With `fresh`, this worker's part of it is replaced by its part of now."""

    delay: int
    rate: float = 1.0  # times ddp's
    fresh: bool = False

    def __str__(self) -> str:
        fresh = ", own part fresh" if self.fresh else ""
        return f"{self.delay} step{'s' if self.delay > 1 else ''} late{fresh}, learning rate x {self.rate:g}"


VARIANTS = (Late(1), Late(1, 0.5), Late(1, 0.25), Late(1, fresh=True), Late(1, 0.5, fresh=True), Late(2, 0.5))


def train(job: tuple[Setting, Late, int]) -> float:
    """The held-out loss of one run."""
    torch.set_num_threads(1)
    setting, late, seed = job
    workers = started(setting, seed)
    under_way: deque[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = deque()
    for step in range(setting.steps):
        own = workers.gradients()
        under_way.append((workers.mean("gradients", Exact(), own, step, step), own))
        if step < late.delay:
            continue  # nothing has arrived
        mean, then = under_way.popleft()
        part = 1 / setting.workers if late.fresh else 0.0
        workers.apply(
            {name: value + (own[name] - then[name]) * part for name, value in mean.items()}, late.rate * falling(setting, step)
        )
    return workers.evaluate()


def main() -> None:
    """Late gradients, then what laconic offers instead."""
    jobs = [(setting, late, seed) for setting in SETTINGS for late in VARIANTS for seed in SEEDS]
    beside = [(setting, name, seed) for setting in SETTINGS for name in ("ddp()", *BESIDE) for seed in SEEDS]
    with get_context("fork").Pool(2) as pool:
        losses = dict(zip(beside, (found.loss for found in pool.map(outcome, beside, chunksize=1)), strict=True))
        late = dict(zip(jobs, pool.map(train, jobs, chunksize=1), strict=True))
    rows: list[dict[str, object]] = []
    for name in (*VARIANTS, *BESIDE):
        row: dict[str, object] = {"": str(name)}
        for setting in SETTINGS:
            mine = [late[setting, name, seed] if isinstance(name, Late) else losses[setting, name, seed] for seed in SEEDS]
            above = [100 * (loss / losses[setting, "ddp()", seed] - 1) for loss, seed in zip(mine, SEEDS, strict=True)]
            row[f"batch {setting.batch}: above ddp, %"] = f"{statistics.mean(above):+.2f} ± {statistics.stdev(above):.2f}"
        rows.append(row)
    legend = (
        "Held-out loss of the averaged model at equal steps, in percent above ddp() with the same seed: mean and standard "
        f"deviation over {len(SEEDS)} seeds. {SETTINGS[0]}; and batch 8, lr 0.004. Late gradients are exact, at all of ddp's "
        "bytes; the last rows are local steps, of which the second and third hide their exchange behind steps or send half."
    )
    report("delayed", "Gradients that arrive late", rows, legend)


if __name__ == "__main__":
    main()
