"""Model averagers: torch's and ours."""

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.libraries import both, but_torch, close, module
from tests.live import last_ranks, ranks
from tests.models import same_bits

SHAPES = ((5, 4), (7,), (), (3, 2, 2))


def replica(
    rank: int, *shapes: tuple[int, ...], gradients: bool = True, dtype: torch.dtype = torch.float32
) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(rank)
    parameters = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if gradients else None
    return parameters


def mean_of(members: range | list[int], *shapes: tuple[int, ...]) -> list[Tensor]:
    replicas = [list(replica(rank, *shapes)) for rank in members]
    return [torch.stack([parameter.detach() for parameter in each]).mean(0) for each in zip(*replicas, strict=True)]


def values(parameters: nn.ParameterList) -> list[Tensor]:
    return [parameter.detach() for parameter in parameters]


# The utilities


def once(rank: int, library: str, world: int, how: str) -> None:
    utils, parameters = module(library, "model_averaging.utils"), replica(rank, *SHAPES)
    group = dist.new_group([0, 1]) if how == "a group" else None
    if how == "groups of parameters":
        utils.average_parameters_or_parameter_groups(torch.optim.SGD(parameters, lr=1).param_groups, group)
    elif how == "parameters":
        utils.average_parameters_or_parameter_groups(parameters, group)
    else:
        utils.average_parameters(iter(parameters), group)
    inside = how != "a group" or rank < 2
    members: Any = ([0, 1] if how == "a group" else range(world)) if inside else [rank]
    assert close(values(parameters), mean_of(members, *SHAPES))


@pytest.mark.parametrize("how", ["an iterator", "parameters", "groups of parameters", "a group"])
@both
def test_averaging_once(library: str, how: str) -> None:
    ranks(3, once, library, 3, how)


@both
def test_what_is_no_parameter_is_refused(library: str) -> None:
    with pytest.raises(NotImplementedError, match="str"):
        module(library, "model_averaging.utils").get_params_to_average(["weight"])


def some_gradients(rank: int, library: str) -> None:
    """On each rank another parameter has no gradient, as with experts that saw no token."""
    parameters = replica(rank, (6,), (6,))
    parameters[rank].grad = None
    module(library, "model_averaging.utils").average_parameters_or_parameter_groups(parameters, None)
    assert close(values(parameters), mean_of(range(2), (6,), (6,)))


@but_torch("averages one rank's first parameter with another rank's second")
def test_gradients_on_different_parameters(library: str) -> None:
    ranks(2, some_gradients, library)


def no_gradients(rank: int, library: str) -> None:
    parameters = replica(rank, *SHAPES, gradients=False)
    module(library, "model_averaging.utils").average_parameters_or_parameter_groups(parameters, None)
    assert close(values(parameters), mean_of(range(2), *SHAPES))


@but_torch("has nothing left to average then, and fails")
def test_averaging_after_zero_grad(library: str) -> None:
    ranks(2, no_gradients, library)


