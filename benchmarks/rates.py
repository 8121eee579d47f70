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
from benchmarks.harness import Ratio, median_error, report
from laconic.lab.link import Link, parse, sent_bytes, start
from laconic.lab.tasks import BytesGPT

HOSTS, ROUNDS, SIZE = 4, 7, "1m"
LINKS = {"none": 24, "1gbit": 24, "100mbit": 12, "10mbit": 4}  # and the steps a block of those that talk in every step
COLUMNS = ["ms a step", "share of the silent rate", "+-"]
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


def main() -> None:
    """One table a link."""
    for text, few in LINKS.items():
        rows, ratios = [], []
        for group in GROUPS:
            found = measure(parse(text), group, few)
            silent = found["seconds"][peers.SILENT]
            for name, seconds in found["seconds"].items():
                if name in found["errors"]:
                    rows.append(
                        {"": name, "ms a step": found["errors"][name], "share of the silent rate": "", "+-": "", "kB": ""}
                    )
                    continue
                if group != "torch" and name == peers.SILENT:
                    continue
                shares = [mine / theirs for mine, theirs in zip(silent, seconds, strict=True)]
                share, noise = statistics.median(shares), median_error(shares)
                sent = [count for count in found["sent"][name] if count is not None]
                rows.append(
                    {
                        "": name,
                        "ms a step": f"{statistics.median(seconds) * 1e3:.0f}",
                        "share of the silent rate": f"{share:.3f}",
                        "+-": f"{noise:.3f}",
                        "kB": f"{statistics.median(sent) / 1e3:.1f}" if sent else "",
                    }
                )
                if name.startswith("laconic") and name != peers.SILENT:
                    ratios.append(Ratio(f"{name}, time over the silent run's", 1 / share, noise / share))
        legend = (
            f"Byte-level transformer of 0.86 million parameters, AdamW, {HOSTS} processes on one machine, link: {text}"
            f"{'' if text == 'none' else ' each (network namespaces, tbf both ways)'}. 'share': the time of a run that never "
            f"talks over this one's, median of {ROUNDS} interleaved rounds, +- the standard error of that. 'kB': what the "
            f"kernel counted on the first process's cable, a step. Those with a number averaged every {peers.PERIOD} steps."
        )
        report(f"rates-{text}", f"Step rate, link: {text}", rows, legend, ratios)


if __name__ == "__main__":
    host(sys.argv[2], int(sys.argv[3])) if "--host" in sys.argv else main()
