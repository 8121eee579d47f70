"""Tensors lent to gloo's threads, and the wait until these have let go of them.

A collective's work holds its tensors. Gloo's thread is often the last to hold a work: whoever waited goes on before that thread
has let go. To free a tensor that Python has seen, it needs the interpreter's lock. Where the interpreter is about to end,
that aborts the process ("terminate called without an active exception", in one run of eight on a busy machine); where a process
group is freed meanwhile by a thread that has the lock, that hangs. So whoever ends waits for these threads first.
"""

import atexit
import os
import time
import weakref
from collections import deque

from torch import Tensor

MOST = 64  # works that may be let go of late: each thread has one at a time
SECONDS = 0.5  # the longest wait; a collective that never ends keeps its tensors

_lent: deque["weakref.ref[Tensor]"] = deque(maxlen=MOST)


def lend(tensor: Tensor) -> Tensor:
    """The same numbers as another tensor, for a work alone: it lives as long as the work does."""
    if tensor.is_sparse or tensor.device.type != "cpu":  # a sparse one gets new storage; an accelerator's works are not of gloo
        return tensor
    alias = tensor.detach()
    _lent.append(weakref.ref(alias))
    return alias


def await_return(seconds: float = SECONDS) -> bool:
    """Wait until no thread holds a tensor that was lent; False: one still does."""
    deadline = time.monotonic() + seconds
    while any(reference() is not None for reference in tuple(_lent)):  # other threads may lend
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)  # it lets the interpreter's lock go
    return True


atexit.register(await_return)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lent.clear)  # the threads stay behind
