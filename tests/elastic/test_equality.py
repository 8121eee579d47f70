"""Without failures, elastic training is the same training: bit for bit."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import laconic
from laconic import elastic
from tests.elastic.training import batch, digest, model
from tests.live import ranks

STRATEGIES = [
    "local_sgd(period=4)",
    "local_sgd(period=4, reducer=ErrorFeedback(Quantized(8)))",
    "diloco(period=4)",
    "diloco(period=4, reducer=ErrorFeedback(Quantized(8)))",
    "streaming_diloco(period=8, fragments=2, delay=1, reducer=Exact())",
    "streaming_diloco(period=8, fragments=2, delay=2)",  # in 8 bits
    "sparseloco(period=4)",  # 2 bits of 1 in 64
]
STEPS, WORLD = 16, 4


class WithBuffers(nn.Module):
    """A model whose buffers are averaged, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = model(seed=seed)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(self.norm(x))
        return y


def trained(rank: int, strategy: str, lighthouse: str | None) -> str:
    net = WithBuffers(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    if lighthouse is None:
        run = laconic.attach(net, optimizer, strategy)
    else:
        manager = elastic.Membership(lighthouse=lighthouse, name=f"worker-{rank}", timeout_seconds=20, quorum_seconds=60)
        run = elastic.attach(net, optimizer, strategy, manager)  # type: ignore[assignment]
    for _ in range(STEPS):
        x, y = batch(generator)
        torch.autograd.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found = digest(net)
    if lighthouse is None:
        run.sync()  # streaming fragments are at different ages; nobody needs them any more
    run.detach()
    return found


def both(rank: int, addresses: list[str]) -> list[tuple[str, str]]:
    return [(trained(rank, one, None), trained(rank, one, address)) for one, address in zip(STRATEGIES, addresses, strict=True)]


@pytest.fixture
def lighthouses() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(elastic.lighthouse(min_replicas=WORLD)) for _ in STRATEGIES]


def test_four_workers_without_failures_are_a_run_without_torchft(lighthouses: list[str]) -> None:
    found = ranks(WORLD, both, lighthouses)
    for place, strategy in enumerate(STRATEGIES):
        plain, elastically = zip(*(mine[place] for mine in found), strict=True)
        assert plain == elastically, strategy
        if "streaming" not in strategy:
            assert len(set(plain)) == 1, strategy
