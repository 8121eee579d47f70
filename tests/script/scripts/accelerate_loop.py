"""An Accelerate script: the loop of its quick tour."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(out: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    inputs = torch.randn(512, 20)
    data = TensorDataset(inputs, inputs[:, :5].argmax(1))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=16)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=16, shuffle=True), scheduler
    )
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()
    torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(out, f"final-{accelerator.process_index}.pt"))


if __name__ == "__main__":
    main(sys.argv[1])
