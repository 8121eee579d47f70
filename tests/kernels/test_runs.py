"""Runs with compiled kernels: used where attach says so, and the same bits as without."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.kernels import cache
from tests.live import ranks
from tests.models import everywhere_equal


def trained(rank: int, text: str, fused: list[bool]) -> tuple[list[Tensor], set[str]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 7)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    cache.forget()
    with laconic.attach(ddp, optimizer, text, fused=fused[rank]):
        for step in range(6):
            draw = torch.Generator().manual_seed(10 * step + rank)
            ddp(torch.randn(8, 40, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert everywhere_equal(everything(ddp))
    used = {name for name, _ in cache._loaded}
    return [parameter.clone() for parameter in everything(ddp)], used


def everything(ddp: DistributedDataParallel) -> list[Tensor]:
    return [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.soak
@pytest.mark.parametrize("text", ["int8()", "int4()", "powersgd(rank=2, warmup=1)", "ddp(reducer=ErrorFeedback(Ternary()))"])
def test_ranks_may_differ_in_it(text: str) -> None:
    (plain, none), _ = ranks(2, trained, text, [False, False])
    assert not none
    for fused in ([True, True], [True, False]):
        (found, used), _ = ranks(2, trained, text, fused)
        assert used, "compiled kernels ran"
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
