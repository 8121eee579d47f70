"""What reducers and averagers hold beyond the numbers that they average, beside torch's hooks and averager."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import laconic
from benchmarks import averaging_cost
from benchmarks.compressor_cost import LET_GO_SECONDS, SHAPES, TorchBucket, numbers
from benchmarks.harness import Extra, Ratio, extra_bytes, report
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.exchange import complete
from laconic.comm.flat_tensors import flatten
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.kernels.compiling import prepare
from laconic.reducers.base import Reducer
from tests.live import last_ranks

WORLD, EXCHANGES, STEPS, REPEATS = 2, 6, 24, 3
MOST = 1.25  # buckets, beyond what is kept
NOISE = 0.02  # between two runs
TORCH_NOISE = 0.1  # what has been freed when the peak comes depends on callbacks
SMALL = [(64, 64), (64,)]  # what is exchanged before: code and connections are not counted

Exchange = Callable[[Tensor, list[Tensor]], None]


@dataclass(frozen=True)
class Row:
    """One reducer, and torch's hook of the same name."""

    reducer: Reducer
    torch: str = ""


EF = laconic.ErrorFeedback
ROWS = {
    "Exact()": Row(laconic.Exact(), "allreduce_hook"),
    "Cast('fp16')": Row(laconic.Cast("fp16"), "fp16_compress_hook"),
    "Cast('fp16', accumulate='wire')": Row(laconic.Cast("fp16", accumulate="wire"), "fp16_compress_hook"),
    "Cast('bf16')": Row(laconic.Cast("bf16")),
    "Quantized(8)": Row(laconic.Quantized(8)),
    "ErrorFeedback(Quantized(4))": Row(EF(laconic.Quantized(4))),
    "ErrorFeedback(Quantized(2))": Row(EF(laconic.Quantized(2))),
    "Float8()": Row(laconic.Float8()),
    "ErrorFeedback(Ternary())": Row(EF(laconic.Ternary())),
    "ErrorFeedback(Sign())": Row(EF(laconic.Sign())),
    "ErrorFeedback(Sign(phases=1))": Row(EF(laconic.Sign(phases=1))),
    "ErrorFeedback(TopK(0.01))": Row(EF(laconic.TopK(0.01))),
    "ErrorFeedback(TopK(0.01, phases=1))": Row(EF(laconic.TopK(0.01, phases=1))),
    "ErrorFeedback(RandomK(0.01))": Row(EF(laconic.RandomK(0.01))),
    **{
        f"ErrorFeedback(PowerSGD({rank}))": Row(EF(laconic.PowerSGD(rank)), f"powerSGD_hook, rank {rank}")
        for rank in (1, 4, 32)
    },
    "ErrorFeedback(AlternatingPowerSGD(2))": Row(EF(laconic.AlternatingPowerSGD(2))),
    "ErrorFeedback(BatchedPowerSGD(1))": Row(EF(laconic.BatchedPowerSGD(1))),
}
TORCH_AVERAGER = "torch PeriodicModelAverager"
STRATEGIES = {
    "local_sgd(4)": "local_sgd(4)",
    "local_sgd(4, atomic=False)": "local_sgd(4, atomic=False)",
    "diloco(4)": "diloco(4)",
    "diloco(4, offload=True)": "diloco(4, offload=True)",
    "diloco(4, reducer=Quantized(8))": "diloco(4, reducer=Quantized(8))",
    "streaming_diloco(8, delay=1)": "streaming_diloco(8, delay=1)",
    "streaming_diloco(8, delay=1, carry=True, blend=0.0)": "streaming_diloco(8, delay=1, carry=True, blend=0.0)",
}


def ours(reducer: Reducer) -> Exchange:
    """Exchanges by a reducer, compiled; all with one memory."""
    slots: list[Slot] = [{} for _ in SHAPES]
    group, ledger = TorchGroup(dist.group.WORLD), Ledger()  # type: ignore[arg-type]

    def exchange(flat: Tensor, views: list[Tensor]) -> None:
        names = [str(index) for index in range(len(views))]
        bucket = Bucket(flat, views, names, slots[: len(views)], group.rank, group.world, fused=True)
        complete(reducer.reduce(bucket), group, ledger).finish()

    return exchange


def torchs(name: str) -> Exchange:
    """Exchanges by a hook of torch's, all with one state."""
    hook, _, rank = name.partition(", rank ")
    state = PowerSGDState(None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2) if rank else None
    hooks = {"allreduce_hook": allreduce_hook, "fp16_compress_hook": fp16_compress_hook, "powerSGD_hook": powerSGD_hook}

    def exchange(flat: Tensor, views: list[Tensor]) -> None:
        hooks[hook](state, TorchBucket(flat, views)).wait()  # type: ignore[operator]

    return exchange


