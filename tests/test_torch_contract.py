"""This torch has everything of its undocumented parts that src/laconic uses, and the table of them is complete."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.torch_contract import (
    CONTRACT,
    DDP,
    OPTIMIZER,
    OPTIONS,
    SCALER,
    SOURCES,
    STATIC_DDP,
    ZERO,
    ZERO_INFO,
    broken,
    defined_names,
    private_uses,
    used_names,
)

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
    yield {
        DDP: DistributedDataParallel(layer),
        STATIC_DDP: DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True),
        OPTIONS: group._get_backend(torch.device("cpu")).options,
        SCALER: torch.amp.GradScaler("cpu"),
        OPTIMIZER: torch.optim.SGD(layer.parameters()),
        ZERO: zero,
        ZERO_INFO: zero._overlap_info,
    }
    dist.destroy_process_group()


def test_this_torch_keeps_the_contract(live: dict[str, object]) -> None:
    sentences = broken(live)
    assert not sentences, "\n".join(sentences)


def test_a_name_that_is_taken_away_is_named(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_new_process_group_helper")
    assert broken(live) == [
        f"torch {torch.__version__} has no torch.distributed.distributed_c10d._new_process_group_helper, which laconic uses in "
        "src/laconic/groups.py: build a process group under a name of ours, by its members alone"
    ]


def test_all_names_of_an_object_that_is_taken_away(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_world")
    wanted = ["_world", "_world.pg_map", "_world.pg_group_ranks"]
    assert [sentence.split(",")[0].rpartition("distributed_c10d.")[2] for sentence in broken(live)] == wanted


def test_an_attribute_of_ddp_that_is_taken_away_is_named(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(live[DDP], "_has_rebuilt_buckets")
    monkeypatch.delattr(DistributedDataParallel, "_sync_buffers")
    first, second = broken(live)
    assert f"torch {torch.__version__} has no {DDP}._has_rebuilt_buckets, which laconic uses in src/laconic/engine.py" in first
    assert f"{DDP}._sync_buffers" in second


def test_another_signature_is_shown(live: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(group_size: int, group_rank: int, backend: str, timeout: object = None) -> None: ...

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)
    (sentence,) = broken(live)
    assert "_new_process_group_helper(group_size, group_rank, backend, timeout), and src/laconic/groups.py calls it" in sentence


@pytest.mark.parametrize("file", FILES)
def test_every_private_use_is_in_the_table(file: str) -> None:
    listed = {use.name for use in CONTRACT if file in use.files}
    new = [f"line {line}: {name}" for name, line in private_uses(FILES[file], DEFINED).items() if name not in listed]
    assert not new, (
        f"src/laconic/{file} uses private names that tests/torch_contract.py doesn't list ({'; '.join(new)}). If they are "
        "torch's, add them to its table; if they are laconic's own, keep them in the file that defines them"
    )


def test_everything_in_the_table_is_used() -> None:
    stale = [f"{use.name} in {file}" for use in CONTRACT for file in use.files if use.name not in used_names(FILES[file])]
    assert not stale, f"the table of tests/torch_contract.py lists what src/laconic doesn't use any more: {', '.join(stale)}"


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
