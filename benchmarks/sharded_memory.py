"""What diloco costs in memory where the model is sharded over islands, beside a DDP over the same four ranks."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
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
from tests.live import last_ranks

ISLANDS, SHARDS, STEPS = 2, 2, 18
WIDTH, LAYERS, CONTEXT, WORDS = 512, 4, 64, 32768  # a shard of the embedding, 32 MiB, is larger than a bucket
STRATEGY = "diloco(8)"
KINDS = ("DDP", "islands")


class LiveStorages(TorchDispatchMode):
    """Adds up the storages of tensors that are alive, after each operator of this thread that is called from outside others.

    A storage is known from the first operator that takes or returns a tensor of it, and until it is freed; one that
    `fully_shard` has emptied counts as nothing. What an operator allocates and frees inside of itself is not seen, nor is
    what gloo's threads do: pages are the check on that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        self.largest: int | None = None  # storage that was new since this was set to 0; None: nobody asks

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run it; then look."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it calls operators on what it holds, which come here
        answer = func(*args, **(kwargs or {}))
        for found in tree_leaves((args, kwargs, answer)):
            if isinstance(found, Tensor) and found.device.type == "cpu":
                self._see(found)
        self.peak = max(self.peak, self.total())
        return answer

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the object as long as the storage
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _, key=key: self._alive.pop(key, None))
            if self.largest is not None:
                self.largest = max(self.largest, storage.nbytes())

    def total(self) -> int:
        """Bytes of all that are alive now."""
        return sum(storage.nbytes() for one in list(self._alive.values()) if (storage := one()) is not None)


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    width: int = WIDTH
    layers: int = LAYERS
    words: int = WORDS

    def build(self) -> nn.Module:
        """A transformer with an embedding that is large beside the rest, as real ones have."""
        torch.manual_seed(0)
        model = Transformer(self.width, self.layers, CONTEXT)
        model.bytes = nn.Embedding(self.words, self.width)
        return model


def train(kind: str, strategy: str | None, size: Size, steps: int, live: LiveStorages | None = None) -> dict[str, int]:
    """So many steps; the bytes of what this rank holds: of its largest parameter, of all, and of the largest while averaging.

    Without a strategy it is plain `fully_shard` on the island, or DDP's `no_sync`: what a replica does between syncs.
    """
    mesh, model, alone = island_mesh(SHARDS), size.build(), nullcontext()
    if kind == "DDP":
        model = DistributedDataParallel(model)
        alone = nullcontext() if strategy else model.no_sync()
    else:
        shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = {"during a sync": 0, "at rest": 0}

    def begin(*_: object) -> None:
        if live is not None:
            live.largest = 0

    def end(*_: object) -> None:
        if live is not None:
            found["during a sync"] = max(found["during a sync"], live.largest or 0)
            live.largest = None

    optimizer.register_step_post_hook(begin)  # laconic's own comes between the two
    run = laconic.attach(model, optimizer, strategy, mesh=None if kind == "DDP" else mesh) if strategy else None
    optimizer.register_step_post_hook(end)
    batch = torch.randint(256, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    with alone:
        for _ in range(steps):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    if live is not None:
        found["at rest"] = live.total()
    held = [local(parameter).nbytes for parameter in model.parameters()]
    if run is not None:
        assert run.stats().syncs == steps // 8
        run.sync()
        run.detach()
    return {**found, "its largest parameter": max(held), "its parameters": sum(held)}


def storages(rank: int, kind: str, strategy: str | None, size: Size, steps: int) -> dict[str, int]:
    """Bytes of live storages of this rank, at most, and what `train` found."""
    with LiveStorages() as live:
        found = train(kind, strategy, size, steps, live)
    return {"peak": live.peak, **found}


def pages(rank: int, kind: str, strategy: str | None, size: Size, steps: int) -> int:
    """Bytes of memory that Linux gave this rank for it, at most."""
    train(kind, strategy, Size(64, 1, 256), 8)  # code is loaded
    return peak_extra_bytes(lambda: train(kind, strategy, size, steps))


def measure(size: Size, steps: int = STEPS) -> dict[str, dict[str, Any]]:
    """By kind of model: largest of all ranks, with and without the strategy."""
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        by_rank = {strategy: last_ranks(4, storages, kind, strategy, size, steps) for strategy in (None, STRATEGY)}
        most = {strategy: {key: max(one[key] for one in ranks) for key in ranks[0]} for strategy, ranks in by_rank.items()}
        touched = {strategy: max(last_ranks(4, pages, kind, strategy, size, steps)) for strategy in (None, STRATEGY)}
        found[kind] = {"plain": most[None], "ours": most[STRATEGY], "pages": (touched[None], touched[STRATEGY])}
    return found
