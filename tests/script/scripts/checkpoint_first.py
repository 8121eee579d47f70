"""Saves on rank 0 alone; all ranks resume from that file."""

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
net = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 4))
file, first = options.out / "checkpoint.pt", 0
saved = torch.load(file, map_location="cpu") if file.exists() else None
if saved is not None:
    net.load_state_dict(saved["model"])
    first = saved["step"]
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if saved is not None:
    optimizer.load_state_dict(saved["optimizer"])
for step in range(first, 26):
    if step == options.die_at:
        os._exit(9)
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, file)
        dist.barrier()
dist.destroy_process_group()
torch.save(net.state_dict(), options.out / f"final-{rank}.pt")
