"""torch's communication hooks and model averagers: the same names, working on every backend.

`torch.distributed.algorithms.ddp_comm_hooks` is `laconic.compat.ddp_comm_hooks`, `torch.distributed.algorithms.model_averaging`
is `laconic.compat.model_averaging`, and `torch.distributed.optim.PostLocalSGDOptimizer` is in `laconic.compat.optim`. Each
module says at its top what differs from torch, and which test shows it. docs/torch.md has the table.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.compat import ddp_comm_hooks as ddp_comm_hooks
    from laconic.compat import model_averaging as model_averaging
    from laconic.compat import optim as optim

__all__ = ["ddp_comm_hooks", "model_averaging", "optim"]


if not TYPE_CHECKING:  # type checkers would take any name for one that is there

    def __getattr__(name: str) -> object:
        if name in __all__:
            return importlib.import_module(f"laconic.compat.{name}")
        raise AttributeError(f"module 'laconic.compat' has no attribute {name!r}")
