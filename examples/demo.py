"""ddp() against bf16(): the same model and data, two processes, bytes counted as they leave.

Run it with `make demo`, or `python examples/demo.py`; each strategy runs under torchrun, as a user's script would.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, WORKERS = 150, 2
STRATEGIES = ["ddp()", "bf16()"]


def train(text: str) -> None:
    """A small network learns to tell which of its inputs is the largest."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import laconic

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 32))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    predicted = laconic.predict(text, model, world_size=dist.get_world_size())
    batches = torch.Generator().manual_seed(1 + dist.get_rank())

    with laconic.attach(model, optimizer, text) as run:
        for _ in range(STEPS):
            inputs = torch.randn(64, 32, generator=batches)
            loss = nn.functional.cross_entropy(model(inputs), inputs.argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if dist.get_rank() == 0:
        held_out = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            final = nn.functional.cross_entropy(model.module(held_out), held_out.argmax(1)).item()
        stats = run.stats()
        row = {"counted": stats.wire_bytes // stats.steps, "predicted": predicted.wire_bytes, "loss": final}
        Path(os.environ["DEMO_RESULT"]).write_text(json.dumps(row))


def worker(text: str) -> None:
    """One process. It lets go of the model before the process group ends: so gloo's threads end before Python does."""
    import gc

    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(text)
    gc.collect()
    dist.destroy_process_group()


def compare() -> None:
    """Run every strategy in processes of its own and print the table."""
    rows = {}
    for text in STRATEGIES:
        print(f"training with {text} on {WORKERS} processes ...", flush=True)
        with tempfile.NamedTemporaryFile() as result:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={WORKERS}",
                __file__,
                text,
            ]
            environment = {**os.environ, "DEMO_RESULT": result.name, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment)
            rows[text] = json.loads(Path(result.name).read_text())
    base = rows[STRATEGIES[0]]
    print(f"\n{'strategy':<10}{'wire bytes a step':>20}{'predicted':>12}{'against ddp':>13}{'held-out loss':>15}")
    for text, row in rows.items():
        share = row["counted"] / base["counted"]
        print(f"{text:<10}{row['counted']:>20,}{row['predicted']:>12,}{share:>12.2f}x{row['loss']:>15.4f}")
    print("\nBytes are per rank: what it must put on the cable for its collectives.")
    print(f"{STEPS} steps, {WORKERS} processes, seed 0, no limit on the link: this shows bytes and loss, not speed.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(sys.argv[1])
    else:
        compare()
