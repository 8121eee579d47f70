"""Training that survives the loss of a worker: under torchrun it resumes from the newest checkpoint by itself.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py checkpoints --kill-at 33

About 10 seconds on 2 cores. Look at the step from which they go on, and at the weights of the end: they are those of a run that
nobody disturbs. After step 33 a worker kills itself (kill -9), which the other one reports with a traceback, and torchrun
starts both again. (Without the variable torch 2.13's agent keeps one store for all restarts, where gloo finds the addresses of
the dead.)

    torchrun --standalone --nproc-per-node 2 examples/resume.py undisturbed
"""

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic


def batch(rank, step):
    """What a rank sees in a step: a function of both, so that a resumed loader goes on where it was."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    return x, x.roll(1, dims=1).tanh()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkpoints", help="directory for checkpoints, seen by all ranks")
    options.add_argument("--strategy", default="diloco(8, reducer=Quantized(8))", help="any strategy")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    options.add_argument("--asynchronous", action="store_true", help="write checkpoints while training goes on")
    options.add_argument("--kill-at", type=int, help="after this step the last rank kills itself, once")
    given = options.parse_args()

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank + 1)  # dropout differs by rank

    with laconic.attach(model, optimizer, given.strategy) as run:
        if laconic.checkpoint.latest(given.checkpoints):  # 1
            laconic.checkpoint.load(given.checkpoints, run=run)  # 2
            if rank == 0:
                print(f"goes on from step {run.step}", flush=True)
        while run.step < given.steps:
            x, y = batch(rank, run.step)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step % given.every == 0:
                laconic.checkpoint.save(given.checkpoints, run=run, asynchronous=given.asynchronous)  # 3
            if run.step == given.kill_at and rank == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                print(f"rank {rank} is killed after step {run.step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    digest = hashlib.sha256(b"".join(bytes(p.detach().view(-1).view(torch.uint8).tolist()) for p in model.parameters()))
    if rank == 0:
        print(f"{run.strategy}: {given.steps} steps, weights {digest.hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
