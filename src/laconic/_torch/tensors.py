"""Tensors and the backward: bytes of sparse ones, versions, and the end of a backward."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from laconic._torch.private_names import part


def sparse_bytes(tensor: Tensor) -> int:
    """The bytes of a sparse tensor: it has indices and values, and may have entries twice."""
    return int(part(tensor, "_indices")().nbytes + part(tensor, "_values")().nbytes)


def version(tensor: Tensor) -> int:
    """A number that changes with each in-place write that torch knows of."""
    return int(part(tensor, "_version"))


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have this called when the backward that is running ends; a RuntimeError where none is running."""
    part(Variable, "_execution_engine").queue_callback(call)


def backward_id() -> int:
    """The number of the backward that is running, also in what is called at its end; -1 where none is."""
    return int(part(part(torch, "_C"), "_current_graph_task_id")())
