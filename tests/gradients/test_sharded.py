"""Gradients of sharded models: averaged between islands they are DDP's, in every mode of FSDP2."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import laconic
from laconic._torch.fsdp import shard_groups
from laconic.run.run import engine_of
from tests.islands import (
    Small,
    adam,
    far,
    full,
    island_mesh,
    loss,
    momentum,
    same_on_islands,
    sgd,
    shard,
    sharded,
    shards,
    small,
    step_once,
    tokens,
    whole,
)
from tests.live import ranks
from tests.models import same_bits

GRIDS = [(4, 2), (6, 3), (6, 2)]  # ranks, islands
STEPS = 20


def beside_ddp(rank: int, islands: int, text: str, bound: float) -> None:
    model, optimizer, mesh = sharded(islands, sgd)
    other, others = whole(sgd)
    before = full(model)
    with laconic.attach(model, optimizer, text, mesh=mesh):
        for step in range(STEPS):
            step_once(model, optimizer, rank, step)
            step_once(other, others, rank, step)
            assert same_on_islands(shards(model), mesh), f"islands differ after step {step}"
    assert far(model, other.module) < bound
    after = full(model)
    assert all(not torch.equal(before[name], after[name]) for name in before if name != "positions"), "something was learnt"
    assert torch.equal(before["positions"], after["positions"])


MANY = [pytest.param(*grid, text, marks=pytest.mark.soak) for grid in GRIDS[1:] for text in ("ddp()", "local_sgd(1)")]


@pytest.mark.parametrize(("world", "islands", "text"), [(4, 2, "ddp()"), (4, 2, "local_sgd(1)"), *MANY])
def test_islands_are_ddp_over_all_ranks(world: int, islands: int, text: str) -> None:
    ranks(world, beside_ddp, islands, text, 1e-6)


def beside_fsdp(rank: int, text: str, inner: Any) -> None:
    """One island: nothing is averaged, and no bit may change."""
    ours, our_optimizer, mesh = sharded(1, inner)
    plain, optimizer, _ = sharded(1, inner)
    with laconic.attach(ours, our_optimizer, text, mesh=mesh) as run:
        for step in range(8):
            step_once(ours, our_optimizer, rank, step)
            step_once(plain, optimizer, rank, step)
            assert same_bits(shards(ours), shards(plain)), f"step {step}"
    assert run.stats().wire_bytes == 0


@pytest.mark.parametrize("text", ["ddp()", "local_sgd(2)"])
def test_one_island_is_plain_fsdp2_to_the_bit(text: str) -> None:
    ranks(2, beside_fsdp, text, adam)


# What FSDP2 can be told, and the bound on the distance from DDP after 8 steps.
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "kept gathered": ({"reshard_after_forward": False}, 1e-6),
    "resharded": ({"reshard_after_forward": True}, 1e-6),
    "bf16, reduced in fp32": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 2e-2),
    "bf16, reduced in bf16": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}, 2e-2),
    "reduced in fp16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, 5e-3),
    "reduced in fp64": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, 1e-6),
}


def by_mode(rank: int, mode: str, native: bool) -> None:
    """Ours beside torch's own HSDP of the same mode, or beside DDP."""
    options, bound = MODES[mode]
    ours, optimizer, mesh = sharded(2, momentum, **options)
    if native:
        other: Any = shard(small(), mesh, **options)
        others = momentum(other)
    else:
        other, others = whole(momentum)
    with laconic.attach(ours, optimizer, "ddp()", mesh=mesh) as run:
        for step in range(8):
            step_once(ours, optimizer, rank, step)
            step_once(other, others, rank, step)
            assert same_on_islands(shards(ours), mesh)
        dtype = options["mp_policy"].reduce_dtype if "mp_policy" in options else torch.float32
        sent = laconic.predict("ddp()", ours, world_size=2)
        assert run.stats().wire_bytes == 8 * sent.wire_bytes
        numbers = sum(shard.numel() for shard, p in zip(shards(ours), ours.parameters(), strict=True) if p.requires_grad)
        assert sent.payload_bytes == numbers * dtype.itemsize
    # torch adds islands in another order than we do; with 16 bits that shows.
    assert far(ours, other if native else other.module) < bound


QUICK = [("resharded", True), ("bf16, reduced in bf16", True), ("reduced in fp16", False), ("bf16, reduced in fp32", False)]
OTHERS = [(mode, native) for mode in MODES for native in (True, False) if (mode, native) not in QUICK]


def test_what_fsdp_divides_by_after_the_hook() -> None:
    """Of three shards, reduced in fp64, it divides after the sum as well as before."""
    ranks(6, by_mode, "reduced in fp64", False)


