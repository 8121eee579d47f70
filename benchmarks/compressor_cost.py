"""What compressing a bucket costs beside torch's hook of the same name: the same 20 MB of gradients, interleaved."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import laconic
from benchmarks.harness import Ratio, Timing, compile_all, interleave, ratio, report
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.exchange import complete
from laconic.comm.flat_tensors import flatten
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.reducers.base import Reducer
from tests.live import ranks_within

SHAPES = [(768, 768), (768,)] * 4 + [(3072, 768), (3072,), (768,)]  # one transformer block, 4.7 million numbers
RANKS, REPEATS = [1, 2, 4, 8, 32], 40
TARGETS = {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.55, 32: 0.8}
# The callbacks of torch's PowerSGD hold the process group, in gloo's own thread: if that thread is the last to let go of it,
# it joins itself, and the process dies.
LET_GO_SECONDS = 0.5
# Beside torch's hook of 16 bits, as torch has none of their names that runs here.
OTHERS: dict[str, Reducer] = {
    "Cast('fp16')": laconic.Cast("fp16"),
    "Quantized(8)": laconic.Quantized(8),
    "ErrorFeedback(Quantized(4))": laconic.ErrorFeedback(laconic.Quantized(4)),
    "Float8()": laconic.Float8(),
    "ErrorFeedback(Ternary())": laconic.ErrorFeedback(laconic.Ternary()),
    "ErrorFeedback(Sign())": laconic.ErrorFeedback(laconic.Sign()),
    "ErrorFeedback(TopK(0.01))": laconic.ErrorFeedback(laconic.TopK(0.01)),
    "ErrorFeedback(RandomK(0.05))": laconic.ErrorFeedback(laconic.RandomK(0.05)),
    "ErrorFeedback(AlternatingPowerSGD(4))": laconic.ErrorFeedback(laconic.AlternatingPowerSGD(4)),
    "ErrorFeedback(BatchedPowerSGD(1))": laconic.ErrorFeedback(laconic.BatchedPowerSGD(1)),
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
    """One exchange by a reducer, compiled."""
    flat, views = flatten([torch.empty(shape) for shape in SHAPES])
    names, group, ledger = [str(index) for index in range(len(SHAPES))], TorchGroup(dist.group.WORLD), Ledger()  # type: ignore[arg-type]
    slots: list[Slot] = [{} for _ in SHAPES]

    def run() -> None:
        complete(reducer.reduce(Bucket(flat, views, names, slots, group.rank, group.world, fused=True)), group, ledger).finish()

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


def pairs() -> list[tuple[str, str, str, str, float | None]]:
    """What is compared: its name, ours, torch's hook, its timing, and the target."""
    found: list[tuple[str, str, str, str, float | None]] = []
    found += [(f"ErrorFeedback(PowerSGD({r}))", f"laconic {r}", "powerSGD_hook", f"torch {r}", TARGETS[r]) for r in RANKS]
    found += [(label, f"laconic {label}", "fp16_compress_hook", "torch fp16", None) for label in OTHERS]
    return found


def watched(timings: Mapping[str, Timing], world: int) -> list[Ratio]:
    """The ratio of each pair."""
    return [
        ratio(f"{what} against {hook}, {world} processes", timings[mine], timings[theirs])
        for what, mine, hook, theirs, _ in pairs()
    ]


def brief() -> list[Ratio]:
    """What is watched with two processes."""
    compile_all()
    return watched(ranks_within(600, 2, measure)[0], 2)


def main() -> None:
    """One process, two and four, on two cores."""
    compile_all()
    rows: list[dict[str, object]] = []
    ratios: list[Ratio] = []
    for world in (1, 2, 4):
        timings = ranks_within(900, world, measure)[0]
        found = watched(timings, world)
        ratios += found
        for (what, mine, hook, theirs, target), one in zip(pairs(), found, strict=True):
            our, their = timings[mine], timings[theirs]
            rows.append(
                {
                    "processes": world,
                    "reducer": what,
                    "against": hook,
                    "ms": f"{our.median * 1e3:.1f}",
                    "torch, ms": f"{their.median * 1e3:.1f}",
                    "relative": f"{one.value:.2f}",
                    "+-": f"{one.value * one.noise:.2f}",
                    "target": target or "",
                    "copies": f"{our.median / timings['copy'].median:.0f}",
                }
            )
    legend = (
        "Time of one exchange of a transformer block's gradients (19 MB of fp32), with error feedback in PowerSGD, over gloo "
        f"on loopback without a limit, kernels compiled; {REPEATS} interleaved repeats. 'relative': the median over repeats of "
        "ours to torch's, each pair taken at the same time, and its standard error. 'copies': how many times copying the "
        "bucket takes as long: the distance to the memory's own limit."
    )
    report("compressor_cost", "The cost of compressing", rows, legend, ratios)


if __name__ == "__main__":
    main()
