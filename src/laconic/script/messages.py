"""Lines on stderr, from one rank."""

import os
import sys

import torch.distributed as dist

_known_rank: int | None = None  # the process group may be gone when there is something to say


def remember_rank() -> None:
    """The process group knows it; RANK is set by torchrun, and not by every other launcher."""
    global _known_rank
    if dist.is_initialized():
        _known_rank = dist.get_rank()


def log(sentence: str) -> None:
    """One line on stderr, from one rank."""
    remember_rank()
    rank = int(os.environ.get("RANK", "0")) if _known_rank is None else _known_rank
    if rank == 0:
        print(f"laconic: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
