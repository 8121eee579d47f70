"""Gloo's threads and the tensors that they hold: whoever ends waits until they have let go."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.comm import lending
from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Collective
from laconic.comm.group import TorchGroup
from tests.live import ranks
from tests.models import build, chain

KINDS: dict[str, Callable[[], Collective]] = {
    "all-reduce": lambda: AllReduce(torch.ones(4)),
    "all-gather": lambda: AllGather(torch.ones(4)),
    "all-to-all": lambda: AllToAll(torch.ones(2, 4)),
    "long all-to-all": lambda: AllToAll(torch.ones(2, 1 << 18)),
}


def lent(rank: int, kind: str) -> tuple[bool, bool]:
    """Whether nothing is held while a collective waits for a peer that is late, and after it."""
    group = TorchGroup(dist.group.WORLD)  # type: ignore[arg-type]
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
    handle = group.launch(KINDS[kind]())
    before = lending.await_return(0.05)
    handle.wait()
    del handle
    return before, lending.await_return(5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_lent_for_as_long_as_a_collective_lasts(kind: str) -> None:
    (early, early_after), (_, late_after) = ranks(2, lent, kind)
    assert not early, "its peer was late"
    assert early_after
    assert late_after


def test_what_is_lent_has_the_same_numbers_and_is_nobodys_else() -> None:
    tensor = torch.arange(4.0)
    alias = lending.lend(tensor)
    assert alias is not tensor
    alias += 1
    assert tensor.tolist() == [1, 2, 3, 4]
    assert not lending.await_return(0.0)
    threading.Timer(0.05, lambda: held.clear()).start()
    held = [alias]
    del alias
    assert lending.await_return(5.0)


def detached(rank: int) -> bool:
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = laconic.attach(model, optimizer, "int8()")
    held = [lending.lend(torch.ones(1))]
    threading.Timer(0.2, held.clear).start()
    run.detach()
    return lending.await_return(0.0)


def test_the_end_of_a_run_waits_for_what_is_lent() -> None:
    assert ranks(1, detached) == [True]


@pytest.mark.soak
def test_so_does_the_end_of_python() -> None:
    text = (
        "import atexit\natexit.register(lambda: print(lending.await_return(0.0)))\n"  # called last
        "import threading, torch\nfrom laconic.comm import lending\nheld = [lending.lend(torch.ones(1))]\n"
        "threading.Timer(0.2, held.clear).start()\n"
        "print(lending.await_return(0.0))\nthreading._shutdown = lambda: None\n"  # which would wait for the timer
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_sparse_tensor_is_lent_as_it_is() -> None:
    """Gloo gives it new storage, which an alias would have alone."""
    tensor = torch.eye(3).to_sparse()
    assert lending.lend(tensor) is tensor
