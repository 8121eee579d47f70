"""A script as it is: a small GPT under DistributedDataParallel, in which nothing is laconic's. `laconic run` adds the strategy.

    laconic run --strategy "int8()" --nproc-per-node 2 examples/gpt.py --steps 60

About 8 seconds on 2 cores. Look at the line that begins with `laconic:`, which says what is attached and how many bytes it
sends, and at the loss, beside that of the plain script. With `--link 100mbit`, each process is behind a slow link of its own.

    torchrun --standalone --nproc-per-node 2 examples/gpt.py --steps 60
"""

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 128, 4, 4, 64, 8  # 0.8 million parameters; a batch is of one process


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(data: Tensor, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    windows = data[torch.randint(len(data) - CONTEXT - 1, (size, 1), generator=draw) + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    torch.set_num_threads(1)
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    kept, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    model = DistributedDataParallel(GPT())
    decayed, others = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, steps // 20)) * (0.55 + 0.45 * math.cos(math.pi * (step / steps)))
    )
    draw = torch.Generator().manual_seed(rank)
    seconds, began = 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        model(*batch(kept, BATCH, draw)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        if step % 20 == 0:
            seconds += time.perf_counter() - began
            if rank == 0:
                fixed = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    looks = [model.module(*batch(held_out, 32, fixed)).item() for _ in range(4)]
                print(f"step {step} seconds {seconds:.2f} loss {sum(looks) / 4:.4f}", flush=True)
            dist.barrier()
            began = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
