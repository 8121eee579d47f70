"""What src/laconic uses of torch beyond its documented interface: one table, a check of it, and a scan of the sources.

A name with an underscore may go with any release of torch, and a public one may be newer than an old release. The table says
where each is used and what for, so that a torch without it is met by a sentence and not by an AttributeError in mid-run.
"""

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import torch

SOURCES = Path(__file__).parents[1] / "src" / "laconic"


@dataclass(frozen=True)
class Use:
    """One name of torch's: whose it is, in which files of src/laconic it is used, and what for."""

    owner: str  # a module, a class, or one of the live objects that `broken` is given
    name: str
    where: str
    why: str
    mark: bool = False  # an attribute that the module `owner` gives to parameters: it is looked for in that module's source

    @property
    def files(self) -> list[str]:
        return self.where.split()


C10D = "torch.distributed.distributed_c10d"
WORLD = f"{C10D}._world"
DDP = "torch.nn.parallel.DistributedDataParallel"
STATIC_DDP = f"{DDP}(static_graph=True)"
REDUCER = "torch.distributed.Reducer"
GROUP = "torch.distributed.ProcessGroup"
OPTIONS = "the options of a process group's backend"
SCALER = "torch.amp.GradScaler"
OPTIMIZER = "torch.optim.Optimizer"
ZERO = "torch.distributed.optim.ZeroRedundancyOptimizer"
ZERO_INFO = f"{ZERO}._overlap_info"
ZERO_STATUS = "torch.distributed.optim.zero_redundancy_optimizer._OverlapStatus"
TENSOR = "torch.Tensor"
MIXED = "torch.nn.parallel.distributed"
IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"

OVERLAP = "compat/ddp_comm_hooks/optimizer_overlap_hooks.py"
PRECISION = "compat/ddp_comm_hooks/mixed_precision_hooks.py"
POWER = "compat/ddp_comm_hooks/powerSGD_hook.py"
POST_LOCAL = "compat/ddp_comm_hooks/post_localSGD_hook.py"
ZERO_HOOK = "compat/ddp_comm_hooks/ddp_zero_hook.py"
OPTIM = "compat/optim.py"

