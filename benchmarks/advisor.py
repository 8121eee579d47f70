"""The cost model against the lab: predicted and measured step times, and whether the advisor's choice was right.

Cells of link, number of workers and model size. In each: the step time that the cost model predicts before a run, beside the
one that the lab measures then, for every strategy; and the advisor's choice for each class of risk, run in the same way,
beside the best of that class. The cells that constants were fitted to are `FITTED`; they are not among those that count.
"""

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import laconic
from benchmarks.harness import RESULTS, Ratio, report
from laconic.advisor.advice import advise
from laconic.advisor.candidates import candidates, risk_of
from laconic.advisor.risk import Risk
from laconic.cost.codec import Codec
from laconic.cost.link import Link, parse
from laconic.forecast.prediction import cycle_of
from laconic.lab import host_speeds
from laconic.lab.compare import settle_seconds
from laconic.lab.link import start
from laconic.lab.prediction import compute_of, networks
from laconic.lab.tasks import BytesGPT
from laconic.lab.trainee import build
from laconic.lab.workers import Workers

LINKS, WORKERS, SIZES = ("none", "1gbit", "100mbit", "10mbit"), (2, 4), ("500k", "2m")
FITTED = "bytes-gpt:1m behind none, 300mbit and 30mbit with 2 and 4 workers"
STRATEGIES = (
    "ddp()",
    "bf16()",
    "int8()",
    "int4()",
    "powersgd(rank=4, warmup=0)",
    "post_local_sgd(warmup=1, period=8)",
    "diloco(period=16)",
    "streaming_diloco(period=16, fragments=4, delay=3, blend=0.0, carry=True)",
    "local_adam(warmup=0)",
)
LIMIT = "silent()"
RISKS = (Risk.ROUNDING, Risk.DELAY, Risk.LOCAL)
WARMUP, FEWEST, MOST, SECONDS = 3, 6, 96, 6.0  # steps that are not timed; and those that are, in about so many seconds
CELLS = RESULTS / "advisor_cells.json"


class Cell(NamedTuple):
    """One row of the table's first columns."""

    link: str
    workers: int
    size: str

    @property
    def task(self) -> str:
        """What is trained."""
        return f"bytes-gpt:{self.size}"

    def __str__(self) -> str:
        return f"{self.link}, {self.workers} workers, {self.size}"


def advising(cell: Cell, probe: str) -> None:
    """As one of the workers: time compute and encoding, then ask the advisor for each class of risk."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainee = build({"task": cell.task, "seed": 0})
    link = parse(cell.link)
    (network,) = networks(probe, [(link.bits_per_second, link.delay_seconds)], 1)
    compute = compute_of(trainee, trainee.task.batches(dist.get_rank(), cell.workers, 0))
    dist.barrier()
    families = candidates(trainee.bare, cell.workers, Codec(), sizes={"node": 1})
    if dist.get_rank() == 0:
        found = {}
        for risk in RISKS:
            choice = advise(families, compute, network, risk=risk).choice
            found[risk.option] = [warm(choice.strategy), choice.risk.option, choice.share]
        print("\n" + json.dumps({"choices": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def warm(strategy: str) -> str:
    """The strategy as it is after its warm-up: a run of some seconds would hardly leave it."""
    return re.sub(r"^(powersgd\(rank=\d+)\)", r"\1, warmup=0)", strategy.replace("warmup=100", "warmup=0"))


def choices(cell: Cell, probe: Path) -> dict[str, list[Any]]:
    """The advisor's choice for each class of risk: its text, its own class, and the share it should reach."""
    command = [sys.executable, "-m", "benchmarks.advisor", "--advising", *map(str, cell), str(probe)]
    with start(command, cell.workers, parse(cell.link), os.environ) as process:
        output, _ = process.communicate()
    answers = [line for line in output.splitlines() if line.startswith('{"choices"')]
    if not answers:
        raise SystemExit(f"{cell}: the workers ended with {process.returncode}:\n{output[-3000:]}")
    found: dict[str, list[Any]] = json.loads(answers[-1])["choices"]
    return found


def steps_of(strategy: str, cell: Cell) -> int:
    """Timed steps, in whole cycles: about as many as fit."""
    chosen, link = laconic.strategy(strategy), parse(cell.link)
    with torch.device("meta"):
        model = BytesGPT(cell.size).model()
    sent = laconic.predict(chosen, model, world_size=cell.workers, sizes={"node": 1}).wire_bytes_per_step
    seconds = 0.04 + (sent * 8 / link.bits_per_second if link.bits_per_second else 0.0)
    cycle = cycle_of(chosen)
    wanted = max(FEWEST, min(MOST, SECONDS / seconds))
    return math.ceil(wanted / cycle) * cycle


