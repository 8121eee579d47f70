"""Steps a second behind links of several rates: torch's hooks, torchft, accelerate and ours, beside a run that never talks."""

import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import peers
from benchmarks.harness import Timing, ratio, report
from laconic.lab.link import Link, parse, sent_bytes, start
from laconic.lab.tasks import BytesGPT

HOSTS, ROUNDS, SIZE = 4, 6, "1m"
LINKS = {"none": 12, "1gbit": 12, "100mbit": 8, "10mbit": 3}  # and the steps a block of those that talk in every step
# torchft in processes of its own: its heartbeats would be on the others' cable.
GROUPS: dict[str, Mapping[str, peers.Making]] = {
    "torch": {**peers.LIMIT, **peers.TORCH, **peers.ACCELERATE, **peers.OURS},
    "torchft": {**peers.LIMIT, **peers.TORCHFT},
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


def host(group: str, few: int) -> None:
    """All of a group, block by block in turn, as one of the hosts."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    batches = BytesGPT(SIZE).batches(dist.get_rank(), HOSTS, 0)
    everyone = trainees(group)
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    sent: dict[str, list[int | None]] = {name: [] for name in everyone}
    working = {name: one for name, one in everyone.items() if not isinstance(one, str)}
    for round_ in range(ROUNDS + 1):  # the first is for buckets, caches and warm starts
        for name, one in working.items():
            steps = few if one.period == 1 and name != peers.SILENT else peers.PERIOD
            if round_ == 0:
                steps = one.warm if one.period > 1 else max(3, few // 2)
            dist.barrier()
            before, began = sent_bytes(), time.perf_counter()
            for _ in range(steps):
                one.step(next(batches))
            dist.barrier()
            passed, after = time.perf_counter() - began, sent_bytes()
            if round_:
                seconds[name].append(passed / steps)
                sent[name].append(None if before is None or after is None else (after - before) // steps)
    if dist.get_rank() == 0:
        errors = {name: one for name, one in everyone.items() if isinstance(one, str)}
        print(json.dumps({"seconds": seconds, "sent": sent, "errors": errors}), flush=True)
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
    answers = [line for line in output.splitlines() if line.startswith('{"seconds"')]
    if not answers:
        raise SystemExit(f"{link}, {group}: the hosts ended with {process.returncode}:\n{output[-3000:]}")
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def row(name: str, silent: Timing, mine: Timing, sent: list[int | None]) -> dict[str, object]:
    """One line of a table."""
    cable = [count for count in sent if count is not None]
    share = 1 / ratio(name, mine, silent).value
    return {
        "": name,
        "ms a step, best": f"{mine.best * 1e3:.0f}",
        "median": f"{mine.median * 1e3:.0f}",
        "share of the silent rate, best": f"{silent.best / mine.best:.3f}",
        "median of rounds": f"{share:.3f}",
        "+-": f"{share * ratio(name, mine, silent).noise:.3f}",
        "kB": f"{statistics.median(cable) / 1e3:.1f}" if cable else "",
    }


def main() -> None:
    """One table a link."""
    for text, few in LINKS.items():
        rows, ratios = [], []
        for group in GROUPS:
            found = measure(parse(text), group, few)
            timings = {name: Timing(seconds) for name, seconds in found["seconds"].items() if seconds}
            silent = timings[peers.SILENT]
            for name, mine in timings.items():
                if group == "torch" or name != peers.SILENT:
                    rows.append(row(name, silent, mine, found["sent"][name]))
                if name.startswith("laconic") and name != peers.SILENT:
                    ratios.append(ratio(f"{name}, time over the silent run's", mine, silent))
            rows += [{**dict.fromkeys(rows[0], ""), "": name, "kB": error} for name, error in found["errors"].items()]
        legend = (
            f"Byte-level transformer of 0.86 million parameters, AdamW, {HOSTS} processes on one machine, link: {text}"
            f"{'' if text == 'none' else ' each (network namespaces, tbf both ways)'}. 'share': the time of a run that never "
            f"talks over this one's: of the best blocks, and the median of {ROUNDS} interleaved rounds, +- its standard error. "
            f"'kB': what the kernel counted on the first process's cable, a step. Those with a number averaged every "
            f"{peers.PERIOD} steps. torchft ran in processes of its own, beside a silent run of its own."
        )
        report(f"rates-{text}", f"Step rate, link: {text}", rows, legend, ratios)


if __name__ == "__main__":
    host(sys.argv[2], int(sys.argv[3])) if "--host" in sys.argv else main()