CONTRACT = [
    # Process groups
    Use(C10D, "_new_process_group_helper", "groups.py", "build a process group under a name of ours, by its members alone"),
    Use(C10D, "GroupName", "groups.py", "the type of that name"),
    Use(C10D, "_world", "groups.py", "which groups there are, and the ranks of a new one"),
    Use(WORLD, "pg_map", "groups.py", "the backend of the user's group, and whether a group is still there"),
    Use(WORLD, "pg_group_ranks", "groups.py", "the global ranks of a new group"),
    Use(C10D, "_get_default_group", "run.py compat/model_averaging/averagers.py compat/model_averaging/utils.py",
        "the group of a model without DDP"),
    Use("torch.distributed", "_rank_not_in_group", "compat/model_averaging/utils.py", "ranks outside a group average nothing"),
    Use(GROUP, "_device_types", "groups.py", "whether small messages can travel from the CPU"),
    Use(GROUP, "_get_backend", "groups.py", "the user's timeout, for groups of our own"),
    Use(OPTIONS, "_timeout", "groups.py", "the user's timeout, for groups of our own"),
    Use(GROUP, "get_group_store", "groups.py", "where the members of a new group meet"),
    Use("torch.distributed", "all_gather_single", "wire.py", "gather into one tensor; new in torch 2.13"),
    Use("torch.distributed", "all_to_all_single", "wire.py", "exchange rows of one tensor"),
    Use("torch.distributed", "DistError", "wire.py", "tell a lost peer from other errors"),
    # DDP
    Use(DDP, "_comm_hooks", "dispatch.py compat/_owner.py", "whether the user has registered a hook, and which"),
    Use(DDP, "_has_rebuilt_buckets", f"engine.py replay.py {ZERO_HOOK}", "whether the bucket order is settled"),
    Use(DDP, "_sync_buffers", "dispatch.py", "tell from a traceback that the broadcast of buffers has failed"),
    Use(STATIC_DDP, "_static_graph_delay_allreduce_enqueued", "plan.py", "whether a static graph has had its first backward"),
    Use(DDP, "_lazy_init_ran", "compat/_owner.py", "whether a forward has run"),
    Use(DDP, "_join_config", "compat/_owner.py", "whether ranks may run out of batches"),
    Use(DDP, "_modules", "compat/_owner.py", "the module of a DDP, also of one that was never built to its end"),
    Use(DDP, "_module_parameters", OVERLAP, "the parameters whose gradients are used up in backward"),
    Use(DDP, "forward_sync_buffers", f"dispatch.py {POST_LOCAL}", "no buffers are sent in a local phase; new in torch 2.13"),
    Use(DDP, "require_backward_grad_sync", "dispatch.py engine.py", "no communication in a backward of a local phase"),
    Use(DDP, "parameters_to_ignore", "engine.py plan.py replay.py", "which parameters DDP does not average"),
    Use(DDP, "find_unused_parameters", f"plan.py replay.py {ZERO_HOOK}", "whether DDP keeps its first buckets"),
    Use(DDP, "static_graph", f"plan.py replay.py {ZERO_HOOK}", "whether DDP keeps its first buckets"),
    Use(DDP, "mixed_precision", f"dispatch.py {PRECISION}", "whether DDP runs a hook of its own"),
    Use(DDP, "skip_all_reduce_unused_params", "compat/_hooks.py", "whether DDP leaves buckets out"),
    Use(DDP, "reducer", f"replay.py {OVERLAP} {PRECISION}", "DDP's half in C++"),
    Use(REDUCER, "_autograd_hook", "replay.py", "replay the order in which gradients became ready"),
    Use(REDUCER, "prepare_for_backward", "replay.py", "replay the order in which gradients became ready"),
    Use(REDUCER, "_run_allreduce_hook", PRECISION, "DDP's own all-reduce, inside a hook"),
    Use(REDUCER, "_set_optimizer_in_backward", OVERLAP, "leave gradients that an optimizer has used up as they are"),
    Use("torch.distributed", "_compute_bucket_assignment_by_size", "forecast.py", "the buckets that DDP will settle on"),
    # Backward
    Use("torch.autograd.Variable", "_execution_engine", f"compat/_hooks.py {OVERLAP} {PRECISION}",
        "call a function at the end of a backward"),
    Use(TENSOR, "_version", "compat/_owner.py", "whether parameters were written since the last backward"),
    Use(TENSOR, "_indices", "wire.py", "the bytes of a sparse tensor"),
    Use(TENSOR, "_values", "wire.py", "the bytes of a sparse tensor"),
    Use("torch.distributed.utils", "_free_storage", PRECISION, "free the low-precision copy of a parameter"),
    Use(MIXED, "_fp_param", PRECISION, "a parameter's values in full precision", mark=True),
    Use(MIXED, "_mp_param", PRECISION, "a parameter's values in low precision", mark=True),
    Use(MIXED, "_ddp_mp_hook_state", PRECISION, "the hook that waits for a parameter's copy", mark=True),
    Use(MIXED, "_ddp_ignored", PRECISION, "which parameters have no such copy", mark=True),
    Use(IN_BACKWARD, "_in_backward_optimizers", OVERLAP, "the optimizers to step in backward", mark=True),
    # Loss scaling
    Use(SCALER, "_get_scale_async", f"engine.py {POWER}", "the loss scale, without waiting for an accelerator"),
    Use(SCALER, "_scale", "engine.py", "the loss scale, compared over ranks"),
    Use(SCALER, "_growth_tracker", "engine.py", "steps since the loss scale last changed, compared over ranks"),
    # Optimizers
    Use(OPTIMIZER, "_optimizer_state_dict_pre_hooks", OPTIM, "hooks of a user's on a wrapped optimizer"),
    Use(OPTIMIZER, "_optimizer_state_dict_post_hooks", OPTIM, "hooks of a user's on a wrapped optimizer"),
    Use(OPTIMIZER, "_optimizer_load_state_dict_pre_hooks", OPTIM, "hooks of a user's on a wrapped optimizer"),
    Use(OPTIMIZER, "_optimizer_load_state_dict_post_hooks", OPTIM, "hooks of a user's on a wrapped optimizer"),
    Use("torch.distributed.optim.zero_redundancy_optimizer", "_OverlapStatus", ZERO_HOOK, "how far shards are dealt"),
    Use(ZERO_STATUS, "DDP_HAS_REBUILT_BUCKETS", ZERO_HOOK, "how far shards are dealt"),
    Use(ZERO_STATUS, "INITIALIZED", ZERO_HOOK, "how far shards are dealt"),
    Use(ZERO, "_overlap_with_ddp", ZERO_HOOK, "whether the optimizer is one that steps in backward"),
    Use(ZERO, "_overlap_info", ZERO_HOOK, "which rank owns which parameters"),
    Use(ZERO_INFO, "status", ZERO_HOOK, "how far shards are dealt"),
    Use(ZERO_INFO, "params_per_bucket", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO_INFO, "params_per_rank", ZERO_HOOK, "which rank owns which parameters"),
    Use(ZERO_INFO, "shard_buckets", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO_INFO, "total_size", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO, "_clear_cache", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO, "_bucket_assignments_per_rank", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO, "_partition_parameters", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO, "_init_local_optimizer", ZERO_HOOK, "deal the buckets over ranks"),
    Use(ZERO, "_local_step", ZERO_HOOK, "step the parameters of this rank"),
]  # fmt: skip

