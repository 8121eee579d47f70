"""Attaching to sharded models: what is refused, and what a run does on islands."""

import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm.flat_tensors import local
from laconic.report import meter_records
from laconic.run.run import engine_of
from tests.islands import (
    Mlp,
    adam,
    attached,
    far,
    island_mesh,
    loss,
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
from tests.live import last_ranks, ranks
from tests.models import same_bits

Case = tuple[Any, Any, dict[str, Any]]


def over_the_world() -> Case:
    model = shard(small(), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, sgd(model), {"mesh": island_mesh(2)}


def without_a_mesh() -> Case:
    model, optimizer, _ = sharded(2, sgd)
    return model, optimizer, {}


def without_names() -> Case:
    model, optimizer, _ = sharded(2, sgd)
    return model, optimizer, {"mesh": init_device_mesh("cpu", (2, 2))}


def another_name() -> Case:
    model, optimizer, mesh = sharded(2, sgd)
    return model, optimizer, {"mesh": mesh, "replicate": "dp"}


def native() -> Case:
    mesh = island_mesh(2)
    model = shard(small(), mesh)
    return model, sgd(model), {"mesh": mesh}


def some_not() -> Case:
    mesh = island_mesh(2)
    model = small()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    return model, sgd(model), {"mesh": mesh}


def first_form() -> Case:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    return model, sgd(model), {"mesh": island_mesh(2)}


def in_ddp() -> Case:
    model, optimizer, mesh = sharded(2, sgd)
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    wrapped.module = model
    return wrapped, optimizer, {"mesh": mesh}


def hooked() -> Case:
    model, optimizer, mesh = sharded(2, sgd)
    model.blocks[0].set_all_reduce_hook(print)
    return model, optimizer, {"mesh": mesh}


def early() -> Case:
    model, optimizer, mesh = sharded(2, sgd)
    model.norm.weight.register_post_accumulate_grad_hook(print)
    return model, optimizer, {"mesh": mesh}


def several() -> Case:
    """A mesh for each parameter, as for the experts of a mixture: two groups in one module."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh, other = island_mesh(2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    info = FSDPMeshInfo(other["shard"], shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if parameter.dim() == 1 else None

    model = small()
    fully_shard(model.blocks[0], mesh=mesh["shard"], shard_placement_fn=place)
    fully_shard(model, mesh=mesh["shard"])
    return model, sgd(model), {"mesh": mesh}


def differently() -> Case:
    """Islands of different sizes: the first three ranks are one, the last is another."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    model = shard(small(), DeviceMesh.from_group(groups[dist.get_rank() // 3], "cpu"))
    return model, sgd(model), {"mesh": island_mesh(4)}


def fine() -> Case:
    model, optimizer, mesh = sharded(2, sgd)
    return model, optimizer, {"mesh": mesh}


def without_numbers() -> Case:
    mesh = island_mesh(2)
    with torch.device("meta"):
        model = small()
    shard(model, mesh["shard"])
    return model, sgd(model), {"mesh": mesh}


CASES: list[tuple[Callable[[], Case], str, str]] = [
    (over_the_world, "diloco(4)", "is sharded over ranks 0, 1, 2, 3, and mesh['replicate'] puts these into several islands"),
    (without_a_mesh, "ddp()", "Small is sharded, and attach was given no mesh"),
    (without_names, "ddp()", "the mesh has no names"),
    (another_name, "diloco(4)", "the mesh has replicate, shard; say which of them: attach(..., replicate='replicate')"),
    (
        native,
        "int8()",
        "torch averages gradients between islands itself, as fully_shard was given a mesh with 'replicate' in it",
    ),
    (some_not, "ddp()", "blocks.0.norm.weight is a DTensor and positions is not"),
    (
        first_form,
        "diloco(4)",
        "FullyShardedDataParallel, and laconic works with its successor: shard with torch.distributed.fsdp",
    ),
    (in_ddp, "diloco(4)", "there is a sharded model inside this DistributedDataParallel"),
    (hooked, "ddp()", "blocks.0 has an all-reduce hook already"),
    (without_numbers, "diloco(4)", "positions is on the meta device, without numbers"),
    (several, "ddp()", "fully_shard made several groups of parameters in blocks.0"),
    (early, "ddp()", "norm.weight has a post-accumulate-grad hook"),
    (differently, "diloco(4)", "is sharded over|different things|puts these into several islands"),
    (fine, "ddp(reducer=ErrorFeedback(BatchedPowerSGD(2)))", "BatchedPowerSGD makes one matrix of all that is in a bucket"),
    (fine, "diloco(4, reducer=BatchedPowerSGD(2))", "BatchedPowerSGD makes one matrix of all that is in a bucket"),
    (fine, "hierarchical_sgd({2: 3, 4: 'world'})", "2 islands can't be divided into groups of 3"),
    (fine, "hierarchical_sgd({2: 'shard', 4: 'world'})", "subgroup 'shard' can't be used with a sharded model"),
]


def refused(rank: int) -> None:
    for make, text, sentence in CASES:
        model, optimizer, options = make()
        before = [local(parameter).clone() for parameter in model.parameters() if not parameter.is_meta]
        pattern = sentence if "|" in sentence else re.escape(sentence)
        with pytest.raises(ValueError, match=pattern):
            laconic.attach(model, optimizer, text, **options)
        after = [local(parameter) for parameter in model.parameters() if not parameter.is_meta]
        assert same_bits(before, after), "nothing has changed"


def test_what_can_not_be_used_is_refused_before_anything_changes() -> None:
    ranks(4, refused)


def on_one_rank_alone(rank: int) -> str:
    """One rank of one island is given something else: all are told, and nobody waits."""
    model, optimizer, mesh = sharded(2, sgd)
    with pytest.raises(ValueError, match=r"rank") as caught:
        laconic.attach(model, optimizer, "diloco(5)" if rank == 3 else "diloco(4)", mesh=mesh)
    nameless = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match=r"rank 2|no names") as other:
        laconic.attach(model, optimizer, "diloco(4)", mesh=nameless if rank == 2 else mesh)
    assert "rank 2" in str(other.value) or rank == 2
    return str(caught.value)


def test_a_rank_that_differs_is_named_with_its_island_and_shard() -> None:
    for text in ranks(4, on_one_rank_alone):
        assert "rank 3 (island 1, shard 1) has strategy diloco(period=5), rank 0 (island 0, shard 0) has" in text


def permuted(rank: int) -> None:
    """torch's process groups are sorted, so FSDP cuts a permuted mesh by another order than the mesh says."""
    for order in ([[0, 1], [3, 2]], [[2, 3], [0, 1]]):
        mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model, mesh=mesh["shard"])
        with pytest.raises(ValueError, match="has ranks in falling order"):
            laconic.attach(model, sgd(model), "ddp()", mesh=mesh)


