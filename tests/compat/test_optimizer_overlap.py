"""Optimizers in backward: what stepping after backward gives."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.optim.utils import as_functional_optim
from torch.nn.parallel import DistributedDataParallel

from tests.compat.libraries import both, but_torch, close, module
from tests.live import ranks
from tests.models import everywhere_equal, weights

PATH = "ddp_comm_hooks.optimizer_overlap_hooks"
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(288, 5)]
    return nn.Sequential(*layers)


def images(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def stepped_after(rank: int, made: Any, options: dict[str, Any], channels_last: bool, chosen: Any, steps: int) -> list[Tensor]:
    model = ddp(channels_last)
    optimizer = made(chosen(model), **options)
    for step in range(steps):
        model.zero_grad()
        model(images(rank, step)).square().mean().backward()
        optimizer.step()
    return weights(model)


def ddp(channels_last: bool, **options: Any) -> DistributedDataParallel:
    module_ = convolutions()
    if channels_last:
        module_ = module_.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return DistributedDataParallel(module_, bucket_cap_mb=0.005, **options)


def everything(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def all_but_the_last(model: nn.Module) -> list[Tensor]:
    return everything(model)[:-1]


def convolutions_alone(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 4]


def in_backward(
    rank: int,
    library: str,
    made: Any,
    options: dict[str, Any],
    hook: Callable[[Any], Any],
    tolerance: float,
    channels_last: bool = False,
    chosen: Any = everything,
) -> None:
    overlap = module(library, PATH)
    model = ddp(channels_last)
    params = None if chosen is everything else chosen(model)
    state = overlap._OptimizerHookState(as_functional_optim(made, **options), params)
    model.register_comm_hook(None, overlap._hook_then_optimizer(hook(library), state))
    for step in range(6):
        model.zero_grad()
        model(images(rank, step)).square().mean().backward()
    assert everywhere_equal(weights(model))
    assert close(weights(model), stepped_after(rank, made, options, channels_last, chosen, 6), tolerance)


def allreduce(library: str) -> Any:
    return module(library, "ddp_comm_hooks.default_hooks").allreduce_hook


def fp16_wrapped(library: str) -> Any:
    hooks = module(library, "ddp_comm_hooks.default_hooks")
    return hooks.fp16_compress_wrapper(hooks.allreduce_hook)


def returning_another(library: str) -> Any:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        mean = bucket.buffer().clone()
        future = dist.all_reduce(mean, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())  # type: ignore[no-any-return]

    return hook


@pytest.mark.parametrize(("made", "options"), OPTIMIZERS, ids=lambda each: getattr(each, "__name__", ""))
@both
def test_as_stepping_after_backward(library: str, made: Any, options: dict[str, Any]) -> None:
    ranks(2, in_backward, library, made, options, allreduce, 1e-5)


@both
def test_some_parameters_alone(library: str) -> None:
    ranks(2, in_backward, library, *OPTIMIZERS[0], allreduce, 1e-5, False, convolutions_alone)


@but_torch("reads the gradients of channels_last parameters in the wrong order")
def test_channels_last(library: str) -> None:
    ranks(2, in_backward, library, *OPTIMIZERS[0], allreduce, 1e-5, True)


@but_torch("steps with what was in the bucket before")
def test_a_hook_that_returns_a_new_tensor(library: str) -> None:
    ranks(2, in_backward, library, *OPTIMIZERS[0], returning_another, 1e-5)


@but_torch("hands Adam gradients in fp16")
def test_wrapped_in_sixteen_bits(library: str) -> None:
    ranks(2, in_backward, library, *OPTIMIZERS[1], fp16_wrapped, 1e-2)


@both
def test_what_is_no_functional_optimizer_is_refused(library: str) -> None:
    with pytest.raises(ValueError, match="step_param"):
        module(library, PATH)._OptimizerHookState(torch.optim.SGD([torch.zeros(1)], lr=1))


def optimizers_of_parameters(rank: int, as_view: bool, channels_last: bool) -> None:
    model = ddp(channels_last, gradient_as_bucket_view=as_view)
    with torch.no_grad():  # at its first forward, DDP would register torch's own hook for parameters that have optimizers then
        model(images(rank, 0))
    *chosen, plain = model.parameters()
    for parameter in chosen:
        parameter._in_backward_optimizers = [torch.optim.SGD([parameter], lr=0.05, momentum=0.9)]  # type: ignore[attr-defined]
    model.register_comm_hook(weakref.ref(model), module("laconic", PATH)._apply_optim_in_backward_hook(as_view))
    for step in range(6):
        plain.grad = None
        model(images(rank, step)).square().mean().backward()
        assert all(parameter.grad is None for parameter in chosen)
        assert plain.grad is not None, "it has no optimizer, so its gradient is the user's"
        assert everywhere_equal([plain.grad])
    assert everywhere_equal(weights(model))
    assert close(weights(model), stepped_after(rank, *OPTIMIZERS[0], channels_last, all_but_the_last, 6), 1e-5)


@pytest.mark.parametrize("as_view", [False, True], ids=["", "gradients as bucket views"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
def test_optimizers_in_backward(as_view: bool, channels_last: bool) -> None:
    ranks(2, optimizers_of_parameters, as_view, channels_last)


def given_before(rank: int) -> str:
    """The way of torch's documentation: DDP registers torch's hook by itself."""
    layers = convolutions()
    _apply_optimizer_in_backward(torch.optim.SGD, layers.parameters(), {"lr": 0.05})
    model = DistributedDataParallel(layers)
    try:
        model(images(rank, 0)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.soak
def test_torchs_own_needs_an_accelerator() -> None:
    (error,) = ranks(1, given_before)
    assert error
