"""What compressing a bucket costs beside torch's hook of the same name: the same 20 MB of gradients, interleaved."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import laconic
from benchmarks.harness import Timing, interleave, report
from laconic.bucket import Bucket, Slot, flatten
from laconic.reducers.base import Reducer
from laconic.wire import Ledger, TorchGroup, land
from tests.ranks import ranks_within

SHAPES = [(768, 768), (768,)] * 4 + [(3072, 768), (3072,), (768,)]  # one transformer block, 4.7 million numbers
RANKS, REPEATS = [1, 2, 4, 8, 32], 15
TARGETS = {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.65, 32: 0.85}


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
        land(reducer.reduce(Bucket(flat, views, names, slots, group.rank, group.world)), group, ledger).remember()

    run.prepare = lambda: flat.copy_(source)  # type: ignore[attr-defined]
    return run


def measure(rank: int) -> dict[str, Timing]:
    """Every alternative, on this world."""
    torch.manual_seed(rank)
    source = torch.randn(sum(torch.Size(shape).numel() for shape in SHAPES))
    room = torch.empty_like(source)
    alternatives: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(source)}
    for r in RANKS:
        state = PowerSGDState(None, matrix_approximation_rank=r, start_powerSGD_iter=2)
        alternatives[f"torch {r}"] = torch_hook(powerSGD_hook, state, source)
        alternatives[f"laconic {r}"] = ours(laconic.ErrorFeedback(laconic.PowerSGD(r)), source)
    alternatives["torch fp16"] = torch_hook(fp16_compress_hook, None, source)
    alternatives["laconic 8 bits"] = ours(laconic.Quantized(8), source)
    alternatives["laconic 4 bits"] = ours(laconic.Quantized(4), source)
    alternatives["laconic fp8"] = ours(laconic.Float8(), source)
    alternatives["laconic fp16"] = ours(laconic.Cast("fp16"), source)
    for run in alternatives.values():
        for _ in range(4):
            getattr(run, "prepare", run)()
            run()
    return interleave(alternatives, REPEATS, 1)


def main() -> None:
    """One process, and four on the same cores."""
    rows: list[dict[str, object]] = []
    for world in (1, 4):
        timings = ranks_within(900, world, measure)[0]
        pairs = [(f"PowerSGD({r}) against powerSGD_hook", f"laconic {r}", f"torch {r}", TARGETS[r]) for r in RANKS]
        for name, label in (
            ("8 bits", "Quantized(8)"),
            ("4 bits", "Quantized(4)"),
            ("fp8", "Float8()"),
            ("fp16", "Cast('fp16')"),
        ):
            pairs.append((f"{label} against fp16_compress_hook", f"laconic {name}", "torch fp16", 3.0))
        for what, mine, theirs, target in pairs:
            our, their = timings[mine], timings[theirs]
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
                }
            )
    legend = (
        "Time of one exchange of one transformer block's gradients (19 MB of fp32), error feedback on in both PowerSGDs, over "
        f"gloo on loopback without a limit; {REPEATS} interleaved repeats. 'copies': how many times copying the bucket once "
        "takes as long, the distance to the memory's own limit."
    )
    report("compressor_cost", "The cost of compressing", rows, legend)


if __name__ == "__main__":
    main()
