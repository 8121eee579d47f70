"""`laconic.attach`: attaching a strategy, or leaving its choice to the advisor."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from laconic.run.attach import Pilot
from laconic.run.attach import attach as attach_run
from laconic.run.run import Run
from laconic.strategies.strategy import Advised, Strategy


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str,
    *,
    scaler: torch.amp.GradScaler | None = None,
    uneven: Literal["error", "stop"] = "error",
    mesh: DeviceMesh | None = None,
    replicate: str = "replicate",
    check_every: int = 0,
    fused: bool | Literal["auto"] = "auto",
) -> Run:
    """Train `model` by `strategy`, with the loop as it is.

    All ranks call this together, after `init_process_group`. Use what it returns as a context manager around the loop: at the
    end of the block the replicas become equal. The run's clock counts attempted optimizer steps, however many backward passes
    each takes. A model starts on all ranks with the first one's numbers, or on all islands with the first island's. (A
    DistributedDataParallel has seen to it itself.)

    Bytes: those of the strategy, and a digest of 100 bytes to each rank. A model that is no DistributedDataParallel costs
    (N-1) * n * itemsize more, once, for N ranks and n numbers.

    Memory: that of the strategy.

    Not: a parameter that is frozen now is never averaged, even if it is trained later. Refused, with the reason: sparse
    gradients, DDP's `mixed_precision=`, a DDP that has a communication hook, and FSDP1. Nothing here has run on a GPU.

    Arguments:
      `model`: a DistributedDataParallel; or a model that is sharded over islands of ranks, by `fully_shard` or tensor
        parallelism; or any module, if the strategy never averages gradients.
      `optimizer`: the optimizer over the model's parameters, or a list of several. A step is complete when each has made one.
      `strategy`: an object such as `laconic.diloco(32)`, or its text, `"diloco(32)"`. With `"auto()"` the advisor chooses one
        in the first steps; `run.advice()` has the reason.
      `scaler`: the GradScaler, if the loop has one: steps that it skips are counted, too. Default None.
      `uneven`: what happens when ranks run out of batches at different steps. "error": all ranks raise an UnevenError that
        names them. "stop": all ranks stop together, for a one-byte collective before each exchange. Default "error".
      `mesh`: a DeviceMesh whose dimensions the strategy can name as subgroups, as in `post_local_sgd(subgroup="inner")`. Of a
        sharded model, the mesh of its islands. Default None: a subgroup is "node", or a number of ranks.
      `replicate`: of a sharded model, the dimension of `mesh` that counts the islands; the others are inside an island.
        Default "replicate".
      `check_every`: compare the replicas after every so many syncs, or steps if the strategy has no syncs; 0: never. See
        `check_replicas`. Default 0.
      `fused`: whether encoding and decoding run compiled, to the same bits. "auto": on a CPU with a C++ compiler, which runs
        once a machine in a process of its own, and nobody waits for it; $LACONIC_FUSED, 0 or 1, stands for it. True: always,
        and `attach` waits for the compiler. False: never. Default "auto".

    Ranks compare what they were given, before anything is changed. Where it differs, or can't be used on one of them, every
    rank raises a ValueError or a TypeError that says what and where. A RuntimeError says that there is no process group yet, or
    that `fused=True` can't compile.

    >>> import torch, laconic
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "bf16()") as run:
    ...     for batch in torch.ones(3, 8, 4):
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> run.stats().steps, run.stats().payload_bytes
    (3, 60)

    The same with every argument, on a model that is not wrapped:

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> bare, scaler = torch.nn.Linear(4, 2), torch.amp.GradScaler("cpu")
    >>> weight = torch.optim.SGD([bare.weight], lr=0.1)
    >>> bias = torch.optim.SGD([bare.bias], lr=0.1)
    >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("inner",))
    >>> with laconic.attach(
    ...     bare, [weight, bias], "local_sgd(2)", scaler=scaler, mesh=mesh,
    ...     uneven="stop", check_every=10, fused=False,
    ... ) as run:
    ...     for batch in torch.ones(4, 8, 4):
    ...         scaler.scale(bare(batch).sum()).backward()
    ...         scaler.step(weight)
    ...         scaler.step(bias)
    ...         scaler.update()
    >>> run.stats().syncs
    2
    >>> torch.distributed.destroy_process_group()
    """
    return attach_run(
        model,
        optimizer,
        strategy,
        scaler=scaler,
        uneven=uneven,
        mesh=mesh,
        replicate=replicate,
        check_every=check_every,
        fused=fused,
        advisor=_pilot,
    )


def _pilot(advised: Advised) -> Pilot:
    from laconic.advisor.auto import AutoPilot  # only where a choice is asked for: it brings the forecast and the cost model

    return AutoPilot(advised)
