"""Plain averaging, and 16 bits: torch's and ours."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.compat._hooks import traffic
from tests.compat.libraries import averaged as averaged_by
from tests.compat.libraries import both, but_torch, close, linear, mean, module, noise
from tests.live import ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights

SHAPES = ((40, 30), (7,), (), (30, 20), (9,))


def one_backward(rank: int, world: int, library: str, hook: str, tolerance: float, given: bool) -> None:
    model = linear(*SHAPES)
    state = dist.new_group(range(world)) if given else None
    model.register_comm_hook(state, getattr(module(library, "ddp_comm_hooks.default_hooks"), hook))
    for step in range(3):
        found = averaged_by(model, noise(10 * step + rank, *SHAPES))
        wanted = mean(lambda rank, step=step: noise(10 * step + rank, *SHAPES), world)  # type: ignore[misc]
        assert close(found, wanted, tolerance)
        assert everywhere_equal(found)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("given", [False, True], ids=["no group", "a group"])
@pytest.mark.parametrize(("hook", "tolerance"), [("allreduce_hook", 1e-6), ("fp16_compress_hook", 2e-3)])
@both
def test_the_mean(world: int, library: str, hook: str, tolerance: float, given: bool) -> None:
    ranks(world, one_backward, world, library, hook, tolerance, given)


@but_torch("DDP refuses a hook of this name without NCCL")
def test_bf16_works_on_gloo(library: str) -> None:
    ranks(3, one_backward, 3, library, "bf16_compress_hook", 2e-2, False)


def test_bf16_can_still_be_found_by_its_name() -> None:
    hooks = module("laconic", "ddp_comm_hooks.default_hooks")
    assert pickle.loads(pickle.dumps(hooks.bf16_compress_hook)) is hooks.bf16_compress_hook


def as_without_a_hook(rank: int, library: str) -> None:
    final = []
    for hooked in (False, True):
        model = build(chain)
        if hooked:
            model.register_comm_hook(None, module(library, "ddp_comm_hooks.default_hooks").allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(10):
            model(vectors(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        final.append(weights(model))
    assert same_bits(*final)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_allreduce_is_ddp_to_the_bit(world: int) -> None:
    ranks(world, as_without_a_hook, "laconic")


@but_torch("divides by N where DDP multiplies by 1/N")
def test_allreduce_is_ddp_to_the_bit_at_three(library: str) -> None:
    ranks(3, as_without_a_hook, library)


def sums(rank: int, world: int, library: str) -> None:
    """Values whose 16-bit sums round at each addition: 1 and many small ones."""
    model = linear((world * 8,))
    model.register_comm_hook(None, module(library, "ddp_comm_hooks.default_hooks").fp16_compress_hook)
    gradient = torch.full((world * 8,), 1.0 if rank == 0 else 2.0**-11)
    (found,) = averaged_by(model, [gradient])
    exact = (1 + (world - 1) * 2.0**-11) / world
    assert torch.equal(found, torch.full_like(found, exact).half().float())


@but_torch("adds in fp16, where a small number vanishes beside a large one each time")
def test_sixteen_bits_are_summed_in_32(library: str) -> None:
    ranks(4, sums, 4, library)


def large(rank: int, library: str, wrapped: bool) -> None:
    hooks = module(library, "ddp_comm_hooks.default_hooks")
    model = linear((16, 16), (5,))
    state: Any = None
    hook = hooks.fp16_compress_hook
    if wrapped:
        power = module(library, "ddp_comm_hooks.powerSGD_hook")
        state = power.PowerSGDState(None, 1, 2, min_compression_rate=1)
        hook = hooks.fp16_compress_wrapper(power.powerSGD_hook)
    model.register_comm_hook(state, hook)
    gradients = [torch.full((16, 16), 1e3), torch.full((5,), 5e4)]
    for _ in range(4):
        found = averaged_by(model, gradients)
    assert close(found, gradients, 2e-3)


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, id="inside PowerSGD")])
def test_an_fp16_mean_of_5e4(wrapped: bool) -> None:
    ranks(2, large, "laconic", wrapped)


@but_torch("sums before it divides, and 1e5 is no fp16 number")
def test_an_fp16_mean_of_5e4_inside_powersgd(library: str) -> None:
    ranks(2, large, library, True)


def wrapped(rank: int, library: str, wrapper: str, hook: str) -> None:
    hooks, debugging = (module(library, f"ddp_comm_hooks.{name}") for name in ("default_hooks", "debugging_hooks"))
    inner = getattr(debugging if hook == "noop_hook" else hooks, hook)
    seen: list[torch.dtype] = []

    def watching(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        def watch(future: torch.futures.Future[Tensor]) -> Tensor:
            seen.append(future.value().dtype)
            return future.value()

        outer: torch.futures.Future[Tensor] = getattr(hooks, wrapper)(inner)(state, bucket)
        return outer.then(watch)

    model = linear(*SHAPES)
    model.register_comm_hook(None, watching)
    found = averaged_by(model, noise(rank, *SHAPES))
    wanted = noise(rank, *SHAPES) if hook == "noop_hook" else mean(lambda rank: noise(rank, *SHAPES), 2)
    assert close(found, wanted, 2e-2)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("wrapper", ["fp16_compress_wrapper", "bf16_compress_wrapper"])
@pytest.mark.parametrize("hook", ["allreduce_hook", "fp16_compress_hook", "noop_hook"])
def test_wrappers_give_the_dtype_back(wrapper: str, hook: str) -> None:
    ranks(2, wrapped, "laconic", wrapper, hook)


def rounded(rank: int) -> None:
    """Alone, what a hook gives back is the gradient in the wire's dtype: numbers too fine for bf16, too large for fp16."""
    hooks, noop = (
        module("laconic", "ddp_comm_hooks.default_hooks"),
        module("laconic", "ddp_comm_hooks.debugging_hooks").noop_hook,
    )
    gradient = torch.tensor([1 + 2.0**-9, 1e-3, -7.7, 1e6])
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        for hook in (getattr(hooks, f"{name}_compress_hook"), getattr(hooks, f"{name}_compress_wrapper")(noop)):
            model = linear((4,))
            model.register_comm_hook(None, hook)
            (found,) = averaged_by(model, [gradient])
            assert torch.equal(found, gradient.to(dtype).float()), name


