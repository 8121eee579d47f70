"""ZeRO's optimizer in backward: what ZeRO after backward gives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from laconic.comm.dryrun import simulate
from laconic.compat.ddp_comm_hooks.ddp_zero_hook import _gather
from tests.compat.libraries import both, but_torch, close, module
from tests.compat.test_optimizer_overlap import convolutions, images
from tests.live import ranks
from tests.models import same_bits, weights

PATH = "ddp_comm_hooks.ddp_zero_hook"
HOOKS = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
STEPS = 8


def ddp(layout: str, group: Any, **options: Any) -> DistributedDataParallel:
    layers: Any = convolutions()
    if layout == "channels_last":
        layers = layers.to(memory_format=torch.channels_last)
    if layout == "gaps":  # a weight that is a part of a larger tensor
        with torch.no_grad():
            layers[4].weight = nn.Parameter(nn.functional.pad(layers[4].weight, (0, 9))[:, :288])
    return DistributedDataParallel(layers, bucket_cap_mb=0.005, process_group=group, **options)


def after_backward(rank: int, layout: str, group: Any, first: int, made: Any, options: dict[str, Any]) -> list[Tensor]:
    """Plain DDP; as in torch, the first backwards update nothing."""
    model = ddp(layout, group)
    optimizer = made(model.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(images(rank, step)).square().mean().backward()
        if step >= first:
            optimizer.step()
    return weights(model)


def in_backward(
    rank: int,
    library: str,
    hook: str,
    shard_buckets: bool,
    inner: str = "allreduce_hook",
    layout: str = "",
    members: list[int] | None = None,
    made: Any = torch.optim.SGD,
    static_graph: bool = False,
) -> None:
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9} if made is torch.optim.SGD else {"lr": 0.01}
    group: Any = dist.new_group(members) if members else dist.group.WORLD
    if members and rank not in members:
        return
    model = ddp(layout, group, static_graph=static_graph)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    strides = [parameter.stride() for parameter in model.parameters()]
    zero = ZeroRedundancyOptimizer(model.parameters(), made, process_group=group, overlap_with_ddp=True, **options)
    average = getattr(module(library, "ddp_comm_hooks.default_hooks"), inner)
    model.register_comm_hook(group, getattr(module(library, PATH), hook)(average, model, zero, shard_buckets))
    for step in range(STEPS):
        model.zero_grad()
        model(images(rank, step)).square().mean().backward()
    wanted = after_backward(rank, layout, group, 3 if static_graph else 2, made, options)
    assert close(weights(model), wanted, 1e-5 if inner == "allreduce_hook" else 1e-2)
    rows: list[Any] = [None] * group.size()
    dist.all_gather_object(rows, [float(p.double().sum()) for p in model.parameters()], group=group)
    assert all(row == rows[0] for row in rows), "replicas are equal"
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    owned = zero.optim.param_groups[0]["params"]
    assert 0 < len(owned) < len(pointers), "each rank has the state of its own share alone"
    assert len(zero.optim.state) == len(owned)


@pytest.mark.parametrize("shard_buckets", [False, True], ids=["", "shard_buckets"])
@pytest.mark.parametrize("hook", HOOKS)
@but_torch("refuses gloo")
def test_as_stepping_after_backward(library: str, hook: str, shard_buckets: bool) -> None:
    ranks(2, in_backward, library, hook, shard_buckets)


@pytest.mark.parametrize("hook", HOOKS)
def test_three_ranks_and_adam(hook: str) -> None:
    ranks(3, in_backward, "laconic", hook, True, made=torch.optim.Adam)


@pytest.mark.parametrize("hook", HOOKS)
def test_in_a_subgroup(hook: str) -> None:
    ranks(3, in_backward, "laconic", hook, False, members=[1, 2])


@pytest.mark.parametrize("hook", HOOKS)
def test_channels_last(hook: str) -> None:
    ranks(2, in_backward, "laconic", hook, True, layout="channels_last")


def test_a_parameter_with_gaps_in_memory() -> None:
    ranks(2, in_backward, "laconic", HOOKS[0], False, layout="gaps")


def test_large_shards_travel_in_parts() -> None:
    """Some MiB at a time: parameters that are cut by a message's end, before and behind others, of ranks with uneven shares."""
    sizes = [[3, 1_500_000, 700_000, 5], [11, 1_048_576], []]
    values = [[torch.rand(size) + 10 * rank for size in row] for rank, row in enumerate(sizes)]
    replicas = [[[v.clone() if owner == rank else -v for v in row] for owner, row in enumerate(values)] for rank in range(3)]
    groups: list[Any] = [SimpleNamespace(rank=rank) for rank in range(3)]
    simulate([_gather(replica, group) for replica, group in zip(replicas, groups, strict=True)])
    for replica in replicas:
        assert all(same_bits(got, wanted) for got, wanted in zip(replica, values, strict=True))


@pytest.mark.parametrize("hook", HOOKS)
def test_with_a_compressing_hook(hook: str) -> None:
    ranks(2, in_backward, "laconic", hook, False, inner="bf16_compress_hook")


def test_a_static_graph() -> None:
    ranks(2, in_backward, "laconic", HOOKS[0], False, static_graph=True)


def refused(rank: int, library: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1)
    for hook in HOOKS:
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            getattr(module(library, PATH), hook)(None, model, zero)


@both
def test_an_optimizer_that_does_not_overlap_is_refused(library: str) -> None:
    ranks(1, refused, library)
