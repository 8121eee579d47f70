"""Workers of several ranks: a DistributedDataParallel, or a sharded model, inside of each."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import elastic
from laconic.comm.flat_tensors import local
from tests.elastic.training import batch, digest
from tests.live import ranks

STEPS = 12
STRATEGIES = [
    "local_sgd(period=3)",
    "diloco(period=3)",
    "streaming_diloco(period=6, fragments=2, delay=1, reducer=Exact())",
    "diloco(period=3, reducer=ErrorFeedback(Quantized(8)))",
]


class Net(nn.Module):
    """With a buffer and a frozen parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)
        self.scale = nn.Parameter(torch.rand(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale * self.down(torch.tanh(self.up(x)))
        return y


def manager(address: str, name: str) -> elastic.Membership:
    return elastic.Membership(lighthouse=address, name=name, timeout_seconds=20, quorum_seconds=60)


def loop(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = batch(generator)
        torch.autograd.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()


def of_one_rank(rank: int, strategy: str, address: str) -> tuple[str, float]:
    """Two workers, of one process each: ranks 0 and 2."""
    if rank % 2:
        return "", 0
    net = Net(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with elastic.attach(net, optimizer, strategy, manager(address, f"worker-{rank}")) as run:
        loop(net, optimizer, rank // 2)
        return digest(net), run.stats().payload_bytes


def of_two_ranks(rank: int, strategy: str, address: str) -> tuple[str, float]:
    """Two workers of two ranks that train on the same batches, so that DDP's mean changes nothing."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(Net(rank // 2 * 2), process_group=groups[rank // 2])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    with elastic.attach(ddp, optimizer, strategy, manager(address, f"worker-{rank}")) as run:
        loop(ddp, optimizer, rank // 2)
        stats, found = run.stats(), digest(ddp.module)
        loop(ddp, optimizer, rank // 2, steps=1)
        _check_consensus(run, ddp.module, found)
    assert stats.workers == ("worker-0", "worker-2")
    return found, stats.payload_bytes


def _check_consensus(run: elastic.ElasticRun, net: nn.Module, at_sync: str) -> None:
    """It is the model of the last sync, lent; all ranks of a worker together."""
    apart = digest(net)
    if not str(run.strategy).startswith("local_sgd"):
        with run.consensus():
            assert "streaming" in str(run.strategy) or digest(net) == at_sync
            assert digest(net) != apart
    else:
        with pytest.raises(RuntimeError, match="keeps no model of the last sync"), run.consensus():
            raise AssertionError("it has none")
    assert digest(net) == apart


def ddp_islands(rank: int, addresses: list[str]) -> list[tuple[str, float, str, float]]:
    found = []
    for strategy, one, two in zip(STRATEGIES, addresses, addresses[len(STRATEGIES) :], strict=False):
        alone = of_one_rank(rank, strategy, one)
        dist.barrier()
        found.append((*alone, *of_two_ranks(rank, strategy, two)))
    return found


def sharded(rank: int, strategy: str, address: str | None) -> list[float]:
    """Two islands of two shards each, with torchft or without."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = Net(rank // 2)
    net.scale.requires_grad_(True)
    fully_shard(net.up, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if address is None:
        run = laconic.attach(net, optimizer, strategy, mesh=mesh)
    else:
        run = elastic.attach(net, optimizer, strategy, manager(address, f"worker-{rank}"))  # type: ignore[assignment]
    loop(net, optimizer, rank)
    found = [number for p in net.parameters() for number in local(p).flatten().tolist()]
    if address is None:
        run.sync()
    run.detach()
    return found


def sharded_islands(rank: int, addresses: list[str]) -> list[tuple[list[float], list[float]]]:
    return [(sharded(rank, one, None), sharded(rank, one, to)) for one, to in zip(STRATEGIES, addresses, strict=False)]


@pytest.fixture
def lighthouses() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(elastic.lighthouse(min_replicas=2)) for _ in range(2 * len(STRATEGIES))]


def test_islands_of_ddp_are_workers(lighthouses: list[str]) -> None:
    """Each rank averages its own share of the parameters; the replica is that of a worker of one process."""
    found = ranks(4, ddp_islands, lighthouses)
    for place, strategy in enumerate(STRATEGIES):
        alone, sent_alone, together, sent = zip(*(mine[place] for mine in found), strict=True)
        assert together[0] == together[1], strategy
        assert together[2] == together[3], strategy
        if "Quantized" not in strategy:  # blocks end with a rank's share
            assert (alone[0], alone[2]) == (together[0], together[2]), strategy
        if "streaming" not in strategy:
            assert len(set(together)) == 1, strategy
        assert sum(sent[:2]) < 1.2 * sent_alone[0], "no number leaves an island twice"


def test_islands_of_shards_are_workers(lighthouses: list[str]) -> None:
    """The same bits as without torchft."""
    found = ranks(4, sharded_islands, lighthouses)
    for place, strategy in enumerate(STRATEGIES):
        for mine in found:
            plain, elastically = mine[place]
            assert plain == elastically, strategy