# What groups.py gives to _new_process_group_helper: by position, then by name.
HELPER_POSITIONAL = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]
HELPER_NAMED = ["timeout"]


def broken(live: Mapping[str, object]) -> list[str]:
    """A sentence for each part of the contract that this torch doesn't keep.

    `live` has an instance where the names are attributes of instances and not of their class.
    """
    absent = [f"{_it_has_no(use)}, which {_used(use)}" for use in CONTRACT if not _is_there(use, live)]
    return absent + _helper_changed()


def _it_has_no(use: Use) -> str:
    place = f"parameters with {use.name} (set by {use.owner})" if use.mark else f"{use.owner}.{use.name}"
    return f"torch {torch.__version__} has no {place}"


def _used(use: Use) -> str:
    return f"laconic uses in {', '.join(f'src/laconic/{file}' for file in use.files)}: {use.why}"


def _is_there(use: Use, live: Mapping[str, object]) -> bool:
    try:
        owner = live[use.owner] if use.owner in live else resolve_name(use.owner)
        if use.mark:
            return use.name in inspect.getsource(owner)  # type: ignore[arg-type]  # a module
        inspect.getattr_static(owner, use.name)  # a property is not run
    except (ImportError, AttributeError):
        return False
    return True


def _helper_changed() -> list[str]:
    helper = getattr(resolve_name(C10D), "_new_process_group_helper", None)
    if helper is None:
        return []  # said by the table
    parameters = inspect.signature(helper).parameters
    given = [*HELPER_POSITIONAL, *HELPER_NAMED]
    needed = [name for name, each in parameters.items() if each.default is each.empty and name not in given]
    if list(parameters)[: len(HELPER_POSITIONAL)] == HELPER_POSITIONAL and set(given) <= set(parameters) and not needed:
        return []
    return [
        f"torch {torch.__version__} has {C10D}._new_process_group_helper({', '.join(parameters)}), and src/laconic/groups.py "
        f"calls it with {', '.join(HELPER_POSITIONAL)} by position and {', '.join(HELPER_NAMED)} by name"
    ]


# The scan


_tree = cache(ast.parse)


def used_names(source: str) -> dict[str, int]:
    """Every attribute that a source file reads or writes, and every name that it imports from torch, with a line of each."""
    return {name: line for name, line, _ in _names(_tree(source))}


def defined_names(source: str) -> set[str]:
    """What a source file defines: functions, classes, variables, attributes of `self`."""
    return set(_defined(_tree(source)))


def private_uses(source: str, inherited: Collection[str] = ()) -> dict[str, int]:
    """Those with an underscore that are neither the file's own nor another package's: torch's, as far as one can see.

    A private name of laconic's own stays in the file that defines it, so whatever is not defined there is taken for torch's;
    except on `self`, where it may be `inherited` from a class of laconic's in another file.
    """
    tree = _tree(source)
    own, of_torch, of_others = set(_defined(tree)), _imported(tree, "torch"), _imported(tree, "")
    return {
        name: line
        for name, line, receiver in _names(tree)
        if name.startswith("_") and not name.startswith("__")
        if name not in {"_replace", "_asdict", "_fields"}  # documented, of named tuples
        if receiver in of_torch or (name not in own and receiver not in of_others)
        if receiver != "self" or name not in inherited
    }


def _names(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name):
                yield name, node.lineno, _receiver(value)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(str(name)), *_]
            ):
                yield name, node.lineno, ""
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                yield from ((part, node.lineno, "torch") for part in [*module.split("."), *(each.name for each in names)])
            case ast.Import(names=names):
                parts = [part for each in names if each.name.split(".")[0] == "torch" for part in each.name.split(".")]
                yield from ((part, node.lineno, "torch") for part in parts)


def _receiver(value: ast.expr) -> str:
    """`a` of `a.b.c`."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ):
                yield name


def _imported(tree: ast.AST, package: str) -> set[str]:
    """What a file calls the modules and names that it imports from a package; those from all but torch, for an empty one."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for each in node.names:
                root = (node.module or "" if isinstance(node, ast.ImportFrom) else each.name).split(".")[0]
                if root == package or (not package and root not in ("torch", "laconic")):
                    found.add(each.asname or each.name.split(".")[0])
    return found
