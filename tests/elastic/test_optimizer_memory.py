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
from laconic.elastic.island import Island
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


class Exotic(torch.optim.SGD):
    """What it keeps can't be sent, or its trial fails as nobody expects."""

    how = "float8"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.how == "division":
                    1 / int(parameter.grad.abs().max() * 0)
                kept = torch.zeros_like(parameter)
                self.state[parameter]["kept"] = kept.to_sparse() if self.how == "sparse" else kept.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("how", ["float8", "sparse", "division"])
def test_what_can_not_be_sent_is_left_out(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """It would end the worker that has been there all along."""
    net = model()
    optimizer = Exotic(net.parameters(), lr=0.1)
    optimizer.how = how
    memory = OptimizerMemory([optimizer], dict(net.named_parameters()))
    assert memory.held(dict(net.named_parameters())) == ({}, [])
    assert "what Exotic remembers can't be handed over" in caplog.text
    assert memory.facts() == ["optimizer 0, Exotic, keeps nothing of 0.weight, 0.bias, 2.weight, 2.bias"]


def test_what_is_unlike_a_trial_is_not_handed_over() -> None:
    net, optimizer, memory = trained(OPTIMIZERS["adam"], 1)
    optimizer.state[next(net.parameters())]["exp_avg"] = torch.zeros(3)
    optimizer.state[list(net.parameters())[1]]["exp_avg"] = torch.zeros(32, dtype=torch.float64)
    assert {place.split("/")[1] for place in memory.held(dict(net.named_parameters()))[0]} == {"2.weight", "2.bias"}


def test_facts_say_what_is_kept_so_that_another_setting_is_refused_and_not_a_state() -> None:
    found = {name: trained(OPTIMIZERS[name], 0)[2].facts() for name in ("momentum", "sgd", "adam", "groups")}
    assert found["momentum"] == ["optimizer 0, SGD, keeps momentum_buffer (float32) of 0.weight, 0.bias, 2.weight, 2.bias"]
    assert found["sgd"] == ["optimizer 0, SGD, keeps nothing of 0.weight, 0.bias, 2.weight, 2.bias"]
    assert len(found["groups"]) == 2, "amsgrad in one of them"
    assert "max_exp_avg_sq" in found["adam"][0]


def test_settings_that_are_loaded_count() -> None:
    net, optimizer, memory = trained(OPTIMIZERS["momentum"], 1)
    optimizer.load_state_dict(trained(OPTIMIZERS["sgd"], 1)[1].state_dict())
    assert memory.held(dict(net.named_parameters())) == ({}, [])


def spread(rank: int, layout: str) -> list[float]:
    """Each of two ranks has the memory of one of two convolutions, and gives it to the other."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, 3, dtype=torch.bfloat16))
    if layout == "channels last":
        for parameter in (one for one in net.parameters() if one.dim() == 4):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank)).to(parameter)
    optimizer.step()
    names = [list(dict(net[place].named_parameters(prefix=str(place)))) for place in (0, 1)]  # type: ignore[index]
    before = moments(optimizer)
    if layout == "not finite" and rank == 0:
        optimizer.state[next(net.parameters())]["exp_avg"].fill_(float("inf"))
    OptimizerMemory([optimizer], dict(net.named_parameters())).spread(Island(dist.group.WORLD), names)
    halves = [before[: len(before) // 2], before[len(before) // 2 :]]
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, halves[rank])
    found, wanted = moments(optimizer), everywhere[0] + everywhere[1]
    if layout == "not finite":
        assert len(found) == len(wanted) - 3, "the owner has none of it, either"
    else:
        assert found == pytest.approx(wanted)
        exact = optimizer.state[next(net.parameters())]["exp_avg"].flatten().tolist()
        return list(map(float, exact))
    return found


@pytest.mark.parametrize("layout", ["plain", "channels last", "not finite"])
def test_the_ranks_of_an_island_get_it_number_by_number(layout: str) -> None:
    first, second = ranks(2, spread, layout)
    assert first == second


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
