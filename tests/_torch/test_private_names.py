"""This torch has everything of its undocumented parts that src/laconic uses, and the table of them is complete."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from laconic._torch.ddp import has_rebuilt_buckets
from laconic._torch.optimizers import state_dict_hooks
from laconic._torch.private_names import (
    DDP,
    FSDP_CONTEXT,
    FSDP_GROUP,
    FSDP_MESH,
    FSDP_SHARD,
    FSDP_STATE,
    OPTIMIZER,
    OPTIONS,
    PARTS,
    SCALER,
    STATIC_DDP,
    ZERO,
    ZERO_INFO,
    MissingPartError,
    missing,
    part,
)
from laconic._torch.process_groups import default_group
from tests._torch.scan import DOOR, FRAMEWORKS_DOOR, SOURCES, defined_names, private_uses, strings, used_names

TORCHFT_PARTS = {"elastic/membership.py": {"_quorum"}}  # the one file that knows torchft
FILES = {str(path.relative_to(SOURCES)): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}
DEFINED = set().union(*map(defined_names, FILES.values()))


@pytest.fixture(scope="module")
def live() -> Iterator[dict[str, object]]:
    """One object of each kind that has attributes of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = torch.nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    group = dist.group.WORLD
    assert group is not None
    whole = torch.nn.Linear(2, 2)
    fully_shard(whole, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))  # HSDP has all groups
    state: Any = whole._get_fsdp_state()  # type: ignore[operator]
    groups = state._fsdp_param_groups
    yield {
        DDP: DistributedDataParallel(layer),
        STATIC_DDP: DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True),
        OPTIONS: group._get_backend(torch.device("cpu")).options,
        SCALER: torch.amp.GradScaler("cpu"),
        OPTIMIZER: torch.optim.SGD(layer.parameters()),
        ZERO: zero,
        ZERO_INFO: zero._overlap_info,
        FSDP_STATE: state,
        FSDP_CONTEXT: state._state_ctx,
        FSDP_GROUP: groups[0],
        FSDP_MESH: groups[0].mesh_info,
        FSDP_SHARD: groups[0].fsdp_params[0],
    }
    dist.destroy_process_group()


def test_this_torch_keeps_the_contract(live: dict[str, object]) -> None:
    sentences = missing(live)
    assert not sentences, "\n".join(sentences)


def test_a_name_that_is_taken_away_is_named(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_new_process_group_helper")
    assert missing(live) == [
        f"torch {torch.__version__} has no torch.distributed.distributed_c10d._new_process_group_helper, which laconic uses "
        "for this: build a process group under a name of ours, by its members alone"
    ]


def test_all_names_of_an_object_that_is_taken_away(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_world")
    wanted = ["_world", "_world.pg_map", "_world.pg_group_ranks"]
    assert [sentence.split(",")[0].rpartition("distributed_c10d.")[2] for sentence in missing(live)] == wanted


def test_an_attribute_of_ddp_that_is_taken_away_is_named(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(live[DDP], "_has_rebuilt_buckets")
    monkeypatch.delattr(DistributedDataParallel, "_sync_buffers")
    first, second = missing(live)
    assert f"torch {torch.__version__} has no {DDP}._has_rebuilt_buckets, which laconic uses for this: whether" in first
    assert f"{DDP}._sync_buffers" in second


def test_another_signature_is_shown(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(group_size: int, group_rank: int, backend: str, timeout: object = None) -> None: ...

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)
    (sentence,) = missing(live)
    assert "_new_process_group_helper(group_size, group_rank, backend, timeout), and laconic calls it" in sentence


def test_what_is_used_and_missing_is_named_where_it_is_used(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(live[DDP], "_has_rebuilt_buckets")
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_group")
    monkeypatch.delattr(live[OPTIMIZER], "_optimizer_state_dict_pre_hooks")
    sentence = (
        rf"torch {re.escape(torch.__version__)} has no DistributedDataParallel._has_rebuilt_buckets, which laconic uses .*"
    )
    with pytest.raises(MissingPartError, match=f"{sentence}whether the bucket order is settled; laconic has run on torch 2.13"):
        has_rebuilt_buckets(live[DDP])  # type: ignore[arg-type]
    with pytest.raises(MissingPartError, match=r"has no torch\.distributed\.distributed_c10d\._get_default_group"):
        default_group()
    with pytest.raises(MissingPartError, match=r"has no SGD\._optimizer_state_dict_pre_hooks"):
        state_dict_hooks(live[OPTIMIZER], "state_dict_pre")  # type: ignore[arg-type]


def test_an_error_inside_of_a_part_is_its_own() -> None:
    class Broken:
        @property
        def _scale(self) -> object:
            return self.no_such_thing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_thing"):
        part(Broken(), "_scale")


@pytest.mark.parametrize("file", FILES)
def test_private_parts_are_used_behind_the_door_alone(file: str) -> None:
    if file == FRAMEWORKS_DOOR:
        return  # no part of torch is in it
    listed = {each.name for each in PARTS} if file.startswith(DOOR) else TORCHFT_PARTS.get(file, set())
    new = [f"line {line}: {name}" for name, line in private_uses(FILES[file], DEFINED).items() if name not in listed]
    assert not new, (
        f"src/laconic/{file} uses private names ({'; '.join(new)}). If they are torch's, use them in a function of "
        "laconic/_torch and add them to PARTS in private_names.py; if a framework's, in laconic/integrations/private_parts.py; "
        "if laconic's own, keep them in the file that defines them"
    )


def test_everything_in_the_table_is_used() -> None:
    used = set().union(*(used_names(text) | strings(text) for file, text in FILES.items() if file != "_torch/private_names.py"))
    stale = [each.name for each in PARTS if each.name not in used]
    assert not stale, f"PARTS in _torch/private_names.py lists what src/laconic doesn't use any more: {', '.join(stale)}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._log_api_usage_once('x')", {"_C": 2, "_log_api_usage_once": 2}),
        ("from torch._utils import _flatten_dense_tensors", {"_utils": 1, "_flatten_dense_tensors": 1}),
        ("def f(ddp):\n    return getattr(ddp, '_lazy_init_ran')", {"_lazy_init_ran": 2}),
        ("class A:\n    def __init__(self, ddp):\n        self._a = ddp._a_b\n        self._a._c", {"_a_b": 3, "_c": 4}),
        (
            "from torch import Tensor\nclass A:\n    def _make_subclass(self): ...\nTensor._make_subclass(1)",
            {"_make_subclass": 4},
        ),
        ("import os\nfrom dataclasses import dataclass\nos._exit(1)\ndef f(x):\n    return x._replace(a=1)", {}),
    ],
)
def test_what_the_scan_sees(source: str, found: dict[str, int]) -> None:
    assert private_uses(source) == found
