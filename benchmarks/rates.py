"""Steps a second behind links of several rates: torch's hooks, torchft, accelerate and ours, beside no communication."""

import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Timing, compile_all, median_error, ratio, report
from laconic.cost.link import Link, parse
from laconic.lab.link import sent_bytes, start
from laconic.lab.tasks import BytesGPT

HOSTS, ROUNDS, SIZE = 4, 6, "1m"
BESIDE = 8  # steps without communication before and after each block: its own measure, taken at the same time
LINKS = {"none": 12, "1gbit": 12, "100mbit": 8, "10mbit": 3}  # and the steps a block of those that communicate in every step
# torchft in processes of its own: its heartbeats would be on the others' cable.
GROUPS: dict[str, Mapping[str, peers.Making]] = {
    "torch": {**peers.LIMIT, **peers.PLAIN, **peers.TORCH, **peers.ACCELERATE, **peers.OURS},
    "torchft": {**peers.LIMIT, **peers.TORCHFT},
    "compressed": {**peers.LIMIT, **peers.COMPRESSED},
}


def trainees(group: str) -> dict[str, peers.Trainee | str]:
    """All of a group, or the error that one gave."""
    found: dict[str, peers.Trainee | str] = {}
    task = BytesGPT(SIZE)
    for name, make in GROUPS[group].items():
        torch.manual_seed(0)
        try:
            found[name] = make(task.model(), task.optimizer)
        except Exception as error:  # it is named, with its error, in the table
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return found


def block(one: peers.Trainee, batches: Iterator[Tensor], steps: int) -> tuple[float, int | None]:
    """Seconds and bytes of a step, over so many steps that all ranks begin and end together."""
    dist.barrier()
    before, began = sent_bytes(), time.perf_counter()
    for _ in range(steps):
        one.step(next(batches))
    dist.barrier()
    passed, after = time.perf_counter() - began, sent_bytes()
    return passed / steps, None if before is None or after is None else (after - before) // steps


def host(group: str, few: int) -> None:
    """All of a group, block by block in turn, as one of the hosts; a repeat later the turn begins with another one."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    batches = BytesGPT(SIZE).batches(dist.get_rank(), HOSTS, 0)
    everyone = trainees(group)
    working = {name: one for name, one in everyone.items() if not isinstance(one, str)}
    found: dict[str, dict[str, list[Any]]] = {name: {"seconds": [], "beside": [], "sent": []} for name in working}
    for one in working.values():  # buckets, caches and warm starts
        block(one, batches, one.warm if one.period > 1 else max(3, few // 2))
    names = list(working)
    before, _ = block(working[peers.SILENT], batches, BESIDE)
    for round_ in range(ROUNDS):
        first = round_ * len(names) // ROUNDS
        for name in names[first:] + names[:first]:
            one = working[name]
            seconds, sent = block(one, batches, peers.PERIOD if one.period > 1 else few)
            after, _ = block(working[peers.SILENT], batches, BESIDE)
            for key, value in (("seconds", seconds), ("beside", (before + after) / 2), ("sent", sent)):
                found[name][key].append(value)
            before = after
    if dist.get_rank() == 0:
        errors = {name: one for name, one in everyone.items() if isinstance(one, str)}
        print(json.dumps({"found": found, "errors": errors}), flush=True)
    for one in working.values():
        one.stack.close()
    everyone, working = {}, {}
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(link: Link, group: str, few: int) -> dict[str, Any]:
    """Four hosts, one answer."""
    command = [sys.executable, "-m", "benchmarks.rates", "--host", group, str(few)]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with start(command, HOSTS, link, environment) as process:
        output, _ = process.communicate()
    answers = [line for line in output.splitlines() if line.startswith('{"found"')]
    if not answers:
        raise SystemExit(f"{link}, {group}: the hosts ended with {process.returncode}:\n{output[-3000:]}")
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def row(name: str, found: Mapping[str, list[Any]]) -> dict[str, object]:
    """One line of a table."""
    mine, silent = Timing(found["seconds"]), Timing(found["beside"])
    cable = [count for count in found["sent"] if count is not None]
    shares = [a / b for a, b in zip(silent.seconds, mine.seconds, strict=True)]
    return {
        "": name,
        "ms a step": f"{mine.median * 1e3:.0f}",
        "silent, beside it": f"{silent.median * 1e3:.0f}",
        "share of the silent rate": f"{statistics.median(shares):.3f}",
        "+-": f"{median_error(shares):.3f}",
        "best": f"{silent.best / mine.best:.3f}",
        "kB": f"{statistics.median(cable) / 1e3:.1f}" if cable else "",
    }


def main(name: str = "rates", links: Sequence[str] = tuple(LINKS), groups: Sequence[str] = ("torch", "torchft")) -> None:
    """One table a link."""
    compile_all()
    for text in links:
        few, rows, ratios = LINKS[text], [], []
        for group in groups:
            measured = measure(parse(text), group, few)
            for label, found in measured["found"].items():
                if group != "torchft" or label != peers.SILENT:
                    rows.append(row(label, found))
                if label.startswith("laconic") and label != peers.SILENT:
                    timings = Timing(found["seconds"]), Timing(found["beside"])
                    ratios.append(ratio(f"{label}, time over the silent run's", *timings))
            rows += [{**dict.fromkeys(rows[0], ""), "": label, "kB": error} for label, error in measured["errors"].items()]
        legend = (
            f"Byte-level transformer of 0.86 million parameters, AdamW, {HOSTS} processes on one machine, link: {text}"
            f"{'' if text == 'none' else ' each (network namespaces, tbf both ways)'}. 'share': the time of a run that never "
            f"communicates over this one's: the median of {ROUNDS} repeats, each beside the {BESIDE} steps before and after "
            "it that send nothing, +- its standard error; 'best': of the quickest blocks. "
            f"'kB': what the kernel counted on the first process's cable, a step. Those with a number averaged every "
            f"{peers.PERIOD} steps. torchft ran in processes of its own, since its heartbeats are on the cable too."
        )
        report(f"{name}-{text}", f"Step rate, link: {text}", rows, legend, ratios)


if __name__ == "__main__":
    host(sys.argv[2], int(sys.argv[3])) if "--host" in sys.argv else main()
