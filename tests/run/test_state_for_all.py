"""A state that the first rank has saved, loaded on all: where no rank has anything of its own in it."""

from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.run.state import is_for_all
from tests.live import ranks
from tests.models import build, chain, same_bits, vectors, weights


def started(text: str) -> tuple[nn.Module, torch.optim.Optimizer, laconic.Run]:
    model = build(chain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, laconic.attach(model, optimizer, text)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        torch.autograd.backward(model(vectors(rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def resumed(rank: int, text: str) -> tuple[bool, bool]:
    """Whether it goes on to the same bits with the first rank's state, and without any."""
    model, optimizer, run = started(text)
    trained(model, optimizer, rank, range(3))
    mine: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()}
    saved = [None]
    if rank == 0:
        saved = [torch.utils._pytree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, mine)]
    torch.distributed.broadcast_object_list(saved, 0)
    trained(model, optimizer, rank, range(3, 6))
    wanted = weights(model)
    run.detach()
    found = []
    for with_state in (True, False):
        model, optimizer, run = started(text)
        state: Any = saved[0]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if with_state:
            run.load_state_dict(state["run"])
            assert run.step == 3
            assert run.state_dict()["rank"] == rank
        trained(model, optimizer, rank, range(3, 6))
        found.append(same_bits(weights(model), wanted))
        run.detach()
    return found[0], found[1]


@pytest.mark.parametrize("text", ["int8()", "bf16()", "ddp(reducer=Quantized(8, block=64))"])
def test_it_goes_on_to_the_same_bits(text: str) -> None:
    exact, bare = zip(*ranks(2, resumed, text), strict=True)
    assert all(exact)
    assert text == "bf16()" or not any(bare), "the first step of a new DDP has other buckets, and so other blocks"


def refused(rank: int, text: str, steps: int) -> str:
    model, optimizer, run = started(text)
    trained(model, optimizer, rank, range(steps))
    saved: list[Any] = [run.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(saved, 0)
    run.detach()
    _, _, run = started(text)
    if rank == 0:
        return ""
    with pytest.raises(ValueError, match="this is the state of rank 0, and here is rank 1: each rank has its own") as error:
        run.load_state_dict(saved[0])
    run.detach()
    return str(error.value)


@pytest.mark.parametrize("text", ["int4()", "powersgd(rank=1, warmup=1)", "diloco(2)", "local_sgd(2)", "local_sgd(3)"])
def test_what_a_rank_has_for_itself_is_not_taken_from_another_one(text: str) -> None:
    assert ranks(2, refused, text, 3)[1]


def test_what_a_state_is_for_all_is_read_from_what_its_strategy_declares() -> None:
    plain: dict[str, Any] = {"strategy": "int8()", "memory": {}, "local": {"deltas": None, "drifted": False}, "whose": {}}
    assert is_for_all(plain)
    for wrong in (
        {"strategy": "int4()"},  # its residuals may be empty on one rank alone
        {"strategy": "local_sgd(2)"},
        {"local": {"deltas": None, "drifted": True}},
        {"local": {"deltas": {}, "drifted": False}},
        {"memory": {"0.weight": None}},
        {"memory": {"0.weight": {"nosuch": torch.ones(1)}}},
        {"strategy": "nosuch()"},
        {"memory": None},
    ):
        assert not is_for_all({**plain, **wrong}), wrong
