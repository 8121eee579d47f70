"""A small GPT on the source text of Python's standard library: a DDP script as people write them, without laconic.

torchrun --standalone --nproc-per-node 4 examples/gpt.py
laconic run --strategy "int8()" --nproc-per-node 4 examples/gpt.py
laconic run --strategy "int8()" --link 100mbit --nproc-per-node 4 examples/gpt.py     # a rehearsal of a slow link
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


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        q, k, v = (part.view(batch, time_, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time_, width)
        x = x + self.proj(mixed)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(data: Tensor, size: int, context: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - context - 1, (size,), generator=draw).tolist()
    windows = torch.stack([data[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="sequences a process")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--every", type=int, default=20, help="steps between two looks at the held-out loss")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    torch.set_num_threads(1)
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    kept, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    model = DistributedDataParallel(GPT(options.width, options.layers, options.width // 32, options.context))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    warmup = max(1, options.steps // 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / options.steps))),
    )
    draw = torch.Generator().manual_seed(rank)
    seconds, began = 0.0, time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = model(*batch(kept, options.batch, options.context, draw))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        if step % options.every == 0:
            seconds += time.perf_counter() - began
            if rank == 0:
                fixed = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    looks = [model.module(*batch(held_out, 32, options.context, fixed)).item() for _ in range(4)]
                print(f"step {step} seconds {seconds:.2f} loss {sum(looks) / 4:.4f}", flush=True)
            dist.barrier()
            began = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
