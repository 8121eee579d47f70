"""Every undocumented name of torch that laconic uses, why, and whether this torch has it."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch

SEEN = "2.13 and 2.15"  # the releases that laconic's tests have run on


class MissingPartError(RuntimeError):
    """This torch lacks something that laconic uses."""


@dataclass(frozen=True)
class Part:
    """One name of torch's: whose it is, and what laconic uses it for."""

    owner: str  # a module, a class, or one of the live objects that `missing` is given
    name: str
    why: str
    mark: bool = False  # an attribute that the module `owner` gives to parameters: it is looked for in that module's source


C10D = "torch.distributed.distributed_c10d"
WORLD = f"{C10D}._world"
DDP = "torch.nn.parallel.DistributedDataParallel"
STATIC_DDP = f"{DDP}(static_graph=True)"
REDUCER = "torch.distributed.Reducer"
GROUP = "torch.distributed.ProcessGroup"
GLOO = "torch.distributed.ProcessGroupGloo"
OPTIONS = "the options of a process group's backend"
SCALER = "torch.amp.GradScaler"
OPTIMIZER = "torch.optim.Optimizer"
ZERO = "torch.distributed.optim.ZeroRedundancyOptimizer"
ZERO_INFO = f"{ZERO}._overlap_info"
ZERO_STATUS = "torch.distributed.optim.zero_redundancy_optimizer._OverlapStatus"
TENSOR = "torch.Tensor"
FSDP_STATE = "the state of a module that fully_shard has sharded"
FSDP_CONTEXT = f"the context of {FSDP_STATE}"
FSDP_GROUP = f"a group of {FSDP_STATE}"
FSDP_SHARD = f"a parameter of {FSDP_GROUP}"
FSDP_MESH = f"the mesh_info of {FSDP_GROUP}"
FSDP_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
MIXED = "torch.nn.parallel.distributed"
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"

