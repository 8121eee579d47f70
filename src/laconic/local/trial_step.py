"""What an optimizer keeps of a parameter, found by a step of another one on trial."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def memory_after_a_step(build: Callable[[Tensor], Optimizer], like: Tensor) -> dict[str, Any]:
    """What an optimizer keeps of a parameter like this from its first step on: one is built, and stepped on zeros."""
    trial = torch.zeros_like(like)
    optimizer = build(trial)
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    return dict(optimizer.state[trial])
