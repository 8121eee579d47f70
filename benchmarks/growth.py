"""How bytes grow with the world: 2, 4 and 8 in processes, 16 to 256 in one process and on paper, beside torch's gather."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.harness import Ratio, report
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.collectives import Traffic
from laconic.comm.dryrun import predict, simulate
from laconic.comm.exchange import complete
from laconic.comm.flat_tensors import flatten
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.reducers.base import Reducer
from tests.live import last_ranks, ranks

Shapes = Sequence[tuple[int, ...]]
SHAPES: Shapes = [(128, 384), (384,), (128, 128), (128,)]  # the attention of a small transformer
LARGE: Shapes = [(1024, 3072), (3072,), (1024, 1024), (1024,), (1024, 2048), (2048,)]  # 25 MB, as DDP's buckets are
REDUCERS: dict[str, Reducer] = {
    "Exact()": laconic.Exact(),
    "Quantized(8)": laconic.Quantized(8),
    "Quantized(4)": laconic.Quantized(4),
    "Quantized(2)": laconic.Quantized(2),
    "PowerSGD(4)": laconic.PowerSGD(4),
    "Ternary()": laconic.Ternary(),
    "Sign()": laconic.Sign(),
    "Sign(phases=1)": laconic.Sign(phases=1),
    "TopK(0.01)": laconic.TopK(0.01),
    "TopK(0.01, values='fp16')": laconic.TopK(0.01, values="fp16"),
    "TopK(0.01, values='2bit')": laconic.TopK(0.01, values="2bit"),
    "TopK(0.01, phases=1)": laconic.TopK(0.01, phases=1),
}
PROCESSES, SIMULATED = [2, 4, 8], [16, 64, 256]


def bucket(rank: int, world: int, device: str = "cpu", shapes: Shapes = SHAPES) -> Bucket:
    """One bucket of gradients."""
    draw = torch.Generator().manual_seed(rank)
    tensors = [torch.empty(shape, device=device) for shape in shapes]
    flat, views = flatten(tensors if device == "meta" else [t.normal_(generator=draw) for t in tensors])
    slots: list[Slot] = [{} for _ in shapes]
    return Bucket(flat, views, [str(i) for i in range(len(shapes))], slots, rank, world)


def exchanged(rank: int, name: str) -> Traffic:
    """What one rank sent, in real processes."""
    assert dist.group.WORLD is not None
    group, ledger = TorchGroup(dist.group.WORLD), Ledger()
    complete(REDUCERS[name].reduce(bucket(rank, group.world)), group, ledger).finish()
    return ledger.total


def torch_hook(rank: int) -> str:
    """What torch's own quantization does here: its error, or nothing."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model.register_comm_hook(dist.group.WORLD, quantization_pertensor_hook)
    try:
        model(torch.ones(1, 64)).sum().backward()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def counted(name: str, world: int) -> Traffic:
    """By processes, or by all ranks in this one."""
    if world in PROCESSES:
        return ranks(world, exchanged, name)[0]
    ledger = Ledger()
    simulate([REDUCERS[name].reduce(bucket(rank, world)) for rank in range(world)], ledger)
    return ledger.total


def large(reducer: Reducer) -> float:
    """How many times the bytes of 2 ranks 256 ranks send each, of a bucket of 25 MB: on paper."""
    few, many = (predict(reducer.reduce(bucket(0, world, "meta", LARGE)), world).wire_bytes for world in (2, 256))
    return many / few


def row(name: str, rounds: object, wires: Sequence[int], large: float) -> dict[str, object]:
    """In units of the gradient's own bytes."""
    size = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
    worlds = [*PROCESSES, *SIMULATED]
    return {
        "": name,
        "rounds": rounds,
        **{f"N={world}": f"{wire / size:.3f}" for world, wire in zip(worlds, wires, strict=True)},
        "25 MB: 256 over 2": f"{large:.2f}",
    }


def main() -> None:
    """One table."""
    torch.set_num_threads(1)
    rows, ratios = [], []
    worlds = [*PROCESSES, *SIMULATED]
    count = sum(torch.Size(shape).numel() for shape in SHAPES)
    for name, reducer in REDUCERS.items():
        wires, rounds = [], set()
        for world in worlds:
            found, foreseen = counted(name, world), predict(reducer.reduce(bucket(0, world, "meta")), world)
            if found != foreseen:
                raise SystemExit(f"{name}, {world} ranks: sent {found}, predicted {foreseen}")
            wires.append(found.wire_bytes)
            rounds.add(found.collectives)
        growth = large(reducer)
        rows.append(row(f"laconic {name}", "-".join(str(n) for n in sorted({min(rounds), max(rounds)})), wires, growth))
        ratios += [Ratio(f"{name}, bytes over the bucket's, {n} ranks", wires[worlds.index(n)] / (4 * count)) for n in (8, 256)]
    rows.append(row("torch quantization_pertensor_hook", 2, [(world - 1) * (count + 8) for world in worlds], 255.0))
    error = last_ranks(2, torch_hook)[0]
    legend = (
        f"Wire bytes of one rank for one bucket of {count:,} fp32 numbers, in sizes of the bucket. N up to 8: live processes; "
        "beyond: all ranks in one process. Each is equal to what predict says without data. Last column: of a bucket of 25 MB, "
        "by predict. torch's hook gathers "
        "everybody's codes, (N-1)(n + 8) bytes by its code; on gloo it " + (f"fails with {error}" if error else "runs")
    )
    report("growth", "Bytes of a rank as the world grows", rows, legend, ratios)


if __name__ == "__main__":
    main()