def test_a_mesh_in_another_order_is_refused() -> None:
    ranks(4, permuted)


def another_mesh_on_one_rank(rank: int) -> str:
    """Where the islands are not in the order of ranks, a group of all has to be built: not before ranks have agreed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    model = shard(small(), mesh["shard"])
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="is sharded, and attach was given no mesh"):
        laconic.attach(model, optimizer, "ddp()", mesh=None if rank == 1 else mesh)
    with pytest.raises(ValueError, match="rank 1 has islands of the ranks"):
        laconic.attach(model, optimizer, "ddp()", mesh=mesh, replicate="shard" if rank == 1 else "replicate")
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh):
        step_once(model, optimizer, rank, 0)
    return "attached"


def test_a_rank_with_another_mesh_is_told_and_nobody_waits() -> None:
    assert set(ranks(4, another_mesh_on_one_rank)) == {"attached"}


# A run on islands


def mesh_of(run: laconic.Run) -> DeviceMesh:
    mesh = engine_of(run).mesh
    assert mesh is not None
    return mesh


def used(rank: int) -> None:
    """consensus, sync, swap, check_replicas, layout, stats: on islands as on ranks."""
    with attached(2, "diloco(4)", adam, check_every=1) as (model, optimizer, run):
        mesh = mesh_of(run)
        for step in range(3):
            step_once(model, optimizer, rank, step)
        mine = shards(model)
        assert not same_on_islands(mine, mesh)
        model.eval()
        with torch.no_grad():
            apart = float(loss(model, tokens(9, 0)))  # the root stays gathered after this
            with run.consensus():
                assert same_on_islands(shards(model), mesh)
                mean = float(loss(model, tokens(9, 0)))
            with run.consensus(of="anchor"):
                anchor = float(loss(model, tokens(9, 0)))
            again = float(loss(model, tokens(9, 0)))
        model.train()
        model.reshard()
        assert same_bits(mine, shards(model)), "the local ones again"
        assert again == apart, "what was gathered of the mean is forgotten"
        assert len({apart, mean, anchor}) == 3
        run.sync()
        assert same_on_islands(shards(model), mesh)
        laconic.check_replicas(run)
        for text in ("int8()", "streaming_diloco(4, fragments=2, delay=1)", "ddp(reducer=ErrorFeedback(TopK(0.1)))", "ddp()"):
            run.swap(text)
            for step in range(4):
                step_once(model, optimizer, rank, step)
            if "diloco" not in text:
                assert same_on_islands(shards(model), mesh), text
        with pytest.raises(ValueError, match="BatchedPowerSGD"):
            run.swap("ddp(reducer=ErrorFeedback(BatchedPowerSGD()))")
        assert [name for bucket in run.layout() for name in bucket if name.startswith("blocks.1")]
        assert run.layout()[-1][0] == "embed.weight", "the root is last"
        assert "positions" not in [name for bucket in run.layout() for name in bucket]
        with torch.no_grad():
            local(model.norm.weight)[0] += float(rank == 2)
        sentence = re.escape("norm.weight is not the same on rank 2 (island 1, shard 0)")
        with pytest.raises((laconic.ReplicaError, laconic.PeerError), match=sentence):
            laconic.check_replicas(run)
        with torch.no_grad():
            local(model.norm.weight)[0] -= float(rank == 2)


def test_a_run_on_islands() -> None:
    ranks(4, used)


def stops(rank: int, text: str) -> int:
    """Ranks that run out of batches at different steps stop together."""
    with attached(2, text, sgd, uneven="stop") as (model, optimizer, run):
        for step in range(5 if rank == 3 else 9):
            step_once(model, optimizer, rank, step)
    assert same_on_islands(shards(model), mesh_of(run))
    return run.step


@pytest.mark.parametrize("text", ["ddp()", "local_sgd(4)"])
def test_islands_stop_together(text: str) -> None:
    assert set(ranks(4, stops, text)) == {5}


def metered(rank: int, folder: str) -> None:
    with attached(2, "diloco(4)") as (model, optimizer, run):
        laconic.Meter(run, folder, every=4)
        for step in range(9):
            step_once(model, optimizer, rank, step)


def test_the_meter_on_islands(tmp_path: Path) -> None:
    ranks(4, metered, str(tmp_path))
    assert sorted(file.name for file in tmp_path.glob("*.jsonl")) == [f"rank-{rank}.jsonl" for rank in range(4)]
    records = meter_records.read(tmp_path)
    assert records is not None


def nan_on_one_rank(rank: int) -> list[str]:
    """A shard that is not finite: the sync is skipped on all shards alike, and the rank is named."""
    with attached(2, "diloco(3)", sgd) as (model, optimizer, run), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = mesh_of(run)
        for step in range(9):
            step_once(model, optimizer, rank, step)
            if step == 4 and rank == 3:
                with torch.no_grad():
                    local(model.norm.weight).fill_(float("nan"))
            if step == 4:
                dist.barrier()
        assert run.stats().skipped == 1
        assert same_on_islands(shards(model), mesh)
        assert all(part.isfinite().all() for part in shards(model))
    return [str(one.message) for one in caught if "skipped" in str(one.message)]


def test_a_shard_that_is_not_finite_skips_the_sync_of_all() -> None:
    for sentences in ranks(4, nan_on_one_rank):
        assert len(sentences) == 1
        assert "the parameters of rank 2 (island 1, shard 0), rank 3 (island 1, shard 1) are not finite" in sentences[0]


def overflows_on_one_shard(rank: int) -> tuple[int, float]:
    """A mean that is not finite on one shard, of deltas that are, takes all shards of all islands back to the anchor."""
    with attached(2, "diloco(2, reducer=Cast('fp16'))", sgd) as (model, optimizer, run), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            step_once(model, optimizer, rank, step)
            if step == 2 and rank % 2:
                local(model.norm.weight).data[0] += 1e6
        return run.stats().skipped, float(local(model.norm.weight).abs().max())


def test_an_overflow_on_one_shard_skips_the_sync_of_all() -> None:
    found = ranks(4, overflows_on_one_shard)
    assert [skipped for skipped, _ in found] == [1] * 4
    assert all(largest < 10 for _, largest in found)


def out_of_line_on_one_shard(rank: int) -> int:
    """A replica is judged as a whole: shards that are in line go with the one that is not."""
    with attached(2, "diloco(1, outlier=4.0)", sgd) as (model, optimizer, run), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            if step == 10 and rank % 2:
                local(model.norm.weight).data += 100.0
            step_once(model, optimizer, rank, step % 2)
        assert same_on_islands(shards(model), mesh_of(run))
        return run.stats().skipped


def test_a_shard_that_is_out_of_line_skips_the_sync_of_all() -> None:
    assert ranks(4, out_of_line_on_one_shard) == [1] * 4


def until_killed(rank: int, text: str, folder: str) -> None:
    """Rank 3, shard 1 of island 1, dies in its step."""
    model, optimizer, mesh = sharded(2, sgd)
    try:
        with laconic.attach(model, optimizer, text, mesh=mesh):
            for step in range(100):
                if (rank, step) == (3, 4):
                    os.kill(os.getpid(), signal.SIGKILL)
                step_once(model, optimizer, rank, step)
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}|{error}")
    else:
        Path(folder, str(rank)).write_text("nothing")


@pytest.mark.parametrize("text", ["ddp()", pytest.param("local_sgd(3)", marks=pytest.mark.soak)])
def test_survivors_of_a_lost_rank_are_told_island_and_shard(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(4, until_killed, text, str(tmp_path))
    found = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert set(found) == {0, 1, 2}
    for rank, text in found.items():
        kind, _, sentence = text.partition("|")
        assert kind in ("CommunicationError", "UnevenError"), f"rank {rank}: {text}"
        assert re.search(r"island \d", sentence), sentence
        assert "shard" in sentence or "store" in sentence, sentence


# Tensor parallel


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def parallel(rank: int, also_sharded: bool) -> None:
    """Islands of tensor parallelism, alone or under fully_shard, by averaging in each step, are one model on more data."""
    world = dist.get_world_size()
    names = ("replicate", "shard", "tp") if also_sharded else ("replicate", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2) if also_sharded else (2, world // 2), mesh_dim_names=names)
    torch.manual_seed(0)
    model = Wide()
    torch.manual_seed(0)
    other = Wide()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if also_sharded:
        fully_shard(model, mesh=mesh["shard"])
    optimizer, others = sgd(model), sgd(other)
    island = mesh.get_local_rank("replicate")
    texts = ["local_sgd(1)", "ddp()"] if also_sharded else ["local_sgd(1)"]
    for text in texts:
        with laconic.attach(model, optimizer, text, mesh=mesh) as run:
            for step in range(4):
                batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + one)) for one in range(2)]
                model(batches[island]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                sum(other(batch).square().mean() for batch in batches).div(2).backward()
                others.step()
                others.zero_grad()
            sent = laconic.predict(text, model, world_size=2)
            assert run.stats().wire_bytes == 4 * sent.wire_bytes
        assert far(model, other) < 1e-6, text
    if not also_sharded:
        with pytest.raises(ValueError, match=r"first.weight is in no fully_shard"):
            laconic.attach(model, optimizer, "ddp()", mesh=mesh)


def test_tensor_parallel_islands() -> None:
    ranks(4, parallel, False)


def test_tensor_parallel_and_sharded_islands() -> None:
    ranks(8, parallel, True)


def scalars(rank: int) -> None:
    """A DTensor may be a scalar, replicated in the island."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    model = nn.Module()
    model.scale = nn.Parameter(distribute_tensor(torch.tensor(1.0 + rank // 2), mesh["tp"], [Replicate()]))
    model.rows = nn.Parameter(distribute_tensor(torch.arange(5.0), mesh["tp"], [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.attach(model, optimizer, "diloco(2, outer_lr=1.0, outer_momentum=0.0)", mesh=mesh):
        assert float(local(model.scale)) == 1.0, "all begin with the first island's"
        for _ in range(2):
            for parameter in (model.scale, model.rows):
                parameter.grad = torch.full_like(parameter, rank // 2)
            optimizer.step()
    assert float(local(model.scale)) == 0.0
    assert torch.equal(local(model.rows), torch.arange(5.0)[slice(0, 3) if rank % 2 == 0 else slice(3, 5)] - 1)


def test_scalars_and_uneven_rows() -> None:
    ranks(4, scalars)


def inside(rank: int) -> None:
    """torch's own HSDP inside of islands, and laconic between them."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("island", "replicate", "shard"))
    model = small()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = sgd(model)
    other, others = whole(sgd)
    with laconic.attach(model, optimizer, "ddp()", mesh=mesh, replicate="island"):
        for step in range(4):
            step_once(model, optimizer, rank, step)
            step_once(other, others, rank, step)
    assert far(model, other.module) < 1e-6


def test_hsdp_inside_of_islands() -> None:
    ranks(4, inside)


def part_of_the_world(rank: int) -> None:
    """Two models, each on ranks of its own, as the stages of a pipeline: each is attached by its own ranks."""
    stages = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    mesh = stages["replicate", "shard"]
    torch.manual_seed(rank // 2)
    model = Mlp() if rank < 2 else nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = sgd(model)
    for _ in range(2):
        with laconic.attach(model, optimizer, "ddp()" if rank < 2 else "local_sgd(2)", mesh=mesh):
            for step in range(4 if rank < 2 else 6):
                model(torch.randn(3, 8, generator=torch.Generator().manual_seed(step + 10 * rank))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert same_on_islands(shards(model), mesh)


def test_a_mesh_of_some_ranks() -> None:
    ranks(4, part_of_the_world)


def local_and_native(rank: int) -> None:
    model, optimizer, options = native()
    with pytest.warns(UserWarning, match=r"local_sgd\(period=2\) saves nothing in backward: torch averages gradients"):
        run = laconic.attach(model, optimizer, "local_sgd(2)", **options)
    with run:
        for step in range(3):
            step_once(model, optimizer, rank, step)
            assert same_on_islands(shards(model), options["mesh"])


def test_local_updates_over_torchs_own_hsdp_are_warned_of() -> None:
    ranks(4, local_and_native)


def before_it_is_built(rank: int) -> None:
    """From a meta model and a number of shards: what a sharded model will send."""
    model, _, _ = sharded(2, sgd)
    with torch.device("meta"):
        plain = small()
    for text in ("local_sgd(4)", "diloco(4, reducer=Quantized(4))", "streaming_diloco(8, fragments=2)"):
        now = laconic.predict(text, model, world_size=3)
        before = laconic.predict(text, plain, world_size=3, shards=2, shard=rank % 2)
        assert now == before, f"{text}: {now} and {before}"
    now = laconic.predict("int8()", model, world_size=3)
    assert now == laconic.predict("int8()", plain, world_size=3, shards=2, shard=rank % 2, buckets=buckets(model))


def buckets(model: nn.Module) -> list[list[str]]:
    from laconic._torch.fsdp import shard_groups

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(one)] for one in group.parameters] for group in shard_groups(model)[::-1]]


def test_bytes_are_known_before_a_sharded_model_is_built() -> None:
    ranks(4, before_it_is_built)
    with pytest.raises(ValueError, match="shard from 0 to shards - 1, got shards=2, shard=2"):
        laconic.predict("ddp()", nn.Linear(2, 2), world_size=2, shards=2, shard=2)
