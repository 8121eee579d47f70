"""The order in which gradients become ready: seen at the first backward that is averaged, and told to a new DDP."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.gradients.ready_order import replay
from tests.models import BUCKET_CAP_MB, chain, vectors


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Either(nn.Module):
    """Two layers, in the one order or the other; one more is frozen, and DDP is told to ignore another."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b, self.ignored = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.ignored(self.frozen(x))
        y: Tensor = self.b(self.a(x)) if self.turned else self.a(self.b(x))
        return y


def built(**options: Any) -> DistributedDataParallel:
    module = Either()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["ignored.weight", "ignored.bias"])  # type: ignore[no-untyped-call]
    return DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB, **options)


AVERAGED = {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_the_order_is_that_of_the_first_backward_that_is_averaged() -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, "ddp()") as run:
        with model.no_sync():
            model(vectors(0, 0)).sum().backward()
        model.module.turned = True
        model(vectors(0, 0)).sum().backward()
        optimizer.step()
        order = run.state_dict()["order"]
        assert set(order) == AVERAGED
        assert {name[0] for name in order[:2]} == {"b"}, "the last layer first, and not as without averaging"
        model.module.turned = False
        model(vectors(0, 1)).sum().backward()
        optimizer.step()
        assert run.state_dict()["order"] == order, "DDP builds its buckets once"


def test_a_new_ddp_believes_in_any_order_and_nothing_else_changes() -> None:
    order = ["a.bias", "b.weight", "b.bias", "a.weight"]
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: list[str] = []
    for name, parameter in model.module.named_parameters():
        parameter.grad = torch.full_like(parameter, 3.0) if name.startswith("a") else None
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, name=name: called.append(name))
    kept = [parameter.grad for parameter in model.parameters()]
    with laconic.attach(model, optimizer, "ddp()") as run, torch.no_grad():
        assert replay(model, order)
        assert replay(model, order), "once more is no more"
        assert not replay(model, order[::-1]), "it believes in another"
        assert all(now is then for now, then in zip([parameter.grad for parameter in model.parameters()], kept, strict=True))
        assert all(parameter.grad is None or bool((parameter.grad == 3).all()) for parameter in model.parameters())
        assert called == []
        assert run.stats().collectives == run.stats().exchanges == 0
        with torch.enable_grad():
            model(vectors(0, 0)).sum().backward()
        assert [name for bucket in run.layout() for name in bucket] == order
        assert run.stats().exchanges == 1


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_where_buckets_never_change_there_is_nothing_to_believe(options: dict[str, bool]) -> None:
    assert not replay(built(**options), sorted(AVERAGED))


def test_the_order_of_another_model_is_none() -> None:
    assert not replay(built(), sorted(AVERAGED - {"a.bias"}))
    assert not replay(DistributedDataParallel(chain(2)), sorted(AVERAGED))


def test_nothing_watches_after_the_end() -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = laconic.attach(model, optimizer, "ddp()")
    watched = [name for name, parameter in model.module.named_parameters() if parameter._post_accumulate_grad_hooks]
    assert set(watched) == AVERAGED
    run.detach()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_state_that_is_taken_after_the_end_has_the_order() -> None:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, "ddp()") as run:
        for step in range(2):
            model(vectors(0, step)).sum().backward()
            optimizer.step()
        order = run.state_dict()["order"]
    assert set(order) == AVERAGED
    assert run.state_dict()["order"] == order
