"""Mixed precision with autocast and a GradScaler; the loss of one rank overflows once."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
draw = torch.Generator().manual_seed(7 + rank)
for step in range(options.steps):
    x = torch.randn(16, 12, generator=draw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x).float(), x[:, :3].argmax(1))
    if step == 9 and rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.4f}, scale {scaler.get_scale()}")
dist.destroy_process_group()
torch.save(model.module.state_dict(), f"{options.out}/final-{rank}.pt")
