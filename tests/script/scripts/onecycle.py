"""OneCycleLR, clipping, two parameter groups, and an evaluation on the way."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train(rank: int) -> Net:
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net)
    groups = [{"params": net.body.parameters(), "weight_decay": 0.01}, {"params": net.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[5e-3, 2e-2], total_steps=STEPS)
    draw = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(32, 10, generator=draw)
        loss = nn.functional.cross_entropy(ddp(x), (x[:, 0] > x[:, 1]).long())
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 9 and rank == 0:
            net.eval()
            with torch.no_grad():
                right = (net(x).argmax(1) == (x[:, 0] > x[:, 1])).float().mean()
            net.train()
            print(f"step {step}: {right:.2f} right, lr {scheduler.get_last_lr()}")
    return net


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = train(rank)
    dist.destroy_process_group()
    torch.save(net.state_dict(), os.path.join(sys.argv[1], f"final-{rank}.pt"))
