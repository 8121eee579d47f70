"""Does the wire work while the cores compute? Steps a second behind 100 Mbit/s links, beside a run that never talks.

Four hosts train a byte-level transformer on the source text of Python's standard library.
"""

import json
import math
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import report
from benchmarks.hosts import plug_in, run_on_hosts

HOSTS, RATE_MBIT = 4, 100
WIDTH, LAYERS, CONTEXT, BATCH = 232, 3, 64, 8
STREAMING = "streaming_diloco(24, fragments=4, delay=2, blend=0.0, outer_lr=1.0, outer_momentum=0.2)"
BLOCKING = "diloco(24, outer_lr=1.0, outer_momentum=0.2)"
# One after the other, and the run that never talks at both ends: the machine's own drift is seen.
RUNS = [("silent()", 96), (STREAMING, 240), (BLOCKING, 240), ("ddp()", 240), ("silent()", 96)]


class Block(nn.Module):
    """Attention, then two layers, both on normed inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norms[0](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Transformer(nn.Module):
    """2.1 million parameters, bytes in, bytes out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, window: Tensor) -> Tensor:
        x = self.bytes(window[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def text() -> Tensor:
    """Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def windows(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random pieces of the text."""
    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


def train(rank: int, strategy: str, steps: int, seed: int = 0) -> dict[str, object]:
    """Seconds a step from the first to the last, and what the model has learnt."""
    data = text()
    kept, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    torch.manual_seed(seed)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    run = laconic.attach(model, optimizer, strategy)
    with run:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            model(windows(kept, BATCH, draw)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        dist.barrier()
        seconds = time.perf_counter() - start
        stats = run.stats()
    with torch.no_grad():
        fixed = torch.Generator().manual_seed(7)
        loss = sum(model.module(windows(held_out, 64, fixed)).item() for _ in range(12)) / 12
    return {
        "strategy": strategy,
        "seconds": seconds / steps,
        "loss": loss,
        "bytes": stats.wire_bytes / steps,
        "wait": (stats.wait_seconds or 0) / steps,
    }


def host(rate_mbit: int, out: str) -> None:
    """All runs, as one of the hosts."""
    plug_in(rate_mbit)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for strategy, steps in RUNS:
        rows.append(train(dist.get_rank(), strategy, steps))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
            Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Four hosts, one table."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run_on_hosts("benchmarks.overlap", HOSTS, RATE_MBIT, file.name)
        rows = json.loads(Path(file.name).read_text())
    tell(rows)


def tell(rows: list[dict[str, Any]]) -> None:
    """The table."""
    limit = min(row["seconds"] for row in rows if row["strategy"] == "silent()")
    plain = next(row["loss"] for row in rows if row["strategy"] == "ddp()")
    table = [
        {
            "strategy": row["strategy"],
            "ms a step": f"{row['seconds'] * 1e3:.0f}",
            "share of silent's rate": f"{limit / row['seconds']:.3f}",
            "wait, ms a step": f"{row['wait'] * 1e3:.1f}",
            "kB a step": f"{row['bytes'] / 1e3:.0f}",
            "validation loss": f"{row['loss']:.4f}" if row["strategy"] != "silent()" else "",
            "loss, relative": f"{row['loss'] / plain:.4f}" if row["strategy"] != "silent()" else "",
        }
        for row in rows
    ]
    legend = (
        f"A byte-level transformer of 2.1 million parameters, {HOSTS} hosts in network namespaces behind {RATE_MBIT} Mbit/s "
        f"links (tbf both ways, burst 256 KB), all on two cores; batch {BATCH} x {CONTEXT} a host, {dict(RUNS)['ddp()']} "
        "steps, one seed. 'share': the step time of the faster of the two runs that never talk, divided by this one's. Loss on "
        "held-out text, of the averaged model."
    )
    report("overlap", "Steps a second behind slow links", table, legend)


if __name__ == "__main__":
    host(int(sys.argv[2]), sys.argv[3]) if "--host" in sys.argv else main()
