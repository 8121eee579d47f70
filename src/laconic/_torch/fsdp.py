"""FSDP2: which modules `fully_shard` has sharded, and where the gradients of their shards lie."""

import sys
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from laconic._torch.private_names import FSDP_COLLECTIVES, part


def sharding_is_imported() -> bool:
    """Whether anybody in this process can have made a DTensor, or sharded a module."""
    return "torch.distributed.tensor" in sys.modules or "torch.distributed.fsdp" in sys.modules


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor, of which each rank holds a part. Importing them takes seconds: who has one has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether it is a FullyShardedDataParallel, FSDP's first form."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def is_fully_sharded(module: object) -> bool:
    """Whether `fully_shard` was called on it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def reshard(model: nn.Module) -> None:
    """Forget gathered parameters: their shards have been written. After a forward, the root keeps its own gathered."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]  # of FSDPModule


class ShardGroup:
    """What one `fully_shard` reduces together: trained parameters, whose gradients it reduce-scatters as one flat tensor."""

    def __init__(self, name: str, module: Any, state: Any) -> None:
        self.name = name or "the root"  # of the module, from the model
        self._module, self._state, self._group = module, state, part(state, "_fsdp_param_groups")[0]

    @property
    def _shards(self) -> list[Any]:
        return [shard for shard in part(self._group, "fsdp_params") if part(shard, "sharded_param").requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, in the order of the flat tensor. A load with `assign=True` may replace them."""
        return [shard.sharded_param for shard in self._shards]

    def pieces(self) -> list[tuple[torch.Size, int]]:
        """Of each parameter the shape of this rank's shard, and how many numbers that is in the flat tensor, with padding."""
        sizes = [(part(shard, "sharded_size"), part(shard, "padded_sharded_param_size")) for shard in self._shards]
        return [(size, padded.numel()) for size, padded in sizes]

    @property
    def ranks(self) -> list[int]:
        """All ranks that FSDP communicates with in a backward: over which it shards, and over which it replicates."""
        mesh = part(part(self._group, "mesh_info"), "mesh")
        return sorted(mesh.mesh.flatten().tolist())

    @property
    def reduce_dtype(self) -> torch.dtype:
        """That of the flat tensor: the policy's for reductions, else the one that it computes in, else the parameters'."""
        policy = part(self._group, "mp_policy")
        chosen = policy.reduce_dtype or policy.param_dtype or self.parameters[0].dtype
        assert isinstance(chosen, torch.dtype)
        return chosen

    @property
    def in_backward(self) -> bool:
        """Whether FSDP has yet to end the backward that is running. One inside of it, of a reentrant checkpoint, ends first."""
        return bool(part(part(self._state, "_state_ctx"), "post_backward_final_callback_queued"))

    @property
    def averages(self) -> bool:
        """False after `set_requires_all_reduce(False)`: this backward's gradients are to be added up, not averaged yet."""
        return bool(part(self._group, "all_reduce_grads"))

    def divisor(self, dtype: torch.dtype) -> float:
        """What FSDP divides the flat tensor by after the hook: with a 16-bit range, it divides before the sum and after it."""
        group, kind = self._group, part(self._group, "mesh_info")
        scatter = part(group, "_reduce_scatter_process_group") if hasattr(kind, "shard_process_group") else None
        replicate = part(group, "_all_reduce_process_group") if hasattr(kind, "replicate_process_group") else None
        factors = part(resolve_name(FSDP_COLLECTIVES), "_get_gradient_divide_factors")(
            scatter,
            replicate,
            dtype,
            part(group, "device").type,
            part(group, "gradient_divide_factor"),
            part(group, "force_sum_reduction_for_comms"),
        )
        return float(factors[1] or 1)

    def set_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        """Have it called with the flat tensor after each reduce-scatter."""
        self._module.set_all_reduce_hook(hook)

    @property
    def hook(self) -> object:
        """The hook that is set; None: none is."""
        return part(self._group, "_all_reduce_hook")


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """Those of a model, in the order of its modules; one that is frozen trains no parameters."""
    return [ShardGroup(name, module, state) for name, module, state in _states(model) if part(state, "_fsdp_param_groups")]


def with_several_groups(model: nn.Module) -> str | None:
    """A module in which `fully_shard` made several groups, by a mesh for each parameter: torch lets nobody hook in there."""
    return next((name or "the root" for name, _, state in _states(model) if len(part(state, "_fsdp_param_groups")) > 1), None)


def _states(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Each `fully_shard`, by the first module that it was given, and its state."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if is_fully_sharded(module):
            state = part(module, "_get_fsdp_state")()
            if id(state) not in seen:
                seen.add(id(state))
                yield name, module, state


def after_accumulation(parameter: Tensor) -> bool:
    """Whether a user has hooks on the accumulated gradient: these see it before it is averaged."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def failed_in_collective(error: BaseException) -> bool:
    """Whether an error comes from a collective that torch launched itself, as it does inside an island."""
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(("torch.distributed.distributed_c10d", "torch.distributed.fsdp"))
