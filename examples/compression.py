"""Compressed gradients: one DDP loop under six strategies, one after another. The loop is the same; what is sent is not.

    torchrun --standalone --nproc-per-node 2 examples/compression.py

About 12 seconds on 2 cores. Look at the bytes, which the strategy fixes, and at the loss beside that of ddp(). The time of a
step says little: two processes of one machine have a fast network, where encoding takes time and fewer bytes save none.
Other strategies are given behind the script: examples/compression.py "sign()" "fp8()"
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

STRATEGIES = ["ddp()", "bf16()", "int8()", "int4()", "topk(ratio=0.02)", "powersgd(rank=4)"]
STEPS = 200


def data() -> tuple[Tensor, Tensor]:
    """The source text of Python's standard library, as bytes: to train on, and the end of it held out."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return numbers[:-200_000], numbers[-200_000:]


def batch(text: Tensor, draw: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Eight bytes, and the one that follows."""
    windows = text[torch.randint(len(text) - 9, (size, 1), generator=draw) + torch.arange(9)].long()
    return windows[:, :8], windows[:, 8]


def train(strategy: str, text: Tensor, held_out: Tensor) -> tuple[float, float, float, float]:
    """kB a step, and those that ddp() would send; the held-out loss; milliseconds a step."""
    torch.manual_seed(1337)
    draw = torch.Generator().manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    with laconic.attach(model, optimizer, strategy) as run:
        for step in range(STEPS):
            if step == 20:  # what is slow at first is over
                began = time.perf_counter()
            x, y = batch(text, draw)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    step_ms = (time.perf_counter() - began) / (STEPS - 20) * 1e3

    x, y = batch(held_out, torch.Generator().manual_seed(0), 4096)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(x), y).item()
    plain = laconic.predict("ddp()", net, world_size=dist.get_world_size()).wire_bytes
    return run.stats().wire_bytes_per_step / 1e3, plain / 1e3, loss, step_ms


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text, held_out = data()
    if dist.get_rank() == 0:
        print(f"{'strategy':20} {'kB a step':>9} {'of ddp()':>9} {'held-out loss':>14} {'ms a step':>10}")
    for strategy in sys.argv[1:] or STRATEGIES:
        sent, plain, loss, step_ms = train(strategy, text, held_out)
        if dist.get_rank() == 0:
            print(f"{strategy:20} {sent:9.1f} {f'1/{plain / sent:.1f}':>9} {loss:14.3f} {step_ms:10.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
