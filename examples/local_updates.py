"""Local updates: replicas make their steps alone, and are averaged every few steps. Four ways to do so, beside ddp().

    torchrun --standalone --nproc-per-node 2 examples/local_updates.py

About 7 seconds on 2 cores. Look at the bytes, and at the two losses in the middle of a period: a replica of its own is worse
than the average of all. That average, inside of `run.consensus()`, is the model to evaluate and to save.
Other strategies are given behind the script: examples/local_updates.py "slowmo(12, warmup=20)"
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic

STRATEGIES = [
    "ddp()",
    "local_sgd(16, warmup=20)",  # the mean of the parameters
    "diloco(16, warmup=20)",  # an outer optimizer takes the mean of how far replicas came
    "diloco(16, warmup=20, reducer=Quantized(8))",  # and that in 8 bits
    "local_adam(warmup=20)",  # for Adam: more often, in 1.6 bits
]
STEPS = 206  # ends in the middle of a period


def data() -> tuple[Tensor, Tensor]:
    """The source text of Python's standard library, as bytes: to train on, and the end of it held out."""
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return numbers[:-200_000], numbers[-200_000:]


def batch(text: Tensor, draw: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Eight bytes, and the one that follows."""
    windows = text[torch.randint(len(text) - 9, (size, 1), generator=draw) + torch.arange(9)].long()
    return windows[:, :8], windows[:, 8]


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return nn.functional.cross_entropy(net(x), y).item()


def train(strategy: str, text: Tensor, held_out: Tensor) -> tuple[laconic.Stats, int, float, float]:
    """What was sent, the bytes that ddp() would send, and the held-out loss of this rank's replica and of the average."""
    torch.manual_seed(1337)
    draw = torch.Generator().manual_seed(dist.get_rank())
    looks = batch(held_out, torch.Generator().manual_seed(0), 4096)
    net = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    with laconic.attach(model, optimizer, strategy) as run:
        for _ in range(STEPS):
            x, y = batch(text, draw)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats, own = run.stats(), loss_of(net, *looks)
        with run.consensus():  # all ranks together; after it, each has its own replica again
            average = loss_of(net, *looks)
    plain = laconic.predict("ddp()", net, world_size=dist.get_world_size(), steps=STEPS).wire_bytes
    return stats, plain, own, average  # after the block, all replicas are equal


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text, held_out = data()
    if dist.get_rank() == 0:
        print(f"{'strategy':44} {'syncs':>5} {'kB a step':>9} {'of ddp()':>9} {'loss: one replica':>18} {'average':>8}")
    for strategy in sys.argv[1:] or STRATEGIES:
        stats, plain, own, average = train(strategy, text, held_out)
        if dist.get_rank() == 0:
            less = f"1/{plain / stats.wire_bytes:.1f}"
            sent = stats.wire_bytes_per_step / 1e3
            print(f"{strategy:44} {stats.syncs:5} {sent:9.1f} {less:>9} {own:18.3f} {average:8.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