PARTS = [
    # Process groups
    Part(C10D, "_new_process_group_helper", "build a process group under a name of ours, by its members alone"),
    Part(C10D, "GroupName", "the type of that name"),
    Part(C10D, "_world", "which groups there are, and the ranks of a new one"),
    Part(WORLD, "pg_map", "the backend of the user's group, and whether a group is still there"),
    Part(WORLD, "pg_group_ranks", "the global ranks of a new group"),
    Part(C10D, "_get_default_group", "the group of a model without DDP"),
    Part("torch.distributed", "_rank_not_in_group", "ranks outside a group average nothing"),
    Part(GROUP, "_device_types", "whether small messages can travel from the CPU"),
    Part(GROUP, "_get_backend", "the user's timeout, for groups of our own"),
    Part(OPTIONS, "_timeout", "the user's timeout, for groups of our own"),
    Part(GROUP, "get_group_store", "where the members of a new group meet"),
    Part(GROUP, "_set_default_backend", "a group that listens at one address alone"),
    Part(GROUP, "_register_backend", "a group that listens at one address alone"),
    Part(GLOO, "_Options", "a group that listens at one address alone"),
    Part(GLOO, "create_device", "a group that listens at one address alone"),
    Part(f"{GLOO}._Options", "_devices", "a group that listens at one address alone"),
    Part(f"{GLOO}._Options", "_timeout", "a group that listens at one address alone"),
    Part(GLOO, "_set_sequence_number_for_group", "as torch's own groups"),
    Part("torch.distributed", "all_gather_single", "gather into one tensor; new in torch 2.13"),
    Part("torch.distributed", "all_to_all_single", "exchange rows of one tensor"),
    Part("torch.distributed", "DistError", "tell a lost peer from other errors"),
    # DDP
    Part(DDP, "_comm_hooks", "whether the user has registered a hook, and which"),
    Part(DDP, "_has_rebuilt_buckets", "whether the bucket order is settled"),
    Part(DDP, "_sync_buffers", "tell from a traceback that the broadcast of buffers has failed"),
    Part(STATIC_DDP, "_static_graph_delay_allreduce_enqueued", "whether a static graph has had its first backward"),
    Part(DDP, "_lazy_init_ran", "whether a forward has run"),
    Part(DDP, "_join_config", "whether ranks may run out of batches"),
    Part(DDP, "_modules", "the module of a DDP, also of one that was never built to its end"),
    Part(DDP, "_module_parameters", "the parameters whose gradients are used up in backward"),
    Part(DDP, "forward_sync_buffers", "no buffers are sent in a local phase; new in torch 2.13"),
    Part(DDP, "require_backward_grad_sync", "no communication in a backward of a local phase"),
    Part(DDP, "parameters_to_ignore", "which parameters DDP does not average"),
    Part(DDP, "find_unused_parameters", "whether DDP keeps its first buckets"),
    Part(DDP, "static_graph", "whether DDP keeps its first buckets"),
    Part(DDP, "mixed_precision", "whether DDP runs a hook of its own"),
    Part(DDP, "skip_all_reduce_unused_params", "whether DDP leaves buckets out"),
    Part(DDP, "reducer", "DDP's half in C++"),
    Part(REDUCER, "_autograd_hook", "replay the order in which gradients became ready"),
    Part(REDUCER, "prepare_for_backward", "replay the order in which gradients became ready"),
    Part(REDUCER, "_run_allreduce_hook", "DDP's own all-reduce, inside a hook"),
    Part(REDUCER, "_set_optimizer_in_backward", "leave gradients that an optimizer has used up as they are"),
    Part("torch.distributed", "_compute_bucket_assignment_by_size", "the buckets that DDP will settle on"),
    # Backward
    Part("torch.autograd.Variable", "_execution_engine", "call a function at the end of a backward"),
    Part(TENSOR, "_version", "whether parameters were written since the last backward"),
    Part(TENSOR, "_indices", "the bytes of a sparse tensor"),
    Part(TENSOR, "_values", "the bytes of a sparse tensor"),
    Part("torch.distributed.utils", "_free_storage", "free the low-precision copy of a parameter"),
    Part(MIXED, "_fp_param", "a parameter's values in full precision", mark=True),
    Part(MIXED, "_mp_param", "a parameter's values in low precision", mark=True),
    Part(MIXED, "_ddp_mp_hook_state", "the hook that waits for a parameter's copy", mark=True),
    Part(MIXED, "_ddp_ignored", "which parameters have no such copy", mark=True),
    Part(IN_BACKWARD, "_in_backward_optimizers", "the optimizers to step in backward", mark=True),
    Part("torch", "_C", "tell one backward from another"),
    Part("torch._C", "_current_graph_task_id", "tell one backward from another"),
    # Compiled kernels
    Part("torch._C", "_aoti", "load a function that was compiled ahead of time"),
    Part("torch._C._aoti", "AOTIModelPackageLoader", "load a function that was compiled ahead of time"),
    Part("torch", "_inductor", "compile a function ahead of time"),
    # FSDP2
    Part("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "which parameters a module communicates together"),
    Part(FSDP_STATE, "_fsdp_param_groups", "which parameters a module communicates together"),
    Part(FSDP_STATE, "_state_ctx", "whether FSDP has ended a backward"),
    Part(FSDP_CONTEXT, "post_backward_final_callback_queued", "whether FSDP has ended a backward"),
    Part(FSDP_GROUP, "fsdp_params", "which parameters a module communicates together"),
    Part(FSDP_GROUP, "mesh_info", "over which ranks gradients are reduced"),
    Part(FSDP_MESH, "mesh", "over which ranks gradients are reduced"),
    Part(FSDP_GROUP, "mp_policy", "in which dtype gradients are reduced"),
    Part(FSDP_GROUP, "all_reduce_grads", "whether gradients are to be added up first"),
    Part(FSDP_GROUP, "_reduce_scatter_process_group", "what gradients are divided by"),
    Part(FSDP_GROUP, "_all_reduce_process_group", "what gradients are divided by"),
    Part(FSDP_GROUP, "device", "what gradients are divided by"),
    Part(FSDP_GROUP, "gradient_divide_factor", "what gradients are divided by"),
    Part(FSDP_GROUP, "force_sum_reduction_for_comms", "what gradients are divided by"),
    Part(FSDP_COLLECTIVES, "_get_gradient_divide_factors", "what gradients are divided by"),
    Part(FSDP_GROUP, "_all_reduce_hook", "whether the user has a hook there already"),
    Part(FSDP_SHARD, "sharded_param", "where the shards lie in the flat gradient"),
    Part(FSDP_SHARD, "sharded_size", "where the shards lie in the flat gradient"),
    Part(FSDP_SHARD, "padded_sharded_param_size", "where the shards lie in the flat gradient"),
    Part(TENSOR, "_post_accumulate_grad_hooks", "whether somebody reads gradients before they are averaged"),
    # Loss scaling
    Part(SCALER, "_get_scale_async", "the loss scale, without waiting for an accelerator"),
    Part(SCALER, "_scale", "the loss scale, compared over ranks"),
    Part(SCALER, "_growth_tracker", "steps since the loss scale last changed, compared over ranks"),
    # Optimizers
    Part(OPTIMIZER, "_optimizer_state_dict_pre_hooks", "hooks of a user's on a wrapped optimizer"),
    Part(OPTIMIZER, "_optimizer_state_dict_post_hooks", "hooks of a user's on a wrapped optimizer"),
    Part(OPTIMIZER, "_optimizer_load_state_dict_pre_hooks", "hooks of a user's on a wrapped optimizer"),
    Part(OPTIMIZER, "_optimizer_load_state_dict_post_hooks", "hooks of a user's on a wrapped optimizer"),
    Part("torch.distributed.optim.zero_redundancy_optimizer", "_OverlapStatus", "how far shards are dealt"),
    Part(ZERO_STATUS, "DDP_HAS_REBUILT_BUCKETS", "how far shards are dealt"),
    Part(ZERO_STATUS, "INITIALIZED", "how far shards are dealt"),
    Part(ZERO, "_overlap_with_ddp", "whether the optimizer is one that steps in backward"),
    Part(ZERO, "_overlap_info", "which rank owns which parameters"),
    Part(ZERO_INFO, "status", "how far shards are dealt"),
    Part(ZERO_INFO, "params_per_bucket", "deal the buckets over ranks"),
    Part(ZERO_INFO, "params_per_rank", "which rank owns which parameters"),
    Part(ZERO_INFO, "shard_buckets", "deal the buckets over ranks"),
    Part(ZERO_INFO, "total_size", "deal the buckets over ranks"),
    Part(ZERO, "_clear_cache", "deal the buckets over ranks"),
    Part(ZERO, "_bucket_assignments_per_rank", "deal the buckets over ranks"),
    Part(ZERO, "_partition_parameters", "deal the buckets over ranks"),
    Part(ZERO, "_init_local_optimizer", "deal the buckets over ranks"),
    Part(ZERO, "_local_step", "step the parameters of this rank"),
]

# What process_groups.py gives to _new_process_group_helper: by position, then by name.
HELPER_POSITIONAL = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]
HELPER_NAMED = ["timeout"]