def measured(cell: Cell, strategies: Sequence[str], probe: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of a step in the lab, and those that the cost model had said."""
    link = parse(cell.link)
    pair = (link.bits_per_second, link.delay_seconds)
    orders = [
        {
            "task": cell.task,
            "strategy": strategy,
            "seed": 0,
            "looks": 1,
            "warmup": WARMUP,
            "steps": WARMUP + steps_of(strategy, cell),
            "settle_seconds": settle_seconds(strategy, link),
            "probe": str(probe),
            "links": [pair],
        }
        for strategy in strategies
    ]
    found = {}
    with Workers(orders, cell.workers, link) as workers:
        for strategy in strategies:
            told = workers.told(strategy, lambda facts: None)
            last, (end,) = told["look"][-1], told["end"]
            found[strategy] = {"measured": last["seconds"] / last["timed"] * 1e3, "predicted": end["expected_ms"][0]}
    return found


def run_cell(cell: Cell) -> dict[str, Any]:
    """All of one cell."""
    cables = parse(cell.link) != Link()
    probe = host_speeds.ensure(cell.workers, 1, cables=cables, say=print)
    chosen = choices(cell, probe)
    wanted = dict.fromkeys([*STRATEGIES, *(text for text, *_ in chosen.values()), LIMIT])
    return {"cell": list(cell), "choices": chosen, "runs": measured(cell, list(wanted), probe)}


def counted(found: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """A row for each strategy of each cell."""
    rows: list[dict[str, object]] = []
    for one in found:
        link, workers, size = one["cell"]
        for strategy, run in one["runs"].items():
            if strategy != LIMIT:
                off = run["predicted"] / run["measured"] - 1
                numbers = {"measured, ms": f"{run['measured']:.1f}", "predicted, ms": f"{run['predicted']:.1f}"}
                rows.append(
                    {"link": link, "workers": workers, "model": size, "strategy": strategy, **numbers, "off": f"{off:+.1%}"}
                )
    return rows


def chosen_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """A row for each choice: its rate beside that of the best of its class, as the lab found them."""
    rows: list[dict[str, object]] = []
    for one in found:
        link, workers, size = one["cell"]
        runs = one["runs"]
        for allowed, (text, own, share) in one["choices"].items():
            same = [name for name in runs if name != LIMIT and risk_of(laconic.strategy(name)).option == own]
            best = min(same, key=lambda name: runs[name]["measured"])
            rows.append(
                {
                    "link": link,
                    "workers": workers,
                    "model": size,
                    "allowed": allowed,
                    "choice": text,
                    "share, predicted": f"{share:.2f}",
                    "share, measured": f"{runs[LIMIT]['measured'] / runs[text]['measured']:.2f}",
                    "best of its class": best,
                    "rate against it": f"{runs[best]['measured'] / runs[text]['measured']:.3f}",
                }
            )
    return rows


def main() -> None:
    """Two tables; each cell is kept as it is finished, and `--resume` goes on from there."""
    found = json.loads(CELLS.read_text()) if "--resume" in sys.argv and CELLS.exists() else []
    done = {tuple(one["cell"]) for one in found}
    for cell in [Cell(link, workers, size) for link in LINKS for workers in WORKERS for size in SIZES]:
        if tuple(cell) not in done:
            found.append(run_cell(cell))
            CELLS.write_text(json.dumps(found, indent=1) + "\n")
            print(cell, {name: f"{run['predicted'] / run['measured'] - 1:+.0%}" for name, run in found[-1]["runs"].items()})
    rows = counted(found)
    off = [abs(run["predicted"] / run["measured"] - 1) for one in found for name, run in one["runs"].items() if name != LIMIT]
    middle, near = statistics.median(off), sum(each <= 0.2 for each in off) / len(off)
    legend = (
        f"{len(off)} cells: median error {middle:.1%}, {near:.0%} of them within 20 %, worst {max(off):.0%}. Predicted before "
        "each run from a few steps without communication, encoding and the hosts' collectives timed here, and the link's text. "
        f"Constants were fitted to {FITTED}, which are not here."
    )
    ratios = [Ratio("median error of the cost model", middle, 0.2)]
    report("advisor", "The cost model against the lab", rows, legend, ratios)
    picked = chosen_rows(found)
    behind = [float(str(row["rate against it"])) for row in picked]
    good = sum(each >= 0.95 for each in behind)
    legend = f"{len(picked)} choices; {good} within 5 % of the best of their class, least {min(behind):.3f}."
    report("advisor_choices", "The advisor's choice beside the best of its class", picked, legend)


if __name__ == "__main__":
    if "--advising" in sys.argv:
        _, _, link_, workers_, size_, probe_ = sys.argv
        advising(Cell(link_, int(workers_), size_), probe_)
    else:
        main()
