"""What `laconic new-task` writes. Here alone, so that the command doesn't wait for torch."""

TEMPLATE = '''"""A task for `laconic compare {name}`: what is trained. The lab calls these functions in every worker."""

import torch
from torch import nn


def model():
    """A new model. torch's generator has been seeded: all workers and all strategies begin with the same weights."""
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(rank, world, seed):
    """This worker's batches, without an end; the same seed and rank must give the same batches."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        yield torch.randn(64, 32, generator=draw)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch), batch.argmax(1))


def evaluate(model):
    """The loss on data that nobody trains on; called after model.eval(), under torch.no_grad(). You may leave this out."""
    held_out = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    return loss(model, held_out).item()


def schedule(optimizer, steps):
    """How the learning rate moves over a run of so many steps. You may leave this out: then it is constant."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


# def warm(model, optimizer):
#     """Begin with a model that is trained already. Without this, `laconic compare --warm 500` trains one for you, once."""
#     model.load_state_dict(torch.load("model.pt"))
'''