def in_place(rank: int, library: str) -> None:
    layer = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = list(layer.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [(parameter.data_ptr(), parameter.stride(), parameter.dtype) for parameter in parameters]
    view = parameters[0].detach()
    module(library, "model_averaging.utils").average_parameters_or_parameter_groups(parameters, None)
    assert [(parameter.data_ptr(), parameter.stride(), parameter.dtype) for parameter in parameters] == before
    assert torch.equal(view, parameters[0])


@but_torch("gives every parameter new storage")
def test_storage_and_memory_format_stay(library: str) -> None:
    ranks(2, in_place, library)


def identical(rank: int, library: str, world: int, dtype: torch.dtype) -> None:
    parameters = replica(0, (1000,), (31, 7), dtype=dtype)
    before = [parameter.detach().clone() for parameter in parameters]
    module(library, "model_averaging.utils").average_parameters_or_parameter_groups(parameters, None)
    assert same_bits(values(parameters), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@but_torch("divides and adds in 16 bits")
def test_identical_bf16_replicas_do_not_change(library: str, dtype: torch.dtype) -> None:
    ranks(3, identical, library, 3, dtype)


# The averagers


def when(rank: int, library: str, kind: str, warmup: int) -> list[int]:
    """In which of 20 calls the parameters change."""
    if kind == "periodic":
        averager = module(library, "model_averaging.averagers").PeriodicModelAverager(period=4, warmup_steps=warmup)
    else:
        hierarchical = module(library, "model_averaging.hierarchical_model_averager")
        averager = hierarchical.HierarchicalModelAverager(OrderedDict([(4, 2)]), warmup_steps=warmup)
    changed = []
    for step in range(20):
        parameters = replica(rank, *SHAPES)
        assert averager.step == step
        averager.average_parameters(parameters)
        if not close(values(parameters), values(replica(rank, *SHAPES))):
            assert close(values(parameters), mean_of(range(2), *SHAPES))
            changed.append(step)
    return changed


@pytest.mark.parametrize(
    ("kind", "warmup", "steps"),
    [
        ("periodic", 0, [0, 4, 8, 12, 16]),
        ("periodic", 6, [6, 10, 14, 18]),
        ("hierarchical", 0, [0, 4, 8, 12, 16]),
        ("hierarchical", 6, [8, 12, 16]),
    ],
)
@both
def test_when_each_averager_averages(library: str, kind: str, warmup: int, steps: list[int]) -> None:
    assert ranks(2, when, library, kind, warmup) == [steps, steps]


def levels(rank: int, library: str) -> None:
    hierarchical = module(library, "model_averaging.hierarchical_model_averager")
    averager = hierarchical.HierarchicalModelAverager(OrderedDict([(2, 2), (6, 4)]), warmup_steps=1)
    sizes = {period: group.size() for period, group in averager.period_process_group_dict.items()}
    assert sizes == {2: 2, 6: 4}
    for step in range(13):
        parameters = replica(rank, *SHAPES)
        averager.average_parameters(torch.optim.SGD(parameters, lr=1).param_groups)
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        members: Any = [rank] if step < 1 or step % 2 else range(4) if step % 6 == 0 else pair
        assert close(values(parameters), mean_of(members, *SHAPES)), f"step {step}"


@both
def test_a_hierarchy_averages_over_the_largest_group_that_is_due(library: str) -> None:
    ranks(4, levels, library)


def among_some(rank: int, library: str) -> None:
    """Ranks 1 and 2 of three, and rank 0 without them."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    members = [0] if rank == 0 else [1, 2]
    periodic = module(library, "model_averaging.averagers").PeriodicModelAverager(2, process_group=groups[rank > 0])
    for _ in range(3):
        parameters = replica(rank, *SHAPES)
        periodic.average_parameters(parameters)
        assert close(values(parameters), mean_of(members if periodic.step != 2 else [rank], *SHAPES))
    hierarchical = module(library, "model_averaging.hierarchical_model_averager").HierarchicalModelAverager
    if rank:
        averager = hierarchical({2: 1, 4: 2}, process_group=groups[1])
        for step in range(5):
            parameters = replica(rank, *SHAPES)
            averager.average_parameters(parameters)
            assert close(values(parameters), mean_of([rank] if step % 4 else members, *SHAPES))


def test_averaging_among_some_ranks() -> None:
    ranks(3, among_some, "laconic")


def refused(rank: int, library: str) -> None:
    averagers, hierarchical = (module(library, f"model_averaging.{n}") for n in ("averagers", "hierarchical_model_averager"))
    with pytest.raises(ValueError, match="warmup_steps"):
        averagers.PeriodicModelAverager(period=4, warmup_steps=-1)
    with pytest.raises(ValueError, match="period"):
        averagers.PeriodicModelAverager(period=0)
    with pytest.warns(UserWarning, match="DistributedDataParallel"):
        assert averagers.PeriodicModelAverager(period=1).period == 1
    with pytest.raises(ValueError, match="period_group_size_dict"):
        hierarchical.HierarchicalModelAverager()
    with pytest.raises(ValueError, match="period_group_size_dict"):
        hierarchical.HierarchicalModelAverager(OrderedDict([(0, 1)]))
    with pytest.raises(ValueError, match="must be"):
        hierarchical.HierarchicalModelAverager(OrderedDict([(4, 2)]))
    with pytest.raises(ValueError, match="warmup_steps"):
        hierarchical.HierarchicalModelAverager(OrderedDict([(4, 1)]), warmup_steps=-1)
    with pytest.warns(UserWarning, match="DistributedDataParallel"):
        hierarchical.HierarchicalModelAverager(OrderedDict([(1, 1)]))
    with pytest.raises(TypeError, match="abstract"):
        averagers.ModelAverager()


@both
def test_what_both_refuse(library: str) -> None:
    ranks(1, refused, library)


def nonsense(rank: int, library: str, hierarchy: dict[int, int]) -> None:
    hierarchical = module(library, "model_averaging.hierarchical_model_averager")
    with pytest.raises(ValueError, match=r"rising order|at least 1|divide"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hierarchical.HierarchicalModelAverager(OrderedDict(hierarchy))


@pytest.mark.parametrize(
    "hierarchy", [{8: 2, 4: 4}, {4: 2, -8: 4}, {4: 2, 0: 4}, {4: 3, 8: 4}, {2: 4, 4: 2, 8: 4}, {4: 0, 8: 4}], ids=str
)
@but_torch("looks at the first period alone", hangs=True)
def test_hierarchies_that_make_no_sense_are_refused(library: str, hierarchy: dict[int, int]) -> None:
    ranks(4, nonsense, library, hierarchy)


def unlike(rank: int) -> None:
    averager = module("laconic", "model_averaging.averagers").PeriodicModelAverager(period=2)
    with pytest.raises(ValueError, match=r"rank 1 has parameter 1: torch.float32 \(6,\), rank 0 has .* \(5,\)"):
        averager.average_parameters(replica(rank, (4,), (5 + rank,)))


def test_ranks_with_other_parameters_are_told() -> None:
    last_ranks(2, unlike)
