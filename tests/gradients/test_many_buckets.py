"""Many buckets, ranks of different speed: replicas stay equal and nothing hangs."""

import random
import time
from datetime import timedelta

import pytest
import torch

import laconic
from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Traffic
from laconic.comm.exchange import complete
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.forecast import predict
from laconic.reducers import discover
from laconic.reducers.base import Reducer
from tests.comm.test_exchange import once
from tests.live import ranks, ranks_within
from tests.models import build, chain, everywhere_equal, vectors, weights
from tests.reducers.every import EVERY, NAMES, bits, run, tensors

every = pytest.mark.parametrize("reducer", EVERY, ids=NAMES)
every_second = pytest.mark.parametrize(
    "reducer",
    [
        pytest.param(reducer, id=name, marks=pytest.mark.soak if place % 2 else [])
        for place, (reducer, name) in enumerate(zip(EVERY, NAMES, strict=True))
    ],
)


FIRST = [next(kind.examples()) for kind in discover().values()]


def sleepy(rank: int, reducer: Reducer, steps: int, seed: int) -> int:
    """Sleeps sit between the buckets too: in the backward of random layers."""
    dice = random.Random(1000 * seed + rank)
    model = build(lambda: chain(depth=6))
    for part in model.modules():
        if isinstance(part, torch.nn.Tanh):
            part.register_full_backward_hook(lambda *_: time.sleep(0.002) if dice.random() < 0.08 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(model, optimizer, laconic.ddp(reducer=reducer)) as run:
        for step in range(steps):
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert everywhere_equal(weights(model)), f"replicas differ after step {step}"
    return len(run.layout())


@pytest.mark.parametrize(
    "reducer", [*FIRST[::2], *(pytest.param(reducer, marks=pytest.mark.soak) for reducer in FIRST[1::2])], ids=str
)
def test_replicas_are_equal_at_every_step(reducer: Reducer) -> None:
    assert min(ranks(4, sleepy, reducer, 12, 0)) >= 6


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@every
def test_replicas_are_equal_again_and_again(reducer: Reducer, world: int) -> None:
    assert min(ranks_within(600, world, sleepy, reducer, 100, world)) >= 6


def count(rank: int, reducer: Reducer) -> None:
    model = build(lambda: chain(depth=6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = Traffic()
    with laconic.attach(model, optimizer, laconic.ddp(reducer=reducer)) as run:
        for step in range(6):
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = run.stats()
            total = Traffic(stats.payload_bytes, stats.wire_bytes, stats.collectives)
            world = torch.distributed.get_world_size()
            assert total - before == predict(run.strategy, model, world_size=world, buckets=run.layout(), step=step)
            before = total


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.soak) for world in (1, 2, 4, 5))])
@every_second
def test_predicted_bytes_are_counted_bytes(world: int, reducer: Reducer) -> None:
    ranks(world, count, reducer)


def real(rank: int, reducer: Reducer) -> list[torch.Tensor]:
    """The exchange of tests.reducers.every.run, through real processes."""
    from tests.reducers.every import bucket

    group, memory = TorchGroup(torch.distributed.group.WORLD), {}  # type: ignore[arg-type, var-annotated]
    means = []
    for step in range(5):
        one = bucket(tensors(SHAPES, 10 * step + rank), memory, rank, group.world, step, False)
        result = complete(reducer.reduce(one), group, Ledger())
        result.finish()
        means.append(result.mean)
    return means


SHAPES = [(), (0,), (33, 7), (5,), (4, 3, 2, 2), (1001,)]


@every
def test_simulation_is_bit_equal_to_two_processes(reducer: Reducer) -> None:
    by_rank = ranks(2, real, reducer)
    memory: list[dict[str, dict[str, torch.Tensor]]] = [{}, {}]
    for step in range(5):
        simulated, _ = run(reducer, [tensors(SHAPES, 10 * step + rank) for rank in range(2)], memory, step)
        for rank in range(2):
            assert torch.equal(bits(simulated[rank].mean), bits(by_rank[rank][step]))


def real_collectives(rank: int) -> None:
    """Of every type of number, and of tensors that don't lie in memory as they are seen."""
    group, ledger = TorchGroup(torch.distributed.group.WORLD), Ledger()  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.int16, torch.float8_e4m3fn, torch.bool):
        values = [(torch.arange(6).view(3, 2) % 5 + 8 * one).to(dtype).t() for one in range(2)]
        gathered = complete(once(AllGather, values[rank]), group, ledger)
        assert gathered.float().tolist() == [value.float().tolist() for value in values]
        dealt = complete(once(AllToAll, values[rank]), group, ledger)
        assert dealt.float().tolist() == [value.float()[rank].tolist() for value in values]
        assert gathered.dtype == dealt.dtype == dtype
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["the other has waited"], timedelta(seconds=20))
    handle = group.launch(AllReduce(torch.full((3,), 1.0 + rank)))
    if rank == 0:
        assert not handle.settle(0), "no time is no time, not for ever"
        store.set("the other has waited", "")
    assert handle.wait().tolist() == [1.5] * 3
    assert handle.settle(0)


def test_real_collectives_do_what_they_say() -> None:
    ranks(2, real_collectives)