_WHY = {part.name: part.why for part in PARTS}


def part(owner: Any, name: str) -> Any:
    """`owner.name`, or an error that says what this torch lacks.

    >>> part(torch.nn.Linear(1, 1), "_comm_hooks")
    Traceback (most recent call last):
    laconic._torch.private_names.MissingPartError: torch ... has no Linear._comm_hooks, which laconic uses for this: whether ...
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if error.name != name:
            raise  # it is there, and lacks something itself
        kind = owner if isinstance(owner, type) or inspect.ismodule(owner) else type(owner)
        raise MissingPartError(
            f"torch {torch.__version__} has no {kind.__name__}.{name}, which laconic uses for this: {_WHY[name]}; "
            f"laconic has run on torch {SEEN}: install one of these, or a laconic that knows this torch"
        ) from None


def missing(live: Mapping[str, object]) -> list[str]:
    """A sentence for each part that this torch lacks.

    `live` has an instance where the names are attributes of instances and not of their class.
    """
    absent = [
        f"torch {torch.__version__} has no {_place(each)}, which laconic uses for this: {each.why}"
        for each in PARTS
        if not _is_there(each, live)
    ]
    return absent + _helper_changed()


def _place(each: Part) -> str:
    return f"parameters with {each.name} (set by {each.owner})" if each.mark else f"{each.owner}.{each.name}"


def _is_there(each: Part, live: Mapping[str, object]) -> bool:
    try:
        owner = live[each.owner] if each.owner in live else resolve_name(each.owner)
        if each.mark:
            return each.name in inspect.getsource(owner)  # type: ignore[arg-type]  # a module
        inspect.getattr_static(owner, each.name)  # a property is not run
    except (ImportError, AttributeError):
        return False
    return True


def _helper_changed() -> list[str]:
    helper = getattr(resolve_name(C10D), "_new_process_group_helper", None)
    if helper is None:
        return []  # in the table
    parameters = inspect.signature(helper).parameters
    given = [*HELPER_POSITIONAL, *HELPER_NAMED]
    needed = [name for name, each in parameters.items() if each.default is each.empty and name not in given]
    if list(parameters)[: len(HELPER_POSITIONAL)] == HELPER_POSITIONAL and set(given) <= set(parameters) and not needed:
        return []
    return [
        f"torch {torch.__version__} has {C10D}._new_process_group_helper({', '.join(parameters)}), and laconic calls it with "
        f"{', '.join(HELPER_POSITIONAL)} by position and {', '.join(HELPER_NAMED)} by name"
    ]
