"""Gradient accumulation with no_sync, and the optimizer built before the DDP."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 4

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
model = DistributedDataParallel(network)
draw = torch.Generator().manual_seed(100 + rank)
for _ in range(24):
    for part in range(ACCUMULATE):
        x = torch.randn(8, 16, generator=draw)
        last = part == ACCUMULATE - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = (model(x)[:, 0] - x.sum(1).sin()).square().mean() / ACCUMULATE
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if rank == 0:
    print(f"loss {loss.item():.4f}")
dist.destroy_process_group()
torch.save(model.module.state_dict(), os.path.join(sys.argv[1], f"final-{rank}.pt"))
