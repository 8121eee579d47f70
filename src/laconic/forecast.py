"""What a strategy will send, before anything runs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic import dryrun
from laconic.bucket import Bucket, unflatten
from laconic.composition import Strategy
from laconic.spec import strategy as read
from laconic.wire import Traffic

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's defaults
LATE = 1 << 40  # a step by which every warm-up is over


def predict(
    strategy: Strategy | str,
    model: nn.Module,
    *,
    world_size: int,
    buckets: Sequence[Sequence[str]] | None = None,
    step: int = LATE,
) -> Traffic:
    """Bytes and collectives of one rank in one step, worked out on meta tensors.

    `buckets` are lists of parameter names, as `run.layout()` gives them; without them, DDP's own rule is followed: the
    parameters last to first, 1 MiB in the first bucket and 25 MiB in the others. `step` counts the steps done before, with
    one exchange each; by default, every warm-up is over.

    >>> import torch
    >>> predict("bf16()", torch.nn.Linear(1000, 1000, device="meta"), world_size=4)
    Traffic(payload_bytes=2502500, wire_bytes=3003000, collectives=2)
    """
    chosen = read(strategy)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    module = model.module if isinstance(model, DistributedDataParallel) else model
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not named:
        raise ValueError("the model has no parameters that are trained")
    if chosen.route.at(step) is None:
        return Traffic()
    total = Traffic()
    for names in default_buckets(named) if buckets is None else buckets:
        unknown = [name for name in names if name not in named]
        if unknown:
            raise ValueError(f"buckets name parameters that the model doesn't train: {', '.join(unknown)}")
        parameters = [named[name] for name in names]
        size = sum(parameter.numel() for parameter in parameters)
        flat = torch.empty(size, dtype=parameters[0].dtype, device="meta")
        views, slots = unflatten(flat, parameters), [{} for _ in names]  # type: list[Tensor], list[dict[str, Tensor]]
        bucket = Bucket(flat, views, names, slots, rank=0, world=world_size, step=step, round=step)
        total += dryrun.predict(chosen.reducer.reduce(bucket), world_size)
    return total


def default_buckets(named: dict[str, Tensor] | dict[str, nn.Parameter]) -> list[list[str]]:
    """The buckets that DDP settles on when gradients become ready from the last parameter to the first."""
    names = list(reversed(named))
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    groups, _ = dist._compute_bucket_assignment_by_size([named[name] for name in names], limits)
    return [[names[index] for index in group] for group in groups]
