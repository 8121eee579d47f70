"""What ranks must have alike, which strategies fit which models, and in which order groups are built."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import laconic
from laconic.comm.group import TorchGroup
from laconic.comm.scopes import AUTO, HEARTBEATS, OUTSTANDING
from laconic.ranks.groups import Groups, check_scopes
from laconic.ranks.islands import whole
from laconic.run.arguments import Arguments, Place, check, check_route, check_sharded, scopes


class Two:
    """As much of a process group as is asked here."""

    def size(self) -> int:
        return 2


TWO: Any = Two()


def plan(model: nn.Module | None = None, **options: Any) -> Arguments:
    model = model or nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    given = {
        "strategy": "diloco(4)",
        "scaler": None,
        "uneven": "error",
        "mesh": None,
        "replicate": "replicate",
        "check_every": 0,
        "fused": False,
        **options,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return check(model, given.pop("optimizer", optimizer), ranks=whole(TWO), **given)


def test_ranks_that_differ_in_anything_have_other_facts() -> None:
    made = plan()
    transposed = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    transposed[0].weight = nn.Parameter(torch.empty(3, 4).T)
    others = [
        plan(strategy="diloco(5)"),
        plan(uneven="stop"),
        plan(check_every=3),
        plan(scaler=torch.amp.GradScaler("cpu")),
        replace(made, optimizers=made.optimizers * 2),
        plan(transposed),
        plan(nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, track_running_stats=False))),
        plan(nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, dtype=torch.float64))),
    ]
    facts = [one.facts() for one in (made, *others)]
    assert all(left != right for place, left in enumerate(facts) for right in facts[:place])
    assert made.facts() == plan().facts()


def test_what_is_trained_is_averaged_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    assert list(plan(model).parameters) == ["0.weight", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ddp()", {"world"}),
        ("silent()", set()),
        ("post_local_sgd(3, 4)", {"world", AUTO}),
        ("hierarchical_sgd({2: 2, 4: 'rack'})", {2, "rack"}),
        ("diloco(4)", {"world"}),
        ("streaming_diloco(4, fragments=1, delay=0)", {"world"}),
        ("streaming_diloco(4, fragments=1, delay=1)", {"world", OUTSTANDING, HEARTBEATS}),
    ],
)
def test_with_whom_a_strategy_communicates(text: str, wanted: set[str | int]) -> None:
    assert scopes(laconic.strategy(text)) == wanted


@pytest.mark.parametrize(
    ("text", "world", "fits"),
    [
        ("hierarchical_sgd({2: 2, 4: 4})", 4, True),
        ("hierarchical_sgd({2: 2, 4: 4})", 8, False),  # nobody averages over all
        ("hierarchical_sgd({2: 'node', 4: 'world'})", 8, True),
        ("hierarchical_sgd({2: 3, 4: 'world'})", 8, False),  # blocks of 3 don't fill 8
        ("hierarchical_sgd({2: 4, 4: 'world'})", 2, False),
    ],
)
def test_groups_must_fit_the_ranks(text: str, world: int, fits: bool) -> None:
    strategy = laconic.strategy(text)
    if fits:
        check_route(strategy, Place(None, {"w": torch.zeros(2)}, None, None), world)
    else:
        with pytest.raises(ValueError, match=r"must hold all 8 ranks|ranks can't be divided into groups of"):
            check_route(strategy, Place(None, {"w": torch.zeros(2)}, None, None), world)
    check_scopes(["world", "node", AUTO, OUTSTANDING, 2], 4, None)


def test_deltas_are_of_floats() -> None:
    odd = {"plain": torch.zeros(2), "odd": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(ValueError, match=r"odd is torch.complex64; use local_sgd\(\)"):
        check_route(laconic.diloco(4), Place(None, odd, None, None), 2)
    check_route(laconic.local_sgd(4), Place(None, odd, None, None), 2)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("ddp()", True),
        ("powersgd()", True),
        ("silent()", False),
        ("local_sgd(1)", False),
        ("Strategy(Exact(), Route(((Every(1), 2),)))", False),
        ("Strategy(Exact(), Route(((Every(1), 'world'),)), Averaging(Route(((Every(4), 'world'),))))", False),
    ],
)
def test_a_sharded_optimizer_needs_equal_gradients_in_every_step(text: str, fits: bool) -> None:
    sharded: Any = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)  # without the ranks that it would need
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    check_sharded(laconic.strategy(text), [plain])
    if fits:
        check_sharded(laconic.strategy(text), [plain, sharded])
    else:
        with pytest.raises(ValueError, match="takes steps apart, and a ZeroRedundancyOptimizer"):
            check_sharded(laconic.strategy(text), [plain, sharded])


class Noted(Groups):
    """Notes what it builds."""

    def __init__(self, asked: Iterable[str | int]) -> None:
        self.built: list[str | int] = []
        self._by_scope = {"world": self.world_of_one}
        self.add(asked)

    world_of_one: TorchGroup = None  # type: ignore[assignment]

    def _build(self, scope: str | int) -> TorchGroup:
        self.built.append(scope)
        return self.world_of_one


def test_groups_are_built_in_one_order_whatever_order_a_set_has_in_a_process() -> None:
    names = ["f", "b", "e", "a", "world", "d", "g", "c"]
    groups = Noted([8, *names, 16])
    assert groups.built == [16, 8, "a", "b", "c", "d", "e", "f", "g"]
    groups.add(["a", 4, "z"])
    assert groups.built[9:] == [4, "z"], "what is there is not built again"
