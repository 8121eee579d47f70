"""What compressing a bucket costs beside torch's hook of the same name: the same 20 MB of gradients, interleaved."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import laconic
from benchmarks.harness import Ratio, Timing, interleave, peak_extra_bytes, ratio, report
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.exchange import complete
from laconic.comm.flat_tensors import flatten
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.reducers.base import Reducer
from tests.live import last_ranks, ranks_within

SHAPES = [(768, 768), (768,)] * 4 + [(3072, 768), (3072,), (768,)]  # one transformer block, 4.7 million numbers
RANKS, REPEATS = [1, 2, 4, 8, 32], 40
TARGETS = {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.65, 32: 0.85}
# The callbacks of torch's PowerSGD hold the process group, in gloo's own thread: if that thread is the last to let go of it,
# it joins itself, and the process dies.
LET_GO_SECONDS = 0.5
OTHERS: dict[str, Reducer] = {
    "Quantized(8)": laconic.Quantized(8),
    "Quantized(4)": laconic.Quantized(4),
    "Float8()": laconic.Float8(),
    "Cast('fp16')": laconic.Cast("fp16"),
    "Sign(phases=1)": laconic.Sign(phases=1),
    "TopK(0.01, phases=1)": laconic.TopK(0.01, phases=1),
    "RandomK(0.05)": laconic.RandomK(0.05),
}


@dataclass
class TorchBucket:
    """What torch's hooks ask of a bucket."""

    flat: Tensor
    views: list[Tensor]
    parameters_: list[Tensor] = field(default_factory=list)

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    def parameters(self) -> list[Tensor]:
        return self.parameters_

    def set_buffer(self, flat: Tensor) -> None:
        self.flat = flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def torch_hook(hook: Callable[..., torch.futures.Future[Tensor]], state: object, source: Tensor) -> Callable[[], None]:
    """One exchange by a hook of torch's."""
    flat, views = flatten([torch.empty(shape) for shape in SHAPES])

    def run() -> None:
        hook(state, TorchBucket(flat, views)).wait()

    run.prepare = lambda: flat.copy_(source)  # type: ignore[attr-defined]
    return run


def ours(reducer: Reducer, source: Tensor) -> Callable[[], None]:
    """One exchange by a reducer."""
    flat, views = flatten([torch.empty(shape) for shape in SHAPES])
    names, group, ledger = [str(index) for index in range(len(SHAPES))], TorchGroup(dist.group.WORLD), Ledger()  # type: ignore[arg-type]
    slots: list[Slot] = [{} for _ in SHAPES]

    def run() -> None:
        complete(reducer.reduce(Bucket(flat, views, names, slots, group.rank, group.world)), group, ledger).finish()

    run.prepare = lambda: flat.copy_(source)  # type: ignore[attr-defined]
    return run


def alternatives(source: Tensor) -> dict[str, Callable[[], Callable[[], None]]]:
    """What is compared, ours and torch's, each built when it is called for."""
    runs: dict[str, Callable[[], Callable[[], None]]] = {}
    for r in RANKS:
        state = PowerSGDState(None, matrix_approximation_rank=r, start_powerSGD_iter=2)
        runs[f"torch {r}"] = partial(torch_hook, powerSGD_hook, state, source)
        runs[f"laconic {r}"] = partial(ours, laconic.ErrorFeedback(laconic.PowerSGD(r)), source)
    runs["torch fp16"] = partial(torch_hook, fp16_compress_hook, None, source)
    for label, reducer in OTHERS.items():
        runs[f"laconic {label}"] = partial(ours, reducer, source)
    return runs


def exchanges(run: Callable[[], object], count: int) -> Callable[[], None]:
    """So many exchanges, each with fresh gradients."""

    def many() -> None:
        for _ in range(count):
            getattr(run, "prepare", run)()
            run()

    return many


def numbers() -> Tensor:
    """One transformer block's gradients."""
    return torch.randn(sum(torch.Size(shape).numel() for shape in SHAPES))


def measure(rank: int) -> dict[str, Timing]:
    """Seconds of every alternative, on this world."""
    torch.manual_seed(rank)
    source = numbers()
    room = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(source)}
    runs |= {name: build() for name, build in alternatives(source).items()}
    for run in runs.values():
        exchanges(run, 4)()
    timings = interleave(runs, REPEATS, 1)
    time.sleep(LET_GO_SECONDS)
    return timings


def memory(rank: int, name: str) -> float:
    """Peak extra memory of one alternative from its first exchange on, in buckets; in a process that has done nothing else."""
    source = numbers()
    run = alternatives(source)[name]()
    getattr(run, "prepare", run)()  # the bucket's own pages
    peak = peak_extra_bytes(exchanges(run, 4)) / source.nbytes
    time.sleep(LET_GO_SECONDS)
    return peak


def pairs() -> list[tuple[str, str, str, float]]:
    """What is compared: its name, ours, torch's, and the target."""
    found = [(f"PowerSGD({r}) against powerSGD_hook", f"laconic {r}", f"torch {r}", TARGETS[r]) for r in RANKS]
    return found + [(f"{label} against fp16_compress_hook", f"laconic {label}", "torch fp16", 3.0) for label in OTHERS]


def brief() -> list[Ratio]:
    """What is watched with two processes; without the memory, for which each alternative needs processes of its own."""
    timings = ranks_within(600, 2, measure)[0]
    return [ratio(f"{what}, 2 processes", timings[mine], timings[theirs]) for what, mine, theirs, _ in pairs()]


def main() -> None:
    """One process, and two, one core each."""
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for world in (1, 2):
        timings = ranks_within(900, world, measure)[0]
        peaks = {name: last_ranks(world, memory, name)[0] for name in timings if name != "copy"}
        for what, mine, theirs, target in pairs():
            our, their = timings[mine], timings[theirs]
            ratios.append(ratio(f"{what}, {world} processes", our, their))
            rows.append(
                {
                    "processes": world,
                    "reducer": what,
                    "ms": f"{our.best * 1e3:.1f}",
                    "torch, ms": f"{their.best * 1e3:.1f}",
                    "best, relative": f"{our.best / their.best:.2f}",
                    "median, relative": f"{our.median / their.median:.2f}",
                    "target": target,
                    "copies": f"{our.best / timings['copy'].best:.0f}",
                    "peak, buckets": f"{peaks[mine]:.2f}",
                    "torch, buckets": f"{peaks[theirs]:.2f}",
                }
            )
    legend = (
        "Time of one exchange of one transformer block's gradients (19 MB of fp32), error feedback on in both PowerSGDs, over "
        f"gloo on loopback without a limit; {REPEATS} interleaved repeats. 'copies': how many times copying the bucket once "
        "takes as long, the distance to the memory's own limit. 'peak': the most memory beyond the bucket itself, residual "
        "included, in sizes of the bucket."
    )
    report("compressor_cost", "The cost of compressing", rows, legend, ratios)


if __name__ == "__main__":
    main()
