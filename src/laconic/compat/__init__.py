"""torch's communication hooks and model averagers: the same names, working on every backend.

`torch.distributed.algorithms.ddp_comm_hooks` is `laconic.compat.ddp_comm_hooks`, `torch.distributed.algorithms.model_averaging`
is `laconic.compat.model_averaging`, and `torch.distributed.optim.PostLocalSGDOptimizer` is in `laconic.compat.optim`. Each
module says at its top what differs from torch, and which test shows it. docs/torch.md has the table.
"""