@pytest.mark.parametrize(("mode", "native"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.soak) for one in OTHERS)])
def test_modes_of_fsdp2(mode: str, native: bool) -> None:
    ranks(4, by_mode, mode, native)


def accumulating(rank: int, how: str) -> None:
    """Three parts of a batch, of which the gradients are averaged once, or each time."""
    ours, optimizer, mesh = sharded(2, sgd)
    other, others = whole(sgd)
    parts = 3
    with laconic.attach(ours, optimizer, "ddp()", mesh=mesh) as run:
        for step in range(6):
            for part in range(parts):
                last = part == parts - 1
                if how == "no sync":
                    ours.set_requires_gradient_sync(last)
                elif how == "no all-reduce":
                    ours.set_requires_all_reduce(last)
                for model in (ours, other):
                    loss(model, tokens(rank, parts * step + part)).backward()  # type: ignore[no-untyped-call]
            for one in (optimizer, others):
                one.step()
                one.zero_grad()
            assert same_on_islands(shards(ours), mesh)
        assert run.stats().exchanges == 6 * (parts if how == "each" else 1)
    assert far(ours, other.module) < 1e-6


@pytest.mark.parametrize("how", ["no sync", "no all-reduce", "each"])
def test_gradients_are_accumulated(how: str) -> None:
    ranks(4, accumulating, how)


class Twice(Small):
    """Each block is used twice in a forward, so that FSDP reduces it twice in a backward."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch) + self.positions
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def used_twice(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    mesh = island_mesh(2)
    torch.manual_seed(0)
    ours = shard(Twice(), mesh["shard"])
    torch.manual_seed(0)
    other = DistributedDataParallel(Twice())
    optimizer, others = sgd(ours), sgd(other)
    with laconic.attach(ours, optimizer, "ddp()", mesh=mesh) as run:
        for step in range(6):
            step_once(ours, optimizer, rank, step)
            step_once(other, others, rank, step)
        assert run.stats().wire_bytes == 6 * laconic.predict("ddp()", ours, world_size=2).wire_bytes
    assert far(ours, other.module) < 1e-6


def test_a_module_that_is_used_twice_is_averaged_once() -> None:
    ranks(4, used_twice)


def checkpointed(rank: int, compiled: bool) -> None:
    """Activations that are computed again, or blocks that are compiled, change nothing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = island_mesh(2)
    model = small()
    for place, block in enumerate(model.blocks):
        if compiled:
            block.compile(backend="aot_eager")
        else:
            model.blocks[place] = checkpoint_wrapper(block)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = sgd(model)
    other, others = whole(sgd)
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh):
        for step in range(4):
            step_once(model, optimizer, rank, step)
            step_once(other, others, rank, step)
    theirs, mine = full(other.module), full(model)
    pairs = zip(mine.values(), theirs.values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-6


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["recomputed", "compiled"])
def test_recomputed_and_compiled_blocks(compiled: bool) -> None:
    ranks(4, checkpointed, compiled)


class Reentrant(Small):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def reentrant(rank: int) -> None:
    """A backward of its own for each block, inside the backward."""
    mesh = island_mesh(2)
    torch.manual_seed(0)
    model = shard(Reentrant(), mesh["shard"])
    optimizer = sgd(model)
    other, others = whole(sgd)
    with laconic.attach(model, optimizer, "ddp(reducer=ErrorFeedback(Exact()))", mesh=mesh) as run:
        for step in range(4):
            step_once(model, optimizer, rank, step)
            step_once(other, others, rank, step)
        assert run.stats().exchanges == 4
    assert far(model, other.module) < 1e-6


def test_reentrant_checkpoints() -> None:
    ranks(4, reentrant)


def clipped(rank: int) -> None:
    ours, optimizer, mesh = sharded(2, momentum)
    other, others = whole(momentum)
    with laconic.attach(ours, optimizer, "ddp()", mesh=mesh):
        for step in range(6):
            norms = []
            for model, stepper in ((ours, optimizer), (other, others)):
                loss(model, tokens(rank, step)).backward()  # type: ignore[no-untyped-call]
                norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                stepper.step()
                stepper.zero_grad()
            assert abs(norms[0] - norms[1]) < 1e-5 * norms[1]
            assert norms[1] > 0.3, "something is clipped"
    assert far(ours, other.module) < 2e-6


def test_the_norm_of_averaged_gradients_is_clipped() -> None:
    ranks(4, clipped)


class Skips(Small):
    skipped = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch) + self.positions
        for block in self.blocks[1:] if self.skipped else self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x) if not self.skipped else x)
        return out


