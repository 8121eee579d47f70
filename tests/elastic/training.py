"""A small job that workers train together, and what each of them writes down of it."""

import functools
import gc
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import elastic
from laconic.comm.group import TorchGroup
from laconic.elastic import healing
from laconic.lab.tasks import BytesGPT

FEATURES, HIDDEN, BATCH = 16, 32, 32
HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """What a worker is to do."""

    lighthouse: str
    strategy: str
    steps: int
    folder: str
    step_seconds: float = 0.01
    timeout_seconds: float = 4.0
    quorum_seconds: float = 30.0
    width: int = HIDDEN
    weights: str = "steps"
    late: str = "carry"
    min_replicas: int = 1
    ranks: int = 1  # of each worker
    bind: str = "127.0.0.1"
    record: bool = False
    collect: bool = True  # reference cycles; without, nothing is freed by chance
    task: str = "toy"  # or one of the lab's
    die_at: tuple[str, int] | None = None  # at the n-th of these: "launch" of a collective, "send" or "get" of a state


def model(width: int = HIDDEN, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


class Toy:
    """What most tests train, in the words of a task of the lab."""

    def __init__(self, width: int) -> None:
        self._width = width

    def model(self, seed: int) -> nn.Module:
        return model(self._width, seed)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1000 * seed + os.getpid())
        while True:
            yield batch(generator)

    def loss(self, net: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(net(one[0]), one[1])

    def rate(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by."""
        return 1.0

    def evaluate(self, net: nn.Module) -> float:
        return loss_of(net)


class Bytes:
    """The lab's byte-level transformer, which begins anew with random weights."""

    def __init__(self, size: str) -> None:
        self._task = BytesGPT(size)
        self.optimizer, self.loss, self.evaluate = self._task.optimizer, self._task.loss, self._task.evaluate

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self._task.model()

    def batches(self, seed: int) -> Iterator[Tensor]:
        return self._task.batches(seed, 1, os.getpid())

    def rate(self, step: int, steps: int) -> float:
        """Up, and then down to nearly nothing, as the lab has it."""
        return min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def batch(generator: torch.Generator, size: int = BATCH) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, FEATURES, generator=generator)
    return x, (x[:, :4].sin().sum(1, keepdim=True) + x[:, 4:5] * x[:, 5:6]) / 2


def loss_of(net: nn.Module) -> float:
    """On numbers that nobody trains on."""
    x, y = batch(torch.Generator().manual_seed(12345), 2048)
    with torch.no_grad():
        return float(nn.functional.mse_loss(net(x), y))


def digest(net: nn.Module) -> str:
    """Of all its bits."""
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()[:16]


def train(name: str, job: Job, seed: int, rank: int = 0) -> None:
    """One worker, in a process of its own, until the run has made so many steps; or one rank of one."""
    torch.set_num_threads(1)
    if not job.collect:
        gc.disable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with Path(job.folder, f"{name}.{os.getpid()}.jsonl").open("w", buffering=1) as out:

        def note(**facts: Any) -> None:
            out.write(json.dumps({"name": name, "pid": os.getpid(), "time": time.time(), **facts}) + "\n")

        try:
            _train(name, job, seed, rank, note)
        except Exception as error:
            note(error=f"{type(error).__name__}: {error}")
            raise


PLACES: dict[str, tuple[ModuleType | type, str]] = {
    "launch": (TorchGroup, "launch"),
    "send": (healing, "_send"),
    "get": (healing, "_get"),
}


def die_at(place: str, number: int) -> None:
    """From now on, kill this process as the n-th call of it begins."""
    owner, name = PLACES[place]
    act, calls = getattr(owner, name), [0]

    @functools.wraps(act)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **kwargs)

    setattr(owner, name, counted)


def _replica(task: Toy | Bytes, name: str, job: Job, seed: int, rank: int) -> tuple[nn.Module, nn.Module]:
    """The model, and what is trained: the same, or a DistributedDataParallel over the ranks of this worker."""
    net = task.model(seed)
    if job.ranks == 1:
        return net, net
    store = Path(job.folder, f"{name}.{seed}.store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.ranks)
    return net, DistributedDataParallel(net)


def _train(name: str, job: Job, seed: int, rank: int, note: Any) -> None:
    task: Any = Toy(job.width) if job.task == "toy" else Bytes(job.task.partition(":")[2])
    net, trained = _replica(task, name, job, seed, rank)
    optimizer = task.optimizer(trained)
    full, batches = optimizer.param_groups[0]["lr"], task.batches(seed)
    note(started=True)
    if job.die_at is not None and job.die_at[0] == "get":  # a worker gets a state as it joins
        die_at(*job.die_at)
    manager = elastic.Membership(
        lighthouse=job.lighthouse,
        name=name,
        bind=job.bind,
        timeout_seconds=job.timeout_seconds,
        quorum_seconds=job.quorum_seconds,
    )
    with elastic.attach(
        trained,
        optimizer,
        job.strategy,
        manager,
        min_replicas=job.min_replicas,
        weights=job.weights,  # type: ignore[arg-type]
        late=job.late,  # type: ignore[arg-type]
    ) as run:
        version, slow = run.version, Path(job.folder, f"{name}.slow")
        note(attached=True, version=version, step=run.step)
        if job.die_at is not None and job.die_at[0] != "get":
            die_at(*job.die_at)
        if job.record:
            laconic.Meter(run, Path(job.folder, "records"), every=50)
        if version > 1:  # the sync by which it joined
            note(version=version, step=run.step, digest=digest(net), workers=list(run.stats().workers))
        while run.step < job.steps:
            time.sleep(float(slow.read_text()) if slow.exists() else job.step_seconds)
            optimizer.param_groups[0]["lr"] = full * task.rate(run.step, job.steps)
            task.loss(trained, next(batches)).backward()
            if job.task != "toy":
                nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if run.version != version:
                version = run.version
                stats = run.stats()
                weights = [round(stats.weights[each], 6) for each in sorted(stats.weights)]
                note(
                    version=version,
                    step=run.step,
                    digest=digest(net),
                    workers=list(stats.workers),
                    weights=weights,
                    **({"loss": loss_of(net)} if job.task == "toy" else {}),
                )
        note(end=True, step=run.step, digest=digest(net), loss=task.evaluate(net), stats=asdict(run.stats()))
