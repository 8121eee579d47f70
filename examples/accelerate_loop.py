"""Accelerate under a strategy: prepare, then attach. Checkpoints by `save_state` and `load_state`, exact on every rank.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py checkpoints
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py checkpoints --resume

About 6 seconds each on 2 cores. Look at the bytes beside those of ddp(), and at the held-out loss: the second command goes on
from a checkpoint in the middle of a period, and ends in the same loss, digit for digit. With GPUs, `accelerate launch` starts
it as well; this has not been tried on one.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic
from laconic.integrations.accelerate import attach


def data(seed, samples):
    """A task that a small network can learn: which of ten directions is the largest."""
    directions = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x @ directions.T).argmax(1))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", help="for the checkpoint")
    options.add_argument("--strategy", default="diloco(16, warmup=20)", help="any strategy")
    options.add_argument("--steps", type=int, default=120)
    options.add_argument("--resume", action="store_true", help="from the folder's checkpoint")
    given = options.parse_args()

    same_order = DataLoaderConfiguration(use_seedable_sampler=True)  # a shuffled loader resumes in the order that it had
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=same_order)
    set_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data(1, 32 * 2 * 2 * given.steps), batch_size=32, shuffle=True)
    held_out = DataLoader(data(2, 512), batch_size=64)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

    with attach(accelerator, model, optimizer, given.strategy) as run:  # the one new line
        checkpoint = Path(given.folder, "checkpoint")
        if given.resume:
            accelerator.load_state(str(checkpoint))
        batches = accelerator.skip_first_batches(loader, 2 * run.step) if run.step else loader
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and run.step == given.steps // 2 + 3:  # in the middle of a period
                accelerator.save_state(str(checkpoint))

        model.eval()
        with torch.no_grad(), run.consensus():  # the averaged model
            losses = [nn.functional.cross_entropy(model(x), y, reduction="none") for x, y in held_out]
        loss = accelerator.gather(torch.cat(losses)).mean().item()
    stats = run.stats()
    plain = laconic.predict("ddp()", model, world_size=accelerator.num_processes, steps=stats.steps).wire_bytes
    accelerator.print(f"{given.strategy}: {stats.steps} steps, {stats.wire_bytes:,} bytes; ddp() sends {plain:,}")
    accelerator.print(f"held-out loss {loss:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