def unused(rank: int, filled: bool) -> str:
    mesh = island_mesh(2)
    torch.manual_seed(0)
    model: Any = shard(Skips(), mesh["shard"])
    optimizer = sgd(model)
    run = laconic.attach(model, optimizer, "ddp()", mesh=mesh)
    step_once(model, optimizer, rank, 0)
    if filled:
        model.set_reduce_scatter_unused_params(True)
    model.skipped = True
    if filled:
        step_once(model, optimizer, rank, 1)
        run.detach()
        return ""
    with pytest.raises(RuntimeError, match="set_reduce_scatter_unused_params") as caught:
        loss(model, tokens(rank, 1)).backward()  # type: ignore[no-untyped-call]
    run.detach()
    return str(caught.value)


def test_parameters_without_a_gradient_are_named_by_their_module() -> None:
    assert all("the root got no gradient" in text or "some parameters of the root" in text for text in ranks(4, unused, False))
    ranks(4, unused, True)


def nan_on_one_rank(rank: int) -> None:
    """What is not finite comes out so on all islands, and no shard's memory moves; the next step is clean."""
    model, optimizer, mesh = sharded(2, sgd)
    text = "ddp(reducer=ErrorFeedback(TopK(0.2)))"
    with laconic.attach(model, optimizer, text, mesh=mesh) as run:
        for step in range(2):
            step_once(model, optimizer, rank, step)
        memory = {name: {k: v.clone() for k, v in slot.items()} for name, slot in engine_of(run).memory.items()}
        kept = shards(model)
        value = loss(model, tokens(rank, 2))
        (value * (float("nan") if rank == 3 else 1.0)).backward()  # type: ignore[no-untyped-call]
        assert any(not p.grad.to_local().isfinite().all() for p in model.parameters() if p.grad is not None)
        for name, slot in engine_of(run).memory.items():
            for key, value in slot.items():
                assert torch.equal(value, memory[name][key]), f"{key} of {name} has moved"
        optimizer.zero_grad()
        assert same_bits(kept, shards(model))
        for step in range(3, 6):
            step_once(model, optimizer, rank, step)
            assert same_on_islands(shards(model), mesh)
        assert all(shard.isfinite().all() for shard in shards(model))


def test_what_is_not_finite_moves_no_memory_on_any_shard() -> None:
    ranks(4, nan_on_one_rank)


def nan_in_one_shard(rank: int) -> None:
    """A gradient that is not finite on one shard alone: the other shard's memory must not move either."""
    model, optimizer, mesh = sharded(2, sgd)
    with laconic.attach(model, optimizer, "ddp(reducer=ErrorFeedback(TopK(0.2)))", mesh=mesh) as run:
        for step in range(2):
            step_once(model, optimizer, rank, step)
        memory = {name: {k: v.clone() for k, v in slot.items()} for name, slot in engine_of(run).memory.items()}
        group = shard_groups(model)[0]
        ours: Any = group.hook

        def spoilt(output: torch.Tensor) -> None:
            output[0] += float("nan") if rank == 3 else 0.0
            ours(output)

        group.set_hook(spoilt)
        loss(model, tokens(rank, 2)).backward()  # type: ignore[no-untyped-call]
        group.set_hook(ours)
        for name, slot in engine_of(run).memory.items():
            assert all(torch.equal(value, memory[name][key]) for key, value in slot.items()), f"{name} has moved"
        optimizer.zero_grad()
        step_once(model, optimizer, rank, 3)


def test_what_is_not_finite_on_one_shard_moves_no_memory() -> None:
    ranks(4, nan_in_one_shard)


