"""What trains a model in the benchmarks over links: torch's own ways, torchft's, accelerate's, and ours, all in one form."""

import itertools
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from benchmarks.torchft_peer import make_manager, pieces

PERIOD = 24
STREAMING = f"streaming_diloco({PERIOD}, fragments=4, delay=5, blend=0.0, carry=True, outer_lr=1.0, outer_momentum=0.2)"
FP32 = "laconic streaming_diloco, the same in fp32"
LONG = timedelta(seconds=600)
_ports = itertools.count(1)  # every quorum has a lighthouse of its own


@dataclass
class Trainee:
    """A model on its way: call it with a batch for the loss, then step."""

    model: nn.Module
    optimizer: Optimizer
    after: Callable[[], object] = lambda: None  # what the user must call after each step
    period: int = 1
    warm: int = 0  # after so many steps, and whole periods more, nothing is outstanding
    stack: ExitStack = field(default_factory=ExitStack)  # closed in the end

    def step(self, batch: Tensor) -> None:
        """One step of training."""
        self.model(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after()


Making = Callable[[nn.Module, Callable[[nn.Module], Optimizer]], Trainee]


def laconics(strategy: str, period: int = 1, bucket_cap_mb: float | None = None) -> Making:
    """`laconic.attach`."""

    def make(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        inner = optimizer(ddp)
        run = laconic.attach(ddp, inner, strategy)
        trainee = Trainee(ddp, inner, period=period, warm=period)
        trainee.stack.callback(run.detach)
        trainee.stack.callback(run.sync)
        return trainee

    return make


def plain(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
    """The module as it is: no DDP, no averaging, nothing of anybody's."""
    return Trainee(model, optimizer(model))


def torch_ddp(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
    """No hook."""
    ddp = DistributedDataParallel(model)
    return Trainee(ddp, optimizer(ddp))


def torch_small_buckets(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
    """No hook, buckets of `SMALL_MB`."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_MB)
    return Trainee(ddp, optimizer(ddp))


def torch_fp16(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
    """fp16_compress_hook."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return Trainee(ddp, optimizer(ddp))


def torch_powersgd(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
    """powerSGD_hook of rank 4, in one bucket: with two it dies or hangs on gloo."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000)
    ddp.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook)
    return Trainee(ddp, optimizer(ddp))


def torch_post_local(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
    """post_localSGD_hook, gradients of the first step alone, with PostLocalSGDOptimizer."""
    ddp = DistributedDataParallel(model)
    state = post_local.PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
    ddp.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)  # after each 24th step, as the others
    return Trainee(ddp, PostLocalSGDOptimizer(optimizer(ddp), averager), period=PERIOD, warm=PERIOD)


def accelerate_local(period: int = PERIOD) -> Making:
    """accelerate's LocalSGD."""

    def make(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator(cpu=True)
        ddp, inner = accelerator.prepare(model, optimizer(model))
        local = LocalSGD(accelerator=accelerator, model=ddp, local_sgd_steps=period, enabled=True)
        trainee = Trainee(ddp, inner, local.step, period=period, warm=period)
        trainee.stack.enter_context(local)
        return trainee

    return make


def torchft_diloco(
    fragments: int, delay: int, period: int = PERIOD, outer_lr: float = 1.0, outer_momentum: float = 0.2
) -> Making:
    """torchft's DiLoCo, each rank a replica group of one; the first one has the lighthouse."""

    def make(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer]) -> Trainee:
        inner = optimizer(model)
        parts = [model] if fragments == 1 else pieces(model, fragments)
        manager, stack = torchft_manager(model)
        from torchft.local_sgd import DiLoCo

        outer = [
            torch.optim.SGD(part.parameters(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
            for part in parts
        ]
        stack.enter_context(DiLoCo(manager, parts, inner, outer, period, use_bucketization=True, fragment_sync_delay=delay))
        return Trainee(model, inner, period=period, warm=period, stack=stack)

    return make


def torchft_manager(model: nn.Module) -> tuple[Any, ExitStack]:
    """A manager in a quorum with all others; the stack takes it down again, the first rank last."""
    rank, world, master = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    address = master.rsplit(".", 1)[0] + f".{rank + 1}" if os.environ.get("LACONIC_CABLE") else "127.0.0.1"
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse, port = None, int(os.environ["MASTER_PORT"]) + next(_ports)
    if rank == 0:
        limits = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 60_000}
        lighthouse = LighthouseServer(bind=f"[::]:{port}", min_replicas=world, **limits)
    dist.barrier()
    manager, store = make_manager(
        address,
        f"http://{master}:{port}",
        f"replica_{rank}",
        model.load_state_dict,
        model.state_dict,
        min_replicas=world,
        collective=LONG,
        timeout=LONG,
        quorum=LONG,
        max_retries=0,
    )
    manager.start_quorum()  # connects all; else the first sync would pay for it
    stack = ExitStack()

    def leave() -> None:
        dist.barrier()
        manager.shutdown(wait=False)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()
        stack.store = store  # type: ignore[attr-defined]  # lives as long as the manager

    stack.callback(leave)
    return manager, stack


TORCH: dict[str, Making] = {
    "torch DDP": torch_ddp,
    "torch fp16_compress_hook": torch_fp16,
    "torch powerSGD_hook, rank 4": torch_powersgd,
    f"torch post-local SGD, {PERIOD}": torch_post_local,
}
ACCELERATE: dict[str, Making] = {f"accelerate LocalSGD, {PERIOD}": accelerate_local()}
TORCHFT: dict[str, Making] = {
    f"torchft DiLoCo, {PERIOD}": torchft_diloco(1, 0),
    f"torchft DiLoCo, {PERIOD}, 4 fragments, delay 5": torchft_diloco(4, 5),
}
OURS: dict[str, Making] = {
    "laconic ddp()": laconics("ddp()"),
    "laconic int8()": laconics("int8()"),
    "laconic powersgd(rank=4, warmup=2)": laconics("powersgd(rank=4, warmup=2)"),
    f"laconic local_sgd({PERIOD})": laconics(f"local_sgd({PERIOD})", PERIOD),
    f"laconic {STREAMING}": laconics(STREAMING, PERIOD),
    FP32: laconics(f"{STREAMING[:-1]}, reducer=Exact())", PERIOD),
}
SMALL_MB = 0.5
COMPRESSED: dict[str, Making] = {
    "torch DDP": torch_ddp,
    "torch fp16_compress_hook": torch_fp16,
    "laconic ddp()": laconics("ddp()"),
    "laconic fp16()": laconics("fp16()"),
    "laconic int8()": laconics("int8()"),
    "laconic int4()": laconics("int4()"),
    "laconic powersgd(rank=4, warmup=2)": laconics("powersgd(rank=4, warmup=2)"),
    f"torch DDP, buckets of {SMALL_MB} MB": torch_small_buckets,
    f"laconic int8(), buckets of {SMALL_MB} MB": laconics("int8()", bucket_cap_mb=SMALL_MB),
    f"laconic int4(), buckets of {SMALL_MB} MB": laconics("int4()", bucket_cap_mb=SMALL_MB),
}
SILENT = "laconic silent()"
LIMIT: dict[str, Making] = {SILENT: laconics("silent()")}
PLAIN: dict[str, Making] = {"a module alone, without DDP": plain}
warnings.filterwarnings("ignore", "When period is 1")
