"""Models and loops that tests share."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.run.run import engine_of

BUCKET_CAP_MB = 0.001  # some hundred numbers a bucket: small models, many buckets


class Odd(nn.Module):
    """Everything a model may have: shared, scalar, empty and unused parameters, a channels_last convolution, a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32, unused: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(96 // dtype.itemsize)])
        self.shared = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(8, 8) if unused else None
        self.to(dtype)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images)).relu().mean((2, 3))
        for layer in self.body:
            x = x + 0.2 * torch.tanh(layer(x)) * self.scale
        x = self.shared(self.shared(x)) + self.empty.sum()
        out: Tensor = self.head(x)
        return out


def chain(depth: int = 12, width: int = 16) -> nn.Module:
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())], nn.Linear(width, 3))


def images(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 3, 6, 6, generator=generator).to(dtype, memory_format=torch.channels_last)


def vectors(rank: int, step: int, width: int = 16) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def build(make: Callable[[], nn.Module], **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(make(), **{"bucket_cap_mb": BUCKET_CAP_MB, **options})


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Equal to the bit, NaN for NaN."""
    pairs = list(zip(left, right, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def everything(model: nn.Module, optimizers: list[Any], run: Any) -> dict[str, Any]:
    """All that a run is, as it is now: weights, the optimizers' and the scaler's state, the run's with its counters.

    But for what it has cost: seconds are never alike, and a resumed run sends again what was outstanding.
    """
    state = {"model": dict(model.state_dict()), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    own, scaler = {key: value for key, value in run.state_dict().items() if key != "counts"}, engine_of(run).scaler
    return copy.deepcopy({**state, "scaler": scaler and scaler.state_dict(), "run": own})


def difference(left: Any, right: Any, where: str = "state") -> str | None:
    """The first place where two trees of plain data are not the same, tensors to the bit; None: they are."""
    if type(left) is not type(right):
        return f"{where}: {left!r} is no {type(right).__name__}"
    if isinstance(left, Tensor):
        return None if same_bits([left], [right]) else f"{where}: {left} is not {right}"
    if isinstance(left, dict) and left.keys() == right.keys():
        found = (difference(left[key], right[key], f"{where}[{key!r}]") for key in left)
    elif isinstance(left, list | tuple) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        found = (difference(mine, other, f"{where}[{place}]") for place, (mine, other) in pairs)
    else:
        return None if left == right else f"{where}: {left!r} is not {right!r}"
    return next((one for one in found if one is not None), None)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def everywhere_equal(tensors: list[Tensor]) -> bool:
    """Whether all ranks of the default group hold these bits."""
    import torch.distributed as dist

    mine = torch.cat([_bits(tensor) for tensor in tensors])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return all(torch.equal(row, mine) for row in rows)
