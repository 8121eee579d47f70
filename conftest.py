"""What pytest must know of the examples in docstrings and documents."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def groups_outlive_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An example's process group is freed by this fixture, not by the DistributedDataParallel that has it last.

    torch 2.13 frees a DDP with the interpreter's lock held, and with the last reference to a group joins gloo's threads, of
    which one may wait for that lock: a deadlock, seen once in the suite. A group that an example leaves behind, because
    it failed, is destroyed.
    """
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import torch.distributed as dist

    kept: list[Any] = []
    init = dist.init_process_group

    def keep(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        kept.append(dist.group.WORLD)

    monkeypatch.setattr(dist, "init_process_group", keep)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    kept.clear()
