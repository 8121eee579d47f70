"""What `laconic.auto` does, on live ranks; tests/processes/test_scripts.py has whole scripts."""

import atexit
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from laconic import UnevenError, auto
from tests.models import same_bits, weights
from tests.ranks import last_ranks, ranks

PATCHED = [
    (DistributedDataParallel, "__init__"), (Optimizer, "__init__"), (torch.amp.GradScaler, "__init__"),
    (dist, "destroy_process_group"), (dist.distributed_c10d, "destroy_process_group"), (sys, "exit"), (sys, "excepthook"),
]  # fmt: skip


@contextmanager
def installed(text: str) -> Iterator[io.StringIO]:
    """As in a script under `laconic run`; yields what it prints on stderr. At the end it is taken out of the process again."""
    before = [getattr(place, name) for place, name in PATCHED]
    auto.install(text)
    try:
        with redirect_stderr(io.StringIO()) as lines:
            yield lines
    finally:
        auto._auto = None
        atexit.unregister(auto._at_exit)
        for (place, name), value in zip(PATCHED, before, strict=True):
            setattr(place, name, value)


def build() -> tuple[DistributedDataParallel, Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    return model, AdamW(model.parameters(), lr=2e-3)


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def loading_alone(rank: int, text: str, which: int) -> str:
    with installed(text):
        model, optimizer = build()
        for number in range(3):
            step(model, optimizer, number)
        if rank == which:
            optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(UnevenError) as failure:
            for number in range(3, 12):
                step(model, optimizer, number)
        assert auto._auto is not None
        auto._auto.fail(failure.value)
        return str(failure.value)


@pytest.mark.parametrize(("text", "which"), [("int8()", 0), ("diloco(4)", 1)])
def test_a_load_in_mid_run_on_some_ranks_is_an_error_on_all_that_names_them(text: str, which: int) -> None:
    for sentence in last_ranks(3, loading_alone, text, which):
        others = ", ".join(str(rank) for rank in range(3) if rank != which)
        assert f"after step 3 rank {which} loaded an optimizer's state, rank {others} did not" in sentence
        assert "load it on all ranks, or on none" in sentence
