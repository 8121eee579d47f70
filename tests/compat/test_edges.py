"""Ways of using DDP that a hook must bear: uneven loaders, fused optimizers, modules wrapped twice, sparse gradients."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from laconic.compat import _bucket_owner as _owner
from tests.compat.libraries import Linear, averaged, both, close, linear, module, noise
from tests.compat.test_optimizer_overlap import convolutions, images
from tests.live import last_ranks, ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights

POWER, LOCAL = "ddp_comm_hooks.powerSGD_hook", "ddp_comm_hooks.post_localSGD_hook"


def default(library: str = "laconic") -> Any:
    return module(library, "ddp_comm_hooks.default_hooks")


# Counting steps


def joined(rank: int, library: str, kind: str) -> int:
    model = linear((24, 18), (7,))
    if kind == "power":
        state = module(library, POWER).PowerSGDState(None, 1, start_powerSGD_iter=5, min_compression_rate=1)
        model.register_comm_hook(state, module(library, POWER).powerSGD_hook)
    else:
        state = module(library, LOCAL).PostLocalSGDState(None, dist.group.WORLD, 5)
        model.register_comm_hook(state, module(library, LOCAL).post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 if rank == 0 else 8):
            model(*noise(10 * step + rank, (24, 18), (7,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert everywhere_equal(weights(model))
    return int(state.iter)


@pytest.mark.parametrize("kind", ["power", "post-local"])
def test_ranks_that_have_joined_go_on_counting(kind: str) -> None:
    assert ranks(2, joined, "laconic", kind) == [8, 8]


def counted(rank: int, library: str, options: dict[str, Any], late_reset: bool, compiled: bool) -> int:
    model = linear((24, 18))
    state = module(library, POWER).PowerSGDState(None, 1, start_powerSGD_iter=3, min_compression_rate=1)
    model.register_comm_hook(state, module(library, POWER).powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{k: v for k, v in options.items() if k != "by hand"})
    called: Any = torch.compile(model, backend="eager") if compiled else model
    for step in range(8):
        if not late_reset:
            optimizer.zero_grad()
        loss = called(*noise(step, (24, 18)))
        if late_reset:
            optimizer.zero_grad()
        loss.backward()
        if "by hand" in options:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
        else:
            optimizer.step()
    return int(state.iter)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"by hand": True}], ids=str)
@pytest.mark.parametrize("late_reset", [False, True], ids=["", "zero_grad after the forward"])
@both
def test_every_optimizer_counts(library: str, options: dict[str, Any], late_reset: bool) -> None:
    assert ranks(1, counted, library, options, late_reset, False) == [8]


def test_a_compiled_ddp_counts() -> None:
    assert ranks(1, counted, "laconic", {"fused": True}, True, True) == [8]


# Whose bucket it is


def rewrapped(rank: int, library: str) -> None:
    """An older DDP of the same module, with other ranks, is still there, and is used again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = Linear((400,), (400,), (400,))
    one = DistributedDataParallel(layer, bucket_cap_mb=0.001)
    two = DistributedDataParallel(layer, process_group=pairs[rank // 2], bucket_cap_mb=0.001)
    mine: Any = [None, pairs[rank // 2]] if library == "torch" else [None, None]
    for model, group in zip((one, two), mine, strict=True):
        model.register_comm_hook(group, default(library).allreduce_hook)
    for model, wanted in ((one, 1.5), (two, rank // 2 * 2 + 0.5), (two, rank // 2 * 2 + 0.5), (one, 1.5)):
        found = averaged(model, [torch.full((400,), float(rank))] * 3)  # from its second backward on, in three buckets
        assert close(found, [torch.full((400,), wanted)] * 3)


@both
def test_a_module_in_two_ddps(library: str) -> None:
    ranks(4, rewrapped, library)


class Empty(nn.Linear):
    def __len__(self) -> int:
        return 0


def found(rank: int) -> None:
    model = DistributedDataParallel(Empty(3, 2))
    model.register_comm_hook(None, default().bf16_compress_hook)
    model(torch.ones(1, 3)).sum().backward()

    # A hook of a user's own, with a state that ours never sees: the DDP is looked up once, not for each bucket.
    class Mine:
        process_group = None

    def hook(state: Mine, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = default().bf16_compress_hook(state.process_group, bucket)
        return future

    model = build(chain)
    model.register_comm_hook(Mine(), hook)
    searches = []
    search = _owner._search

    def counting(parameter: Tensor, state: object) -> list[_owner.Watch]:
        searches.append(state)
        return search(parameter, state)

    try:
        _owner._search = counting
        for step in range(4):
            model(vectors(rank, step)).sum().backward()
            model.zero_grad()
    finally:
        _owner._search = search
    assert len(searches) == 1


def test_the_ddp_is_looked_up_once() -> None:
    ranks(1, found)


# Futures


def waiting_and_mixing(rank: int, library: str) -> None:
    hooks = default(library)

    def waiting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = hooks.allreduce_hook(state, bucket)
        future.wait()
        return future

    def mixing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        hook = hooks.allreduce_hook if bucket.index() % 2 else hooks.fp16_compress_hook
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        return future

    def other_at_the_end(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        hook = hooks.allreduce_hook if bucket.is_last() or bucket.index() == 0 else hooks.fp16_compress_hook
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        return future

    for hook in (waiting, mixing, other_at_the_end):
        model, plain = build(chain), build(chain)
        model.register_comm_hook(None, hook)
        for step in range(3):
            for each in (model, plain):
                each.zero_grad()
                each(vectors(rank, step)).square().mean().backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(torch.allclose(a.grad, b.grad, atol=2e-3) for a, b in pairs if a.grad is not None and b.grad is not None)
            assert everywhere_equal([p.grad for p in model.parameters() if p.grad is not None])


@both
def test_waiting_and_mixing(library: str) -> None:
    ranks(2, waiting_and_mixing, library)


def two_compressors(rank: int) -> None:
    hooks = default()

    def mixing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        hook = hooks.bf16_compress_hook if bucket.index() % 2 else hooks.fp16_compress_hook
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        return future

    model = build(chain)
    model.register_comm_hook(None, mixing)
    model(vectors(rank, 0)).sum().backward()  # one bucket at first
    with pytest.raises(ValueError, match="use one hook for all"):
        model(vectors(rank, 1)).sum().backward()


def test_two_compressors_in_one_backward_are_refused() -> None:
    last_ranks(2, two_compressors)


def skipping(rank: int) -> None:
    model = build(chain, find_unused_parameters=True, skip_all_reduce_unused_params=True)
    model.register_comm_hook(None, default().bf16_compress_hook)
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params=True leaves buckets out"):
        model(vectors(rank, 0)).sum().backward()


def test_a_ddp_that_leaves_buckets_out_is_refused() -> None:
    ranks(1, skipping)


# Dtypes and layouts


def sparse(rank: int, library: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    model.register_comm_hook(None, default(library).allreduce_hook)
    model(torch.tensor([rank, 5])).sum().backward()
    found = model.module.weight.grad
    assert isinstance(found, Tensor)
    wanted = torch.zeros(10, 3)
    wanted[0], wanted[1], wanted[5] = 0.5, 0.5, 1.0
    assert torch.equal(found.to_dense(), wanted)


@both
def test_sparse_gradients(library: str) -> None:
    ranks(2, sparse, library)


def sparse_compressed(rank: int) -> None:
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    model.register_comm_hook(None, default().bf16_compress_hook)
    with pytest.raises(TypeError, match="can't compress sparse gradients"):
        model(torch.tensor([rank, 5])).sum().backward()


def test_sparse_gradients_are_not_compressed() -> None:
    ranks(1, sparse_compressed)


def doubles(rank: int, library: str) -> None:
    model = DistributedDataParallel(nn.Linear(18, 24).double())
    state = module(library, POWER).PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, module(library, POWER).powerSGD_hook)
    for step in range(4):
        model.zero_grad()
        x = torch.randn(5, 18, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        model(x * (1 + rank / 3)).sum().backward()
        state.iter = step + 1
    assert torch.equal(model.module.bias.grad, torch.full((24,), 5.0, dtype=torch.double))
    x = torch.stack([x * (1 + each / 3) for each in range(2)]).mean(0)
    # All rows of the weight's gradient are alike: rank 1 is exact.
    assert torch.allclose(model.module.weight.grad, x.sum(0).expand(24, 18), rtol=1e-12)


def test_powersgd_in_double_precision() -> None:
    ranks(2, doubles, "laconic")


# PowerSGD's memory


def memory(rank: int) -> None:
    power = module("laconic", POWER)
    state = power.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    model = linear((24, 18))
    model.register_comm_hook(state, power.powerSGD_hook)
    for step in range(4):
        averaged(model, noise(step, (24, 18)))
    saved = state.state_dict()
    kept = saved["memory"]["weights.0"]["error"].clone()
    averaged(model, noise(8, (24, 18)))
    assert torch.equal(saved["memory"]["weights.0"]["error"], kept), "training doesn't write into what was saved"
    state.load_state_dict(saved)
    one = averaged(model, noise(9, (24, 18)))
    assert torch.equal(saved["memory"]["weights.0"]["error"], kept), "training doesn't write into what was loaded"
    state.load_state_dict(saved)
    assert same_bits(one, averaged(model, noise(9, (24, 18))))
    state.error_dict["weights.0"] = torch.zeros(24, 18)
    assert len(state.error_dict) == 1
    state.error_dict.clear()
    assert not state.state_dict()["memory"]["weights.0"].get("error")
    state.error_dict = {"weights.0": kept}
    assert torch.equal(state.error_dict["weights.0"], kept)
    del model
    state.load_state_dict(saved)  # its DDP has gone
    model = linear((24, 18))
    model.register_comm_hook(state, power.powerSGD_hook)
    assert close(averaged(model, noise(9, (24, 18))), one, 1e-6)


def test_memory_can_be_read_and_changed() -> None:
    ranks(1, memory)


def rescaled(rank: int, given: bool, enabled: bool = True) -> float:
    """Conservation under a loss scale that falls by 1024 midway: how much is missing, in the unscaled loss's units."""
    power = module("laconic", POWER)
    state = power.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    state.grad_scaler = scaler if given else None
    model = linear((24, 18))
    model.register_comm_hook(state, power.powerSGD_hook)
    applied, truth = torch.zeros(24, 18), torch.zeros(24, 18)
    for step in range(20):
        if step == 10:
            scaler.update(1.0)
        model.zero_grad()
        scaler.scale(model(*noise(step, (24, 18)))).backward()
        applied += model.module.weights[0].grad / scaler.get_scale()
        truth += noise(step, (24, 18))[0]
    return float((applied + state.error_dict["weights.0"] - truth).norm() / truth.norm())


def test_a_loss_scale_that_changes() -> None:
    assert ranks(1, rescaled, True)[0] < 1e-4
    assert ranks(1, rescaled, True, False)[0] < 1e-4, "a scaler that is switched off"
    assert ranks(1, rescaled, False)[0] > 1, "without being told of the scaler, it is torch's behaviour"


# Averagers


def foreign_averager(rank: int) -> None:
    """torch's averager in our optimizer."""
    theirs = module("torch", "model_averaging.averagers").PeriodicModelAverager(period=2)
    parameter = nn.Parameter(torch.full((3,), float(rank)))
    optimizer = module("laconic", "optim").PostLocalSGDOptimizer(torch.optim.SGD([parameter], lr=0.0), theirs)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((3,), 0.5))
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 1.0}]
    assert optimizer.optim.param_groups[0]["lr"] == 1.0


def test_torchs_averager_in_our_optimizer() -> None:
    ranks(2, foreign_averager)


def unlike_in_a_hierarchy(rank: int) -> None:
    hierarchical = module("laconic", "model_averaging.hierarchical_model_averager")
    averager = hierarchical.HierarchicalModelAverager({1: 2, 2: 4})
    with pytest.raises(ValueError, match=r"rank 2 has parameter 0: torch.float32 \(4,\), rank 0 has .* \(3,\)"):
        averager.average_parameters([nn.Parameter(torch.zeros(3 + rank // 2))])


def test_ranks_of_other_groups_with_other_parameters_are_told() -> None:
    last_ranks(4, unlike_in_a_hierarchy)


# ZeRO


def zero(rank: int, unused: bool) -> None:
    """A learning rate that is changed on the way; and a DDP that looks for unused parameters."""
    first = 1 if unused else 2
    models = [DistributedDataParallel(convolutions(), bucket_cap_mb=0.005, find_unused_parameters=unused) for _ in range(2)]
    sharded = ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.05)
    hooks = module("laconic", "ddp_comm_hooks.ddp_zero_hook")
    models[0].register_comm_hook(None, hooks.hook_with_zero_step(default().allreduce_hook, models[0], sharded))
    for step in range(8):
        for optimizer in (sharded, plain):
            optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
        for model in models:
            model.zero_grad()
            model(images(rank, step)).square().mean().backward()
        if step >= first:
            plain.step()
    assert close(weights(models[0]), weights(models[1]), 1e-5)
    assert not close(weights(models[0]), list(convolutions().state_dict().values()), 1e-5)


def test_zero_with_a_learning_rate_that_changes() -> None:
    ranks(2, zero, False)


def test_zero_with_unused_parameters() -> None:
    ranks(2, zero, True)


def until_killed(rank: int, folder: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    model.register_comm_hook(None, default().allreduce_hook)
    try:
        for step in range(20):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 300)).sum().backward()
    except RuntimeError:
        Path(folder, f"{rank} {step}").touch()


def test_a_lost_peer_is_an_error_and_not_a_gradient(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(2, until_killed, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["0 3"]
