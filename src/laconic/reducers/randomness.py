"""Randomness that needs no memory: a pure function of (seed, when, name), the same on every rank that asks alike."""

import hashlib

import torch
from torch import Tensor


def number(*key: object) -> int:
    """A 63-bit number drawn by a key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


def normal(shape: tuple[int, ...], device: torch.device, *key: object) -> Tensor:
    """Normally distributed numbers drawn by a key; the user's generators are not touched."""
    return torch.randn(shape, device=device, generator=_generator(device, key))


def uniform(shape: tuple[int, ...], device: torch.device, *key: object) -> Tensor:
    """Numbers from [0, 1) drawn by a key; the user's generators are not touched."""
    return torch.rand(shape, device=device, generator=_generator(device, key))


def _generator(device: torch.device, key: tuple[object, ...]) -> torch.Generator | None:
    if device.type == "meta":  # only shapes are asked for
        return None
    return torch.Generator(device).manual_seed(number(*key))
