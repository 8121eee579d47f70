"""What a reducer works out, in copies of the bucket: one rank of four, without a network, as it is and compiled."""

import statistics
import time

import torch

import laconic
from benchmarks.compressor_cost import OTHERS, RANKS, SHAPES, numbers
from benchmarks.harness import Ratio, compile_all, median_error, report
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.dryrun import work_of
from laconic.comm.flat_tensors import flatten
from laconic.reducers.base import Reducer

WORLD, REPEATS = 4, 24
# All that `compressor_cost` times, and some more.
REDUCERS: dict[str, Reducer] = {
    **OTHERS,
    "Cast('bf16')": laconic.Cast("bf16"),
    "ErrorFeedback(Quantized(8))": laconic.ErrorFeedback(laconic.Quantized(8)),
    "ErrorFeedback(Quantized(2))": laconic.ErrorFeedback(laconic.Quantized(2)),
    **{f"ErrorFeedback(PowerSGD({rank}))": laconic.ErrorFeedback(laconic.PowerSGD(rank)) for rank in RANKS},
}


def seconds(reducer: Reducer, *, fused: bool) -> list[float]:
    """Of one exchange each; what the other ranks send is blank."""
    source = numbers()
    flat, views = flatten([torch.empty(shape) for shape in SHAPES])
    slots: list[Slot] = [{} for _ in SHAPES]
    names, found = [str(place) for place in range(len(SHAPES))], []
    for exchange in range(REPEATS + 4):
        flat.copy_(source)
        bucket = Bucket(flat, views, names, slots, 1, WORLD, exchanges=exchange, fused=fused)
        found.append(sum(work_of(reducer.reduce(bucket), WORLD)))
    return found[4:]


def copies() -> list[float]:
    """Seconds of a copy of the bucket."""
    source, target, found = numbers(), numbers(), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    """One table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compile_all()
    copy = statistics.median(copies())
    rows, ratios = [], []
    for name, reducer in REDUCERS.items():
        eager = statistics.median(seconds(reducer, fused=False)) / copy
        row = {"reducer": name, "copies, as it is": f"{eager:.1f}", "compiled": ""}
        if reducer.kernels():
            found = seconds(reducer, fused=True)
            compiled = statistics.median(found) / copy
            row["compiled"] = f"{compiled:.1f}"
            ratios.append(
                Ratio(f"{name}, compiled over as it is", compiled / eager, median_error(found) / statistics.median(found))
            )
        rows.append(row)
    legend = (
        f"Encoding and decoding of an exchange of a transformer block's gradients (19 MB of fp32) on one rank of {WORLD}, one "
        f"thread, without a network; medians of {REPEATS}, in units of the time in which the bucket is copied once "
        f"({copy * 1e3:.2f} ms). Where 'compiled' is empty, nothing is compiled."
    )
    report("passes", "What reducers work out, in copies of the bucket", rows, legend, ratios)


if __name__ == "__main__":
    main()