def scaled(rank: int) -> None:
    """A GradScaler skips a step on all islands where one rank overflows, and residuals are in units of the plain loss."""
    model, optimizer, mesh = sharded(2, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    text = "ddp(reducer=ErrorFeedback(TopK(0.2)))"
    with laconic.attach(model, optimizer, text, mesh=mesh, scaler=scaler, check_every=1) as run:
        for step in range(6):
            kept = shards(model)
            scaler.scale(loss(model, tokens(rank, step)) * (float("inf") if (rank, step) == (3, 3) else 1.0)).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert same_bits(kept, shards(model)) == (step == 3)
            assert same_on_islands(shards(model), mesh)
        assert run.stats().steps == 6


def test_a_grad_scaler_skips_on_all_islands() -> None:
    ranks(4, scaled)


class Pair(nn.Module):
    """Two models that are sharded apart, in a container that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def two_roots(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    mesh = island_mesh(2)
    torch.manual_seed(0)
    model = Pair()
    torch.manual_seed(0)
    other = DistributedDataParallel(Pair())
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh["shard"])
    optimizer, others = sgd(model), sgd(other)
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh):
        for step in range(4):
            for each, stepper in ((model, optimizer), (other, others)):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                each(x).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
    assert far(model, other.module) < 1e-6


def test_two_models_that_are_sharded_apart() -> None:
    ranks(4, two_roots)


def frozen_and_unfrozen(rank: int) -> None:
    """What is trained may change: gradients are averaged of what is trained in a backward."""
    mesh = island_mesh(2)
    model, other = small(), small()
    for one in (model, other):
        one.blocks[0].mlp.requires_grad_(False)
    shard(model, mesh["shard"])
    plain = shard(other, mesh)  # torch's own HSDP
    optimizer, others = sgd(model), sgd(plain)
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh):
        for step in range(6):
            for one in (model, other):
                one.blocks[0].mlp.requires_grad_(step >= 2)
                one.blocks[1].mlp.requires_grad_(step < 4)
            step_once(model, optimizer, rank, step)
            step_once(plain, others, rank, step)
            assert same_on_islands(shards(model), mesh), f"step {step}"
    assert far(model, plain) < 1e-6


def test_modules_that_are_frozen_and_unfrozen() -> None:
    ranks(4, frozen_and_unfrozen)


def given_back(rank: int) -> None:
    """Gradients that were only added up are the island's own again, where the next step averages none."""
    model, optimizer, mesh = sharded(2, sgd)
    plain, _, _ = sharded(2, sgd)
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh) as run:
        model.set_requires_all_reduce(False)
        loss(model, tokens(rank, 0)).backward()  # type: ignore[no-untyped-call]
        run.swap("local_sgd(4)")
        model.set_requires_all_reduce(True)
        loss(model, tokens(rank, 1)).backward()  # type: ignore[no-untyped-call]
        for step in range(2):
            loss(plain, tokens(rank, step)).backward()  # type: ignore[no-untyped-call]
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if mine.requires_grad:
                assert torch.allclose(mine.grad.to_local(), theirs.grad.to_local(), rtol=1e-5, atol=1e-7)
        run.detach()


def test_added_up_gradients_are_not_lost_in_a_swap() -> None:
    ranks(4, given_back)


def replaced(rank: int) -> None:
    model, optimizer, mesh = sharded(2, sgd)
    run = laconic.attach(model, optimizer, "ddp()", mesh=mesh)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="a parameter was replaced after attach"):
        loss(model, tokens(rank, 0)).backward()  # type: ignore[no-untyped-call]
    run.detach()


def test_parameters_that_are_replaced_are_told() -> None:
    ranks(4, replaced)


def detached(rank: int) -> None:
    """After the run it is plain FSDP2 again: islands go apart."""
    model, optimizer, mesh = sharded(2, sgd)
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh):
        step_once(model, optimizer, rank, 0)
    step_once(model, optimizer, rank, 1)
    assert not same_on_islands(shards(model), mesh)
    with torch.no_grad():
        loss(model, tokens(rank, 0))  # the root is gathered now
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh):
        assert same_on_islands(shards(model), mesh), "attached again, islands begin with the first one's numbers"
        step_once(model, optimizer, rank, 2)
        assert same_on_islands(shards(model), mesh)


def test_after_the_run_it_is_plain_fsdp2() -> None:
    ranks(4, detached)


def a_failed_backward(rank: int) -> None:
    """A backward that fails half-way, with exchanges outstanding, leaves nothing behind."""
    model, optimizer, mesh = sharded(2, sgd)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("half-way")

    def fail_behind(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)  # type: ignore[no-untyped-call]

    text = "ddp(reducer=ErrorFeedback(TopK(0.2)))"
    with laconic.attach(model, optimizer, text, mesh=mesh) as run:
        for step in range(2):
            step_once(model, optimizer, rank, step)
        memory = {name: {k: v.clone() for k, v in slot.items()} for name, slot in engine_of(run).memory.items()}
        handle = model.blocks[0].register_forward_hook(fail_behind)
        with pytest.raises(KeyError, match="half-way"):
            loss(model, tokens(rank, 2)).backward()  # type: ignore[no-untyped-call]
        handle.remove()
        model.reset_iter_state()
        optimizer.zero_grad()
        for name, slot in engine_of(run).memory.items():
            assert all(torch.equal(value, memory[name][key]) for key, value in slot.items())
        for step in range(3, 6):
            step_once(model, optimizer, rank, step)
            assert same_on_islands(shards(model), mesh)
        assert run.stats().exchanges == 5


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    ranks(4, a_failed_backward)
