"""What is trained in a comparison: the built-in tasks."""

import math
import sysconfig
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from laconic.lab.file_task import FileTask


class Task(Protocol):
    """What a comparison needs to know: seven functions, the last three of which may be missing in a user's file.

    The same seed must give the same weights and the same batches: torch's generator is seeded before `model` is called, and
    `batches` is told seed and rank.
    """

    name: str
    warm_steps: int  # of ddp(), in which a comparison begins unless it is told another number

    def model(self) -> nn.Module:
        """A new model."""
        ...

    def optimizer(self, model: nn.Module) -> Optimizer:
        """An optimizer over its parameters."""
        ...

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Any]:
        """This rank's batches, without an end."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of one batch."""
        ...

    def evaluate(self, model: nn.Module) -> float:
        """The loss on data that nobody has trained on."""
        ...

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """A learning-rate schedule over so many steps; its `step()` is called after each. None: the rate is constant."""
        ...

    def warm(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Bring a new model, and its optimizer's memory, to where training begins, such as from a checkpoint."""
        ...


def load(text: str) -> Task:
    """A task by its name, `bytes-gpt`, `bytes-gpt:5m`, `digits`, or by the path of a file that has its functions."""
    if text.endswith(".py"):
        return FileTask(Path(text))
    name, _, size = text.partition(":")
    if name == "bytes-gpt":
        return BytesGPT(size or "1m")
    if name == "digits" and not size:
        return Digits()
    near = get_close_matches(name, ["bytes-gpt", "digits"], 1, 0.4)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ValueError(f"there is no task {text!r}{hint} Tasks: {', '.join(NAMES)}, or the path of a .py file")


class BytesGPT:
    """A byte-level transformer that reads the source text of Python's standard library, which is on every machine."""

    SIZES = {"500k": (128, 2), "1m": (128, 4), "2m": (232, 3), "5m": (256, 6), "20m": (512, 6)}  # noqa: RUF012
    CONTEXT, BATCH = 64, 8
    # From random weights, every method that averages seldom loses most in the first steps, and nobody trains for so few.
    warm_steps = 400

    def __init__(self, size: str = "1m") -> None:
        if size not in self.SIZES:
            raise ValueError(f"bytes-gpt has no size {size!r}; there are {', '.join(self.SIZES)}")
        self.name = f"bytes-gpt:{size}"
        self._width, self._layers = self.SIZES[size]
        data = library()
        # A part from the end is held out: the last tenth of the files.
        self._kept, self._held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    def model(self) -> nn.Module:
        return Transformer(self._width, self._layers, self.CONTEXT)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield self._windows(self._kept, self.BATCH, draw)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        return loss

    def evaluate(self, model: nn.Module) -> float:
        fixed = torch.Generator().manual_seed(7)
        with torch.no_grad():
            return sum(float(model(self._windows(self._held_out, 32, fixed))) for _ in range(4)) / 4

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))

    def warm(self, model: nn.Module, optimizer: Optimizer) -> None:
        """It begins with random weights."""

    def _windows(self, data: Tensor, count: int, draw: torch.Generator) -> Tensor:
        starts = torch.randint(len(data) - self.CONTEXT - 1, (count,), generator=draw)
        return torch.stack([data[start : start + self.CONTEXT + 1] for start in starts.tolist()]).long()


def library() -> Tensor:
    """The source text of the standard library, byte by byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Block(nn.Module):
    """Attention, then two layers, both on normed inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norms[0](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Transformer(nn.Module):
    """Bytes in, the loss of guessing the next one out."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, window: Tensor) -> Tensor:
        x = self.bytes(window[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


class Digits:
    """A small convolutional network with batch norm on scikit-learn's 8x8 digits."""

    name, BATCH, warm_steps = "digits", 16, 0

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ValueError("the task digits needs scikit-learn: in laconic's folder, pip install '.[lab]'") from error
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
        labels = torch.tensor(labels)[order]
        self._images, self._labels = images[:-300], labels[:-300]
        self._held_out = images[-300:], labels[-300:]

    def model(self) -> nn.Module:
        layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1)]
        return nn.Sequential(
            *layers, nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def batches(self, rank: int, world: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            chosen = torch.randint(len(self._labels), (self.BATCH,), generator=draw)
            yield self._images[chosen], self._labels[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        return float(self.loss(model, self._held_out))

    def schedule(self, optimizer: Optimizer, steps: int) -> None:
        """None."""

    def warm(self, model: nn.Module, optimizer: Optimizer) -> None:
        """It begins with random weights."""


NAMES = [*(f"bytes-gpt:{size}" for size in BytesGPT.SIZES), "digits"]
