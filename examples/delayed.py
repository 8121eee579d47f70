"""Delayed averaging: an exchange stays outstanding for some steps, and training goes on meanwhile. With and without, in pairs.

    torchrun --standalone --nproc-per-node 2 examples/delayed.py

About 17 seconds on 2 cores. Look at the seconds, beside those of silent(), which sends nothing. The ranks pause in turn here,
as a rank does that logs or reads a slow disk. At a blocking sync the other rank waits for it. A delay of 6 steps hides the
pause, one of 2 steps a part of it. Then look at the loss. On a slow link a blocking sync waits for the wire as well; `laconic
compare --link 20mbit` emulates one.
"""

import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic

WARMUP, STEPS = 32, 128
STRATEGIES = [  # in pairs: blocking, and outstanding for some steps
    "silent()",
    f"diloco(8, warmup={WARMUP}, reducer=Quantized(8))",
    f"streaming_diloco(8, warmup={WARMUP}, fragments=1, delay=6, blend=0.0, carry=True)",
    f"local_adam(warmup={WARMUP})",
    f"local_adam(warmup={WARMUP}, delay=2)",
]


def data() -> tuple[Tensor, Tensor]:
    """The source text of Python's standard library, as bytes: to train on, and the end of it held out."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return numbers[:-200_000], numbers[-200_000:]


def batch(text: Tensor, draw: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Eight bytes, and the one that follows."""
    windows = text[torch.randint(len(text) - 9, (size, 1), generator=draw) + torch.arange(9)].long()
    return windows[:, :8], windows[:, 8]


def train(strategy: str, text: Tensor, held_out: Tensor) -> tuple[float, float]:
    """Seconds after the warm-up, and the held-out loss."""
    torch.manual_seed(1337)
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    with laconic.attach(model, optimizer, strategy):
        for step in range(WARMUP + STEPS):
            if step == WARMUP:
                dist.barrier()
                began = time.perf_counter()
            time.sleep(0.05 if step % 16 == 8 * rank + 4 else 0.01)  # a pause; a model that takes longer
            x, y = batch(text, draw)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began

    x, y = batch(held_out, torch.Generator().manual_seed(0), 4096)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(x), y).item()
    return seconds, loss


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text, held_out = data()
    if dist.get_rank() == 0:
        print(f"{'strategy':82} {'seconds':>8} {'held-out loss':>14}")
    for strategy in sys.argv[1:] or STRATEGIES:
        seconds, loss = train(strategy, text, held_out)
        if dist.get_rank() == 0:
            print(f"{strategy:82} {seconds:8.2f} {loss:14.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
