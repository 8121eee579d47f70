"""Optimizers and loss scales: hooks of a user's on `state_dict`, and what a GradScaler holds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic._torch.private_names import part


def loss_scale(scaler: torch.amp.GradScaler) -> Callable[[], float | Tensor]:
    """What reads the loss scale, without waiting for an accelerator."""
    scale: Callable[[], float | Tensor] = part(scaler, "_get_scale_async")
    return scale


def scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    """The loss scale and the steps since it last changed; none before the scaler was first used."""
    found = {"scale": part(scaler, "_scale"), "growth": part(scaler, "_growth_tracker")}
    return {name: tensor for name, tensor in found.items() if tensor is not None and found["scale"] is not None}


_HOOKS = {
    "state_dict_pre": "_optimizer_state_dict_pre_hooks",
    "state_dict_post": "_optimizer_state_dict_post_hooks",
    "load_state_dict_pre": "_optimizer_load_state_dict_pre_hooks",
    "load_state_dict_post": "_optimizer_load_state_dict_post_hooks",
}


def state_dict_hooks(optimizer: Optimizer, when: str) -> list[Callable[..., Any]]:
    """Hooks of a user's on `state_dict` or `load_state_dict`; `when` is a key of the table above."""
    return list(part(optimizer, _HOOKS[when]).values())
