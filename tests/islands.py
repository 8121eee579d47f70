"""A sharded model on islands, and loops over it, that tests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm.flat_tensors import local
from laconic.run.run import Run

WORDS, WIDTH = 11, 8  # the embedding's rows are dealt unevenly over 2, 3 and 4 shards


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.narrow = nn.Linear(9, 3)  # a bias of 3 numbers; on 4 shards one of them holds none
        self.down = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.narrow(torch.tanh(self.up(x)))))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Small(nn.Module):
    """Everything a sharded model may have: nested levels, uneven shards, a tied embedding, a frozen parameter, a buffer."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(5, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.add_(tokens.float().mean())  # type: ignore[operator]  # a buffer
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def island_mesh(islands: int) -> DeviceMesh:
    return init_device_mesh("cpu", (islands, dist.get_world_size() // islands), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Two nested levels in each block, and the rest."""
    for block in model.blocks:  # type: ignore[union-attr]  # of a Small
        fully_shard(block.mlp, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.5))


Inner = Callable[[nn.Module], torch.optim.Optimizer]


def small(seed: int = 0, depth: int = 2) -> Small:
    torch.manual_seed(seed)
    return Small(depth)


def sharded(islands: int, inner: Inner, seed: int = 0, **options: Any) -> tuple[Any, Any, DeviceMesh]:
    """A small model on islands, its optimizer, and its mesh."""
    mesh = island_mesh(islands)
    model = shard(small(seed), mesh["shard"], **options)
    return model, inner(model), mesh


def whole(inner: Inner) -> tuple[Any, Any]:
    """The same in a DDP over all ranks."""
    model = DistributedDataParallel(small(), forward_sync_buffers=False)
    return model, inner(model)


@contextmanager
def attached(islands: int, text: str, inner: Inner = adam, **options: Any) -> Iterator[tuple[Any, Any, Run]]:
    model, optimizer, mesh = sharded(islands, inner)
    with laconic.attach(model, optimizer, text, mesh=mesh, **options) as run:
        yield model, optimizer, run


def step_once(model: nn.Module, optimizer: Any, rank: int, step: int) -> float:
    value = loss(model, tokens(rank, step))
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def shards(model: nn.Module) -> list[Tensor]:
    """What this rank holds, copied."""
    return [local(parameter).clone() for parameter in model.parameters()]


def full(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, on all ranks of the island."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def far(model: nn.Module, other: nn.Module) -> float:
    """How far two models are apart, relative to the second."""
    mine, theirs = full(model), full(other)
    assert mine.keys() == theirs.keys()
    difference = sum((mine[name].double() - theirs[name].double()).square().sum() for name in mine)
    size = sum(theirs[name].double().square().sum() for name in mine)
    return float((torch.as_tensor(difference) / size).sqrt())


def same_on_islands(tensors: list[Tensor], mesh: DeviceMesh) -> bool:
    """Whether all ranks that hold this shard hold these bits."""
    mine = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    group = mesh.get_group("replicate")
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    return all(torch.equal(row, mine) for row in rows)
