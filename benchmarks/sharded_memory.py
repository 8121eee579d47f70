"""What diloco costs in memory where the model is sharded over islands, beside a DDP over the same four ranks."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laconic
from benchmarks.harness import Ratio, peak_extra_bytes, report
from laconic.comm.flat_tensors import local
from laconic.lab.islands import island_mesh, shard
from laconic.lab.tasks import Transformer
from laconic.local.fragments import BUCKET_BYTES
from tests.live import last_ranks, ranks_within

RANKS, SHARDS, CONTEXT, BATCH = 4, 2, 64, 2
PERIOD, STEPS = 8, 18  # the second sync has an outer momentum to move, too
STRATEGY = f"diloco({PERIOD})"
KINDS = ("DDP", "islands")
Result = TypeVar("Result")


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Adds up the storages of tensors that are alive, after each operator that this thread calls.

    A storage is known from the first operator that takes or returns a tensor of it until it is freed; one that `fully_shard`
    has emptied counts as nothing. What an operator allocates and frees inside of itself is not seen, nor are the buffers of
    gloo's threads: pages are the check on that.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        self.largest: int | None = None  # of those that are new since it was set to 0; None: nobody asks

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run it; then look."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it calls operators on what it holds, and those come here
        answer = func(*args, **(kwargs or {}))
        for found in tree_leaves((args, kwargs, answer)):
            if type(found) in (Tensor, nn.Parameter):  # no fake ones, with which a DTensor tries an operator out
                self._see(found)
        self.peak = max(self.peak, self.total())
        return answer

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the object as long as the storage
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._forget, key))
            if self.largest is not None:
                self.largest = max(self.largest, storage.nbytes())

    def _forget(self, key: int, gone: object) -> None:
        if self._alive.get(key) is gone:
            del self._alive[key]

    def total(self) -> int:
        """Bytes of all that are alive now."""
        return sum(storage.nbytes() for one in list(self._alive.values()) if (storage := one()) is not None)


@dataclass(frozen=True)
class Size:
    """How large a model is. A shard of its embedding, of 32 MiB, is larger than a bucket."""

    width: int = 512
    layers: int = 2
    words: int = 32768


@dataclass
class Trainee:
    """A model before its first step; without a strategy, in the form of a replica that is trained alone.

    That is plain `fully_shard` on the island, or DDP inside `no_sync`: what diloco's replicas send between syncs, too.
    """

    kind: str
    strategy: str | None
    size: Size
    mesh: DeviceMesh = field(init=False)
    model: nn.Module = field(init=False)
    alone: AbstractContextManager[None] = field(init=False, default_factory=nullcontext)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.mesh, self.model = island_mesh(SHARDS), Transformer(self.size.width, self.size.layers, CONTEXT)
        self.model.bytes = nn.Embedding(self.size.words, self.size.width)  # of which batches use 256 rows
        if self.kind == "islands":
            shard(self.model, self.mesh)
        else:
            self.model = ddp = DistributedDataParallel(self.model)
            self.alone = nullcontext() if self.strategy else ddp.no_sync()
        gc.collect()

    def train(self, steps: int, live: LiveStorages | None = None) -> int:
        """Attach, and make so many steps; the largest storage that was new in a sync, where somebody looks."""
        optimizer, largest = torch.optim.AdamW(self.model.parameters(), lr=1e-3), [0]

        def begin(*_: object) -> None:
            if live is not None:
                live.largest = 0

        def end(*_: object) -> None:
            if live is not None:
                largest.append(live.largest or 0)
                live.largest = None

        optimizer.register_step_post_hook(begin)  # averaging is in a hook between these two
        run = laconic.attach(self.model, optimizer, self.strategy, mesh=self.mesh) if self.strategy else None
        optimizer.register_step_post_hook(end)
        batch = torch.randint(256, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
        with self.alone:
            for _ in range(steps):
                self.model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        if run is not None:
            assert run.stats().syncs == steps // PERIOD
            run.sync()
            run.detach()
        return max(largest)


def storages(rank: int, kind: str, strategy: str | None, size: Size, steps: int = STEPS) -> dict[str, int]:
    """Bytes of this rank: of live storages, at most; of the largest in a sync; of its parameters, and of the largest one."""
    with LiveStorages() as live:
        trainee = Trainee(kind, strategy, size)
        live.peak = 0
        largest = trainee.train(steps, live)
    held = [local(parameter).nbytes for parameter in trainee.model.parameters()]
    return {"peak": live.peak, "in a sync": largest, "held": sum(held), "largest held": max(held)}


def pages(rank: int, kind: str, strategy: str | None, size: Size) -> int:
    """Bytes of memory that this rank took at most, beyond what it had with the model built."""
    Trainee(kind, strategy, Size(64, 1, 256)).train(PERIOD)  # code is loaded
    trainee = Trainee(kind, strategy, size)
    return peak_extra_bytes(lambda: trainee.train(STEPS))


def fresh(
    function: Callable[[int, str, str | None, Size], Result], kind: str, strategy: str | None, size: Size
) -> list[Result]:
    """By processes that nobody has used: what others have freed, and malloc has kept, would hide pages."""
    try:
        return ranks_within(900, RANKS, function, kind, strategy, size)
    finally:
        last_ranks(1, nothing)


def nothing(rank: int) -> None:
    """What the last of these processes does."""


def measure(size: Size) -> dict[str, dict[str, int]]:
    """By kind of model, bytes of the rank that has most: with the strategy, and `without` it."""
    found: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        plain, ours = (fresh(storages, kind, strategy, size) for strategy in (None, STRATEGY))
        touched = [max(fresh(pages, kind, strategy, size)) for strategy in (None, STRATEGY)]
        most = {key: max(one[key] for one in ours) for key in ours[0]}
        peaks = {"peak without": max(one["peak"] for one in plain), "pages without": touched[0], "pages": touched[1]}
        found[kind] = {**most, **peaks}
    return found


def tables(found: Mapping[str, Mapping[str, int]]) -> tuple[list[dict[str, object]], list[Ratio]]:
    """Rows, and what is watched."""
    rows: list[dict[str, object]] = []
    for kind, one in found.items():
        extra = one["peak"] - one["peak without"]
        rows.append(
            {
                "": f"{STRATEGY} on {'a DDP' if kind == 'DDP' else '2 islands of 2'}",
                "parameters of a rank, MB": f"{one['held'] / 1e6:.1f}",
                "peak without, MB": f"{one['peak without'] / 1e6:.1f}",
                "with, MB": f"{one['peak'] / 1e6:.1f}",
                "extra, MB": f"{extra / 1e6:.1f}",
                "extra, of its parameters": f"{extra / one['held']:.2f}",
                "extra pages, MB": f"{(one['pages'] - one['pages without']) / 1e6:.1f}",
                "largest new tensor in a sync, MB": f"{one['in a sync'] / 1e6:.1f}",
                "largest parameter of a rank, MB": f"{one['largest held'] / 1e6:.1f}",
            }
        )
    whole, parts = (found[kind] for kind in KINDS)
    ratios = [
        Ratio("peak extra memory over DDP's", _extra(parts, "peak") / _extra(whole, "peak")),
        Ratio("peak extra pages over DDP's", _extra(parts, "pages") / _extra(whole, "pages"), 0.02),
        Ratio("largest new tensor in a sync over the largest whole parameter", parts["in a sync"] / whole["largest held"]),
    ]
    return rows, ratios


def _extra(one: Mapping[str, int], what: str) -> int:
    return one[what] - one[f"{what} without"]


def main() -> None:
    """One table."""
    found = measure(Size())
    rows, ratios = tables(found)
    legend = (
        f"A transformer of {found['DDP']['held'] / 4e6:.0f} million fp32 parameters, AdamW, {RANKS} ranks, {STEPS} steps with "
        f"{STEPS // PERIOD} syncs. 'without': the same loop without laconic, plain fully_shard on the island, or DDP inside "
        "no_sync. Peaks are of live tensor storages, looked at after each operator; pages are the process's, as Linux counts "
        "them, and include gloo's buffers. The largest new tensor in a sync is the largest storage that is first seen between "
        f"the optimizer's step and the end of the averaging after it; a bucket has {BUCKET_BYTES / 1e6:.1f} MB at most, or one "
        f"parameter. Ratios, islands over DDP: {ratios[0].value:.2f} of the storages, {ratios[1].value:.2f} of the pages."
    )
    report("sharded_memory", "Memory of local updates on islands", rows, legend, ratios)


if __name__ == "__main__":
    main()
