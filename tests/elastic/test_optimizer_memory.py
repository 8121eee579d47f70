"""What optimizers remember: on its way to a worker that joins, and refused where it does not fit."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic import elastic
from laconic.comm.flat_tensors import local
from laconic.elastic.healing import HealingError
from laconic.elastic.optimizer_memory import OptimizerMemory
from tests.elastic.training import batch, model
from tests.live import ranks

Build = Callable[[Sequence[nn.Parameter]], Optimizer]


class Counting(torch.optim.SGD):
    """It keeps numbers beside tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["made"], state["rate"] = state.get("made", 0) + 1, 0.5


class Asking(torch.optim.SGD):
    """It can't be built by its settings alone."""

    def __init__(self, params: Any, teacher: object) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.teacher = teacher


def _apart(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1], "amsgrad": True}, {"params": parameters[1:]}]


OPTIMIZERS: dict[str, Build] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw with a scheduler": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "groups": lambda p: torch.optim.AdamW(_apart(p), lr=1e-2),
    "numbers": lambda p: Counting(p, lr=0.1, momentum=0.9),
}


def steps(net: nn.Module, optimizer: Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x, y = batch(generator)
        torch.autograd.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()


def trained(build: Build, count: int) -> tuple[nn.Module, Optimizer, OptimizerMemory]:
    net = model()
    optimizer = build(list(net.parameters()))
    steps(net, optimizer, count, seed=1)
    return net, optimizer, OptimizerMemory([optimizer], dict(net.named_parameters()))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_takes_it_over_trains_on_as_its_peer(name: str) -> None:
    """Bit for bit, from the same parameters and batches."""
    first, optimizer, memory = trained(OPTIMIZERS[name], 3)
    second, taking, other = trained(OPTIMIZERS[name], 1)
    tensors, numbers = memory.held(dict(first.named_parameters()))
    looks = {place: memory.looks(place) for place in tensors}
    assert all(look is not None and look.shape == list(tensors[place].shape) for place, look in looks.items())
    other.check(tensors, numbers, "peer")
    other.forget(dict(second.named_parameters()))
    other.load({place: tensor.clone() for place, tensor in tensors.items()}, numbers)
    second.load_state_dict(first.state_dict())
    steps(first, optimizer, 3, seed=2)
    steps(second, taking, 3, seed=2)
    assert same(first.state_dict(), second.state_dict())
    assert same(memory.held(dict(first.named_parameters()))[0], other.held(dict(second.named_parameters()))[0])


def test_what_can_not_be_built_on_trial_keeps_its_own(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer, memory = trained(lambda p: Asking(p, teacher=None), 2)
    before = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    assert memory.held(dict(net.named_parameters())) == ({}, [])
    assert "what Asking remembers can't be handed over" in caplog.text
    memory.forget(dict(net.named_parameters()))
    assert all(torch.equal(a, b["momentum_buffer"]) for a, b in zip(before, optimizer.state.values(), strict=True))


def test_what_is_not_finite_is_not_handed_over() -> None:
    net, optimizer, memory = trained(OPTIMIZERS["adam"], 2)
    optimizer.state[next(net.parameters())]["exp_avg"][0] = float("inf")
    tensors, _ = memory.held(dict(net.named_parameters()))
    assert not any("0.weight" in place for place in tensors)
    assert any("0.bias" in place for place in tensors)


@pytest.mark.parametrize(
    ("places", "numbers", "error"),
    [
        (["0/0.weight/momentum_buffer", "0/0.weight/made"], [], "lack rate"),
        ([], [["0/0.weight/made", 3]], "lack momentum_buffer"),
        ([], [["0/0.weight/momentum_buffer", 3]], "where a place that this worker knows"),
        ([], [["0/0.weight/made", float("nan")]], "where a place that this worker knows"),
        ([], [["1/0.weight/made", 3]], "where a place that this worker knows"),
        ([], [["0/nosuch/made", 3]], "where a place that this worker knows"),
        ([], [["made"]], "where a place that this worker knows"),
        ([], "made", "where a place that this worker knows"),
        ([], [[["0"], 3]], "where a place that this worker knows"),
    ],
)
def test_what_does_not_fit_is_refused(places: list[str], numbers: object, error: str) -> None:
    _, _, memory = trained(OPTIMIZERS["numbers"], 1)
    with pytest.raises(HealingError, match=f"peer sent .*({error})"):
        memory.check(places, numbers, "peer")


def test_places_that_nobody_knows_look_like_nothing() -> None:
    _, _, memory = trained(OPTIMIZERS["adam"], 1)
    known = memory.looks("0/0.weight/exp_avg")
    assert known is not None
    assert known.shape == [32, 16]
    for place in ("0/0.weight/teacher", "1/0.weight/exp_avg", "0/9.weight/exp_avg", "-1/0.weight/exp_avg", "", "0", "x/y/z"):
        assert memory.looks(place) is None


# Among live workers


def island(rank: int, kind: str) -> tuple[nn.Module, nn.Module, str]:
    """The model, what is trained, and which worker this rank belongs to: 0 and 1 with two ranks, or each alone."""
    net = model(seed=rank)
    if kind == "alone":
        return net, net, f"w{rank}"
    if kind == "shards":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh["shard"])
        return net, net, f"w{rank // 2}"
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return net, DistributedDataParallel(net, process_group=groups[rank // 2]), f"w{rank // 2}"


def moments(optimizer: Optimizer) -> list[float]:
    return [
        float(local(value).double().square().sum() + local(value).double().sum())
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
    ]


def joining(rank: int, address: str, kind: str, policy: str) -> list[float]:
    """The second worker joins the first in one of its syncs: what the optimizer of each remembers right after it."""
    net, trained, name = island(rank, kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    manager = elastic.Membership(lighthouse=address, name=name, timeout_seconds=20, quorum_seconds=60)

    def attach() -> elastic.ElasticRun:
        return elastic.attach(trained, optimizer, "diloco(4)", manager, moments=policy)  # type: ignore[arg-type]

    if name == "w0":
        run = attach()
        dist.barrier()  # the other one joins a run that is under way
        while len(run.stats().workers) == 1:
            time.sleep(0.05)
            steps(trained, optimizer, 4, seed=run.step)
    else:
        dist.barrier()
        run = attach()
        assert run.step > 0
    found = moments(optimizer)
    dist.barrier()
    run.detach()
    return found


@pytest.mark.parametrize(("kind", "count"), [("alone", 2), ("ddp", 4), pytest.param("shards", 4, marks=pytest.mark.soak)])
def test_a_worker_that_joins_begins_with_a_peers_moments(kind: str, count: int) -> None:
    """On all ranks of an island, and of each shard that of its peer."""
    with elastic.lighthouse(heartbeat_seconds=2) as address:
        found = ranks(count, joining, address, kind, "peer")
    assert len(found[0]) == 4 * 3
    half = count // 2
    assert found[:half] == found[half:]
    assert kind == "shards" or len({tuple(one) for one in found}) == 1


@pytest.mark.soak
def test_or_with_its_own() -> None:
    with elastic.lighthouse(heartbeat_seconds=2) as address:
        found = ranks(2, joining, address, "alone", "own")
    assert len(found[0]) == 4 * 3
    assert found[1] == []