def exchanged(rank: int, label: str, by_torch: bool) -> Extra:
    """What one alternative holds beyond the bucket, from its first exchange on; in a process that has done nothing else."""
    row = ROWS[label]
    build = partial(torchs, row.torch) if by_torch else partial(ours, row.reducer)
    for _ in range(EXCHANGES):
        build()(*flatten([torch.ones(shape) for shape in SMALL]))
    source, exchange = numbers(), build()
    flat, views = flatten([torch.ones(shape) for shape in SHAPES])

    def run() -> None:
        for _ in range(EXCHANGES):
            flat.copy_(source)
            exchange(flat, views)

    extra = extra_bytes(run)
    time.sleep(LET_GO_SECONDS)
    return extra


def trained(rank: int, name: str) -> Extra:
    """What averaging holds beyond the model, from attach on: steps of an optimizer without memory, on a gradient of zeros."""
    mine = averaging_cost.model()
    for parameter in mine.parameters():
        parameter.grad = torch.zeros(1).expand(parameter.shape)
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    small(torch.ones(1, 8)).sum().backward()
    steps(small, name)  # code and connections are not counted
    kept: list[object] = []
    return extra_bytes(lambda: kept.append(steps(mine, name)))


def steps(mine: nn.Module, name: str) -> object:
    """Train for some steps; what holds memory, to be kept."""
    if name == TORCH_AVERAGER:
        averager = PeriodicModelAverager(period=4, warmup_steps=0)
        for _ in range(STEPS):
            averager.average_parameters(mine.parameters())
        return averager
    optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3, foreach=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = laconic.attach(mine, optimizer, name, fused=True)
    for _ in range(STEPS):
        optimizer.step()
    return run, optimizer


def repeated(label: str, by_torch: bool) -> list[Extra]:
    """Of all ranks of some runs."""
    return [extra for _ in range(REPEATS) for extra in last_ranks(WORLD, exchanged, label, by_torch)]


def most(extras: list[Extra], unit: int) -> tuple[float, float]:
    """Of the highest peak, and what is kept after it, in that unit."""
    extra = max(extras, key=lambda each: each.peak)
    return extra.peak / unit, extra.kept / unit


def reducers() -> tuple[list[dict[str, object]], list[Ratio]]:
    """In sizes of the bucket."""
    kernels = [kernel for row in ROWS.values() for kernel in row.reducer.kernels()]
    prepare(kernels, True, torch.device("cpu"))
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for label, row in ROWS.items():
        peak, kept = most(repeated(label, False), numbers().nbytes)
        their = most(repeated(label, True), numbers().nbytes) if row.torch else None
        ratios.append(Ratio(f"{label}: beyond what is kept, of {MOST} buckets", (peak - kept) / MOST, NOISE))
        if their is not None:
            ratios.append(Ratio(f"{label}: peak over torch's {row.torch}", peak / their[0], TORCH_NOISE))
        rows.append(line(label, "bucket", peak, kept, row.torch, their))
    return rows, ratios


def averagers() -> tuple[list[dict[str, object]], list[Ratio]]:
    """In sizes of the model."""
    size = sum(parameter.nbytes for parameter in averaging_cost.model().parameters())
    their = most(last_ranks(WORLD, trained, TORCH_AVERAGER), size)
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for label, name in STRATEGIES.items():
        peak, kept = most(last_ranks(WORLD, trained, name), size)
        plain = label.startswith("local_sgd")
        rows.append(line(label, "model", peak, kept, "PeriodicModelAverager" if plain else "", their if plain else None))
        ratios.append(Ratio(f"{label}: peak, models", peak, NOISE))
    return rows, ratios


def line(label: str, unit: str, peak: float, kept: float, name: str, their: tuple[float, float] | None) -> dict[str, object]:
    """One line of the table."""
    return {
        "what": label,
        "in sizes of the": unit,
        "peak": f"{peak:.2f}",
        "kept between": f"{kept:.2f}",
        "beyond that": f"{peak - kept:.2f}",
        "torch": name,
        "torch's peak": "" if their is None else f"{their[0]:.2f}",
        "torch's kept": "" if their is None else f"{their[1]:.2f}",
    }


def main() -> None:
    """One table."""
    rows, ratios = reducers()
    more_rows, more_ratios = averagers()
    legend = (
        f"Pages that a process holds beyond the bucket (19 MB of fp32, one transformer block) in {EXCHANGES} exchanges, with "
        f"compiled kernels loaded; or beyond the model (50 million fp32 parameters) in attach and {STEPS} steps of an "
        f"optimizer without memory. {WORLD} processes on loopback; each row in new ones, a reducer's {REPEATS} times, of "
        "which the highest peak is shown. 'Kept': what is still held after; of a low rank, with work memory of the matrix "
        f"library. Most beyond that for a reducer: {MOST} buckets."
    )
    report("memory", "Memory", rows + more_rows, legend, ratios + more_ratios)


if __name__ == "__main__":
    main()
