"""One test for torch's module and for ours."""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import live


def module(library: str, path: str) -> Any:
    """A module of torch's, or ours of the same path."""
    if library == "laconic":
        return importlib.import_module(f"laconic.compat.{path}")
    live.settle_seconds = 0.3
    return importlib.import_module(f"torch.distributed.{'' if path == 'optim' else 'algorithms.'}{path}")


def but_torch(reason: str, *, hangs: bool = False, before: str | None = None) -> pytest.MarkDecorator:
    """Ours in `make test`; that torch's really fails is seen in `make soak`, unless it hangs or dies.

    `before`: the release that is known to pass; from there on torch's must pass, too.
    """
    fails = before is None or torch.__version__ < before
    torch_fails = pytest.mark.xfail(fails, reason=f"torch {torch.__version__}: {reason}", strict=True, run=not hangs)
    return pytest.mark.parametrize("library", ["laconic", pytest.param("torch", marks=[torch_fails, pytest.mark.soak])])


# Ours in `make test`; torch's, which takes as long and doesn't change, in `make soak`.
both = pytest.mark.parametrize("library", ["laconic", pytest.param("torch", marks=pytest.mark.soak)])


class Linear(nn.Module):
    """Parameters of given shapes, and a loss that is linear in them: its gradient is what it is given."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes])

    def forward(self, *gradients: Tensor) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def linear(*shapes: tuple[int, ...], **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Linear(*shapes), **options)


def noise(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def averaged(model: DistributedDataParallel, gradients: list[Tensor]) -> list[Tensor]:
    """What the model's hook makes of these gradients."""
    model.zero_grad()
    model(*gradients).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def mean(of: Callable[[int], list[Tensor]], world: int) -> list[Tensor]:
    """The mean of what each rank has."""
    return [torch.stack(each).mean(0) for each in zip(*[of(rank) for rank in range(world)], strict=True)]


def close(left: list[Tensor], right: list[Tensor], tolerance: float = 1e-6) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


@contextmanager
def listening(logger: logging.Logger, level: int) -> Iterator[list[str]]:
    """The lines that a logger writes meanwhile."""
    lines: list[str] = []
    handler, before = logging.Handler(), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
