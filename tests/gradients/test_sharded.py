"""Gradients of sharded models: averaged between islands they are DDP's, in every mode of FSDP2."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import laconic
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
