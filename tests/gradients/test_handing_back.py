"""Plain means are handed back to DDP as they arrive, and DDP waits by itself: it is counted, watched, and ends in an error."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.gradients.dispatcher import Dispatcher
from tests.live import last_ranks, ranks


class Pause(torch.autograd.Function):
    """Sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def model(**options: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.01, **options)  # type: ignore[arg-type]
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)


def waited(rank: int) -> float:
    ddp, optimizer = model()
    with laconic.attach(ddp, optimizer, "ddp()") as run:
        for _ in range(3):
            time.sleep(0.4 * rank)
            ddp(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = run.stats().wait_seconds
    assert found is not None
    return found


def test_the_wait_for_a_slow_peer_is_counted() -> None:
    quick, slow = ranks(2, waited)
    # In the second one, DDP itself waits in forward: it rebuilds its buckets there.
    assert quick > 0.7 > slow, "rank 1 comes 0.4 s late to each of three steps"


def goes_on_below(rank: int) -> int:
    ddp, optimizer = model()
    weight = torch.ones(40, requires_grad=True)
    with laconic.attach(ddp, optimizer, "ddp()") as run:
        for step in range(2):
            x = Pause.apply(torch.ones(2, 40) * weight, 3.5 if (rank, step) == (0, 1) else 0.0)  # type: ignore[no-untyped-call]
            ddp(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.step


def test_a_backward_that_goes_on_below_the_ddp_waits_for_nobody() -> None:
    """The peer has left long before it ends, and is not missed."""
    assert ranks(2, goes_on_below) == [2, 2]


def leaves_early(rank: int, options: dict[str, bool]) -> str:
    ddp, optimizer = model(**options)
    handed = Dispatcher.of(ddp)
    try:
        with laconic.attach(ddp, optimizer, "ddp()"):
            assert handed.target is not None
            assert handed.target.hands_back == (not options)
            for _ in range(6 if rank else 4):
                ddp(torch.ones(2, 40)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    except laconic.UnevenError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_peer_that_leaves_is_named_while_ddp_waits(options: dict[str, bool]) -> None:
    """With these options DDP waits for a collective of its own, which nobody can end: there the hook waits itself."""
    for said in last_ranks(2, leaves_early, options):
        assert "rank 0 left after 4 steps" in said
