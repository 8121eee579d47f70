"""Models whose parameters have a leading dimension of workers: what one worker computes never touches another's."""

import math
from functools import cache
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (everybody's name for it)

from laconic.lab.tasks import library

Parameters: TypeAlias = dict[str, Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs and labels, of all workers


class Model(Protocol):
    """What the simulation needs of a model."""

    def start(self, seed: int) -> Parameters:
        """Parameters of one worker."""
        ...

    def batch(self, draw: torch.Generator, workers: int, size: int) -> Batch:
        """A batch for each worker."""
        ...

    def held_out(self) -> Batch:
        """One batch that nobody trains on, for one worker."""
        ...

    def losses(self, p: Parameters, batch: Batch) -> Tensor:
        """The loss of each worker."""
        ...


class Transformer:
    """A byte-level transformer that reads the source text of Python's standard library, as the lab's `bytes-gpt` does."""

    CONTEXT, HEADS = 64, 4

    def __init__(self, width: int, layers: int) -> None:
        self.width, self.layers = width, layers

    def start(self, seed: int) -> Parameters:
        draw, width = torch.Generator().manual_seed(seed), self.width
        p: Parameters = {
            "bytes": 0.3 * torch.randn(256, width, generator=draw),
            "places": 0.3 * torch.randn(self.CONTEXT, width, generator=draw),
        }
        for layer in range(self.layers):
            p |= _norm(f"{layer}.first", width) | _norm(f"{layer}.second", width)
            for name, inputs, outputs in (("mix", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1)):
                p |= _linear(f"{layer}.{name}", inputs * width, outputs * width, draw)
        return p | _norm("norm", width) | _linear("head", width, 256, draw)

    def batch(self, draw: torch.Generator, workers: int, size: int) -> Batch:
        return self._windows(_texts()[0], (workers, size), draw)

    def held_out(self) -> Batch:
        return self._windows(_texts()[1], (1, 128), torch.Generator().manual_seed(7))

    def _windows(self, text: Tensor, shape: tuple[int, int], draw: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - self.CONTEXT - 1, shape, generator=draw)
        windows = text[starts[..., None] + torch.arange(self.CONTEXT + 1)].long()
        return windows[..., :-1], windows[..., 1:]

    def losses(self, p: Parameters, batch: Batch) -> Tensor:
        inputs, labels = batch
        workers, size, context = inputs.shape
        width, heads = self.width, self.HEADS
        places = (256 * torch.arange(workers))[:, None, None]
        x = F.embedding(inputs + places, p["bytes"].reshape(-1, width)) + p["places"][:, None]
        x = x.reshape(workers, size * context, width)
        for layer in range(self.layers):
            mixed = _apply(p, f"{layer}.mix", _normed(p, f"{layer}.first", x))
            q, k, v = mixed.view(workers * size, context, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
            x = x + _apply(p, f"{layer}.out", seen)
            x = x + _apply(p, f"{layer}.down", F.gelu(_apply(p, f"{layer}.up", _normed(p, f"{layer}.second", x))))
        return _cross_entropy(_apply(p, "head", _normed(p, "norm", x)), labels)


class Digits:
    """A network of three layers on scikit-learn's digits."""

    SIZES = (64, 128, 64, 10)

    def start(self, seed: int) -> Parameters:
        draw, p = torch.Generator().manual_seed(seed), Parameters()
        for layer, (inputs, outputs) in enumerate(zip(self.SIZES, self.SIZES[1:], strict=False)):
            p |= _linear(str(layer), inputs, outputs, draw)
        return p

    def batch(self, draw: torch.Generator, workers: int, size: int) -> Batch:
        (images, labels), _ = _digits()
        chosen = torch.randint(len(labels), (workers, size), generator=draw)
        return images[chosen], labels[chosen]

    def held_out(self) -> Batch:
        _, (images, labels) = _digits()
        return images[None], labels[None]

    def losses(self, p: Parameters, batch: Batch) -> Tensor:
        x, labels = batch
        for layer in range(len(self.SIZES) - 1):
            x = _apply(p, str(layer), F.relu(x) if layer else x)
        return _cross_entropy(x, labels)


def _linear(name: str, inputs: int, outputs: int, draw: torch.Generator) -> Parameters:
    weight = (2 * torch.rand(outputs, inputs, generator=draw) - 1) / math.sqrt(inputs)
    return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(outputs)}


def _norm(name: str, width: int) -> Parameters:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def _apply(p: Parameters, name: str, x: Tensor) -> Tensor:
    return torch.baddbmm(p[f"{name}.bias"][:, None], x, p[f"{name}.weight"].transpose(1, 2))


def _normed(p: Parameters, name: str, x: Tensor) -> Tensor:
    return torch.addcmul(p[f"{name}.bias"][:, None], F.layer_norm(x, x.shape[-1:]), p[f"{name}.weight"][:, None])


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), reduction="none")
    return losses.view(len(labels), -1).mean(1)


@cache
def _texts() -> tuple[Tensor, Tensor]:
    text = library()
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


@cache
def _digits() -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return (images[:-400], labels[:-400]), (images[-400:], labels[-400:])


MODELS: dict[str, Model] = {
    "transformer 140k": Transformer(64, 2),
    "transformer 470k": Transformer(128, 2),
    "digits": Digits(),
}