def test_each_name_has_its_sixteen_bits() -> None:
    ranks(1, rounded)


@but_torch("hands out the 16-bit buffer")
def test_a_wrapper_gives_the_dtype_back(library: str) -> None:
    ranks(2, wrapped, library, "fp16_compress_wrapper", "allreduce_hook")


def part_of_the_job(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = linear(*SHAPES, process_group=groups[rank // 2])
    model.register_comm_hook(None, module("laconic", "ddp_comm_hooks.default_hooks").fp16_compress_hook)
    if rank >= 2:  # the others do nothing at all
        found = averaged_by(model, noise(rank, *SHAPES))
        assert close(found, mean(lambda rank: noise(rank + 2, *SHAPES), 2), 2e-3)


def test_a_ddp_of_some_ranks_needs_no_state() -> None:
    ranks(4, part_of_the_job)


def two_models(rank: int) -> None:
    """Two DDPs under one loss, their buckets interleaved, and one module wrapped again."""
    hooks = module("laconic", "ddp_comm_hooks.default_hooks")
    models = [build(partial(chain, 4)), build(partial(chain, 4))]
    for model in models:
        model.register_comm_hook(None, hooks.bf16_compress_hook)
    for step in range(3):
        losses: list[Tensor] = [model(vectors(rank, step)).square().sum() for model in models]
        torch.autograd.backward(losses)
        assert all(everywhere_equal([p.grad for p in model.parameters() if p.grad is not None]) for model in models)
        assert same_bits(*[[p.grad for p in model.parameters() if p.grad is not None] for model in models])
    again = DistributedDataParallel(models[0].module, bucket_cap_mb=0.01)
    again.register_comm_hook(None, hooks.fp16_compress_hook)
    again.zero_grad()
    again(vectors(rank, 5)).square().sum().backward()
    assert everywhere_equal([p.grad for p in again.parameters() if p.grad is not None])


def test_several_models_and_a_module_wrapped_twice() -> None:
    ranks(2, two_models)


def counted(rank: int) -> None:
    model = linear((1000,))
    model.register_comm_hook(None, module("laconic", "ddp_comm_hooks.default_hooks").bf16_compress_hook)
    averaged_by(model, noise(rank, (1000,)))
    assert traffic(model).total.wire_bytes == 2000


def test_bytes() -> None:
    ranks(2, counted)


def wrong_state(rank: int) -> None:
    model = linear((3,))
    model.register_comm_hook("fp16", module("laconic", "ddp_comm_hooks.default_hooks").fp16_compress_hook)
    with pytest.raises(TypeError, match="None or a process group, got str"):
        averaged_by(model, noise(rank, (3,)))


def test_a_state_that_is_no_group_is_refused() -> None:
    ranks(1, wrong_state)


def uneven(rank: int, library: str) -> None:
    model = linear(*SHAPES)
    model.register_comm_hook(None, module(library, "ddp_comm_hooks.default_hooks").fp16_compress_hook)
    with model.join():
        for step in range(2 + rank):
            averaged_by(model, noise(step, *SHAPES))


@both
def test_join_of_uneven_loaders(library: str) -> None:
    ranks(2, uneven, library)
