"""Long messages both ways: the same bits as by gloo's own all-to-all and all-gather, at any size, and failures that show."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from laconic.comm import collectives
from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Collective, Work
from laconic.comm.exchange import complete
from laconic.comm.group import CommunicationError, TorchGroup
from laconic.comm.ledger import Ledger
from tests.comm.test_exchange import once
from tests.live import last_ranks, ranks

DTYPES = [torch.float32, torch.int16, torch.float8_e4m3fn, torch.uint8]


def group() -> TorchGroup:
    assert dist.group.WORLD is not None
    return TorchGroup(dist.group.WORLD)


def numbers(rank: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    dice = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 100, (*shape, dtype.itemsize), generator=dice, dtype=torch.uint8)
    return whole.view(dtype).squeeze(-1)


def same_bits(rank: int, sizes: list[int]) -> None:
    """One after the other, then all at once with an all-reduce in between, waited for in another order."""
    world, made = dist.get_world_size(), list[Collective]()
    for place, size in enumerate(sizes):
        dtype = DTYPES[place % len(DTYPES)]
        made += [AllToAll(numbers(rank, world, size, dtype=dtype)), AllGather(numbers(rank, size, dtype=dtype))]
        made += [AllToAll(numbers(rank, size, world, dtype=dtype).t()), AllReduce(torch.ones(3))]
    answers, totals = [], []
    for least in (1 << 60, 1):
        collectives.CROSSING_BYTES = least
        ledger = Ledger()
        answers.append([complete(once(type(one), one.tensor.clone()), group(), ledger) for one in made])
        totals.append(ledger.total)
    handles = [group().launch(type(one)(one.tensor.clone())) for one in made if one.tensor.numel()]
    futures = [handle.future() for handle in handles[::2]]
    time.sleep(0.002 * rank)
    last = [handle.wait() for handle in reversed(handles)][::-1]
    for first, second in zip(*answers, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert totals[0] == totals[1], "what is counted does not depend on how it travels"
    whole = [answer for answer, one in zip(answers[0], made, strict=True) if one.tensor.numel()]
    for first, second in zip(whole, last, strict=True):
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    for first, future in zip(whole[::2], futures, strict=True):
        assert torch.equal(first.view(torch.uint8), future.wait().view(torch.uint8))
    assert not collectives._outstanding
    collectives.CROSSING_BYTES = 1 << 20


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_crossing_messages_have_the_same_bits(world: int) -> None:
    ranks(world, same_bits, [0, 1, 2, 7, 1001, 300_001])


def late(rank: int) -> None:
    """A poll that ends too early harms nobody."""
    tensor = torch.full((2, 1 << 20), rank, dtype=torch.uint8)
    if rank:
        time.sleep(0.5)
    handle = group().launch(AllToAll(tensor))
    assert len(collectives._outstanding) == 1
    assert rank or not handle.settle(0.01)
    assert torch.equal(handle.wait()[:, 0], torch.tensor([0, 1], dtype=torch.uint8))
    assert not collectives._outstanding
    dist.barrier()


def test_a_late_peer_is_waited_for() -> None:
    ranks(2, late)


def given_up(rank: int) -> None:
    """One rank forgets what it launched; when the other launches its part, the group still works."""
    tensor = torch.ones(2, 1 << 20, dtype=torch.uint8)
    if rank == 0:
        assert not group().launch(AllToAll(tensor)).settle(0.01)
        time.sleep(0.3)
    else:
        time.sleep(0.1)
        group().launch(AllToAll(tensor)).wait()
    assert torch.equal(complete(once(AllToAll, tensor), group(), Ledger()), tensor)
    dist.barrier()
    collectives._outstanding.clear()


def test_what_was_given_up_harms_nobody() -> None:
    ranks(2, given_up)


def never(rank: int) -> None:
    """The process group's timeout ends it, if nobody else does."""
    apart = dist.new_group(timeout=timedelta(seconds=1))
    assert apart is not None
    tensor = torch.ones(2, 1 << 20, dtype=torch.uint8)
    if rank == 0:
        with pytest.raises(CommunicationError, match="AllToAll of 2097152 bytes among 2 ranks failed"):
            complete(once(AllToAll, tensor), TorchGroup(apart), Ledger())
        assert not collectives._outstanding
    dist.barrier()


def test_a_peer_that_never_comes_is_an_error() -> None:
    last_ranks(2, never)


def dies(rank: int) -> None:
    if rank == 1:
        time.sleep(0.2)
        os._exit(3)
    work: Work
    work, _ = AllGather(torch.ones(1 << 20, dtype=torch.uint8)).launch(group().process_group)
    future = work.get_future()
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=20))
    assert work.is_completed()
    with pytest.raises(RuntimeError):
        future.wait()
    assert not collectives._outstanding
    raise ArithmeticError("it was noticed")


def test_a_peer_that_dies_is_an_error() -> None:
    with pytest.raises(AssertionError, match="it was noticed"):
        last_ranks(2, dies)


def beside_a_users_own(rank: int) -> None:
    """On a subgroup whose ranks have other numbers in the world, with the user's own messages under way."""
    collectives.CROSSING_BYTES = 1
    members = [1, 3]
    made = dist.new_group(members)
    if rank not in members:
        return
    me = members.index(rank)
    mine = numbers(rank, 2, 50_000, dtype=torch.uint8)
    received = torch.zeros(5)
    waiting = dist.irecv(received, group=made, group_src=1 - me)
    handle = TorchGroup(made).launch(AllToAll(mine.clone()))
    sending = dist.isend(torch.full((5,), float(rank)), group=made, group_dst=1 - me)
    assert waiting is not None
    assert sending is not None
    rows = handle.wait()
    waiting.wait()
    sending.wait()
    for other, row in zip(members, rows, strict=True):
        assert torch.equal(row, numbers(other, 2, 50_000, dtype=torch.uint8)[me])
    assert received.eq(members[1 - me]).all()


def test_a_subgroup_and_messages_of_the_users_own() -> None:
    last_ranks(4, beside_a_users_own)
