"""Workers that die, come back and leave while the others train on. Needs torchft: pip install '.[elastic]'

    python examples/elastic.py                       # a lighthouse and three workers here; one is killed, and started again
    python examples/elastic.py --worker a            # one worker, for the lighthouse that $TORCHFT_LIGHTHOUSE names

About 20 seconds on 2 cores. Look at who is there: a and c go on without b, which begins again at their step, and all end with
one loss. What the others print of a broken connection when b is killed is torchft's and gloo's, and is expected.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic import elastic

PERIOD = 16


def data() -> Tensor:
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: Tensor, draw: torch.Generator, size: int = 16) -> tuple[Tensor, Tensor]:
    """Eight bytes, and the one that follows."""
    windows = text[torch.randint(len(text) - 9, (size, 1), generator=draw) + torch.arange(9)].long()
    return windows[:, :8], windows[:, 8]


def work(name: str, steps: int) -> None:
    """One worker: a loop as anybody writes it. A worker that joins later begins at its peers' step."""
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    text, draw = data(), torch.Generator().manual_seed(sum(name.encode()))
    held_out = batch(text, torch.Generator().manual_seed(0), 512)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    manager = elastic.Membership(name=name, timeout_seconds=10)
    with elastic.attach(model, optimizer, f"diloco({PERIOD}, reducer=ErrorFeedback(Quantized(8)))", manager) as run:
        print(f"{name} begins at step {run.step} with {', '.join(run.stats().workers)}", flush=True)
        while run.step < steps:
            time.sleep(0.03)  # stands for a model that takes longer
            version = run.version
            x, y = batch(text, draw)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.version > version and run.step % (4 * PERIOD) == 0:
                with run.consensus(), torch.no_grad():  # the model that all agreed on at the last sync
                    loss = float(nn.functional.cross_entropy(model(held_out[0]), held_out[1]))
                print(f"{name} step {run.step}: loss {loss:.3f}, {', '.join(run.stats().workers)} are there", flush=True)
        stats = run.stats()
        print(
            f"{name} ends: {stats.syncs} syncs, {stats.dropped} dropped, {stats.lost} workers lost, {stats.joined} joined",
            flush=True,
        )


def show(steps: int) -> None:
    """Three workers, of which one is killed and comes back."""

    def start(name: str, address: str, **options: int) -> "subprocess.Popen[str]":
        command = [sys.executable, __file__, "--worker", name, "--steps", str(steps)]
        return subprocess.Popen(command, env={**os.environ, "TORCHFT_LIGHTHOUSE": address}, text=True, **options)

    with elastic.lighthouse(heartbeat_seconds=1.0, deadline_seconds=5.0) as address:
        workers = {"a": start("a", address), "b": start("b", address, stdout=subprocess.PIPE), "c": start("c", address)}
        try:
            for line in workers["b"].stdout:
                print(line, end="", flush=True)
                if "loss" in line:
                    workers["b"].kill()  # as when a machine is lost
            print("b was killed", flush=True)
            time.sleep(1)
            workers["b"] = start("b", address)
            for worker in workers.values():
                worker.wait()
        finally:
            for worker in workers.values():
                worker.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help="be this worker, instead of starting three")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    work(options.worker, options.steps) if options.worker else show(options.steps)
