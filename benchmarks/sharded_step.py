"""What ddp() costs on islands beside torch's own HSDP on the same mesh: whole steps, where sending costs nothing."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import laconic
from benchmarks.harness import Timing, interleave, ratio, relative, report
from laconic.lab.islands import island_mesh
from laconic.lab.tasks import Transformer
from tests.live import ranks_within

RANKS, SHARDS, WIDTH, LAYERS, CONTEXT, BATCH = 4, 2, 256, 4, 64, 2
STEPS, REPEATS = 4, 40
NATIVE, FIRST = "torch HSDP", "laconic ddp()"
NAMES = [NATIVE, FIRST, "laconic silent()", "torch fully_shard, islands alone"]


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each block, then the rest, over all of a mesh: that of an island, or HSDP's of both dimensions."""
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def stepper(name: str, mesh: DeviceMesh, batch: Tensor, steps: int) -> Callable[[], None]:
    """A function that makes so many steps; it has made some already."""
    torch.manual_seed(0)
    model = sharded(Transformer(WIDTH, LAYERS, CONTEXT), mesh if name == NATIVE else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name.startswith("laconic"):
        laconic.attach(model, optimizer, name.removeprefix("laconic "), mesh=mesh)

    def run() -> None:
        for _ in range(steps):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    run()
    return run


def measure(rank: int, steps: int, repeats: int) -> dict[str, Timing]:
    """Seconds a step of each."""
    mesh, draw = island_mesh(SHARDS), torch.Generator().manual_seed(rank)
    batch = torch.randint(256, (BATCH, CONTEXT + 1), generator=draw)
    found = interleave({name: stepper(name, mesh, batch, steps) for name in NAMES}, repeats, steps)
    dist.barrier()
    return found


def main() -> None:
    """Four ranks, two cores."""
    timings = ranks_within(1800, RANKS, measure, STEPS, REPEATS)[0]
    rows = relative(timings, "", NATIVE)
    found = ratio("ddp() over HSDP", timings[FIRST], timings[NATIVE])
    count = sum(parameter.numel() for parameter in Transformer(WIDTH, LAYERS, CONTEXT).parameters())
    legend = (
        f"Whole training step of a transformer of {count / 1e6:.1f} million fp32 parameters in {LAYERS + 1} fully_shard "
        f"groups, AdamW, batches of {BATCH} windows of {CONTEXT} bytes, {RANKS} ranks on loopback without a limit, 2 islands "
        f"of {SHARDS}. {REPEATS} interleaved repeats of {STEPS} steps; relative to torch's HSDP, which is fully_shard over "
        f"both dimensions of the mesh. Pair by pair, ddp() takes {found.value:.3f} +- {found.value * found.noise:.3f} of "
        "HSDP's time. silent() and islands alone send nothing between islands: the rest of a step, with laconic and without."
    )
    report("sharded_step", "Step time on islands, beside torch's HSDP", rows, legend, [found])


if __name__ == "__main__":
    main()
