"""Saves and resumes by itself, each rank a file of its own."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--die-at", type=int, help="break down before this step")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
file, first = options.out / f"checkpoint-{rank}.pt", 0
if file.exists():
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 26):
    if step == options.die_at:
        os._exit(9)
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, file)
dist.destroy_process_group()
torch.save(model.module.state_dict(), options.out / f"final-{rank}.pt")
