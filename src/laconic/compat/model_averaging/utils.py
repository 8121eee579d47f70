"""Averaging of parameters, once.

What differs from torch:
- All parameters are averaged, by their position, whether or not they have a gradient: ranks with gradients on different
  parameters neither hang nor mix them up (tests/compat/test_averagers.py::test_gradients_on_different_parameters), and
  averaging after `zero_grad()` averages (::test_averaging_after_zero_grad).
- Parameters are written in place: storage, memory format and dtype stay (::test_storage_and_memory_format_stay).
- 16-bit parameters are summed in fp32: identical replicas come back bit for bit (::test_identical_bf16_replicas_do_not_change).
- It takes some MiB beside the parameters, not a copy of them (docs/local.md has the measurement).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from laconic._torch.process_groups import default_group, is_outside
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.local.parameter_averaging import ParameterAverager

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]


def average_parameters(params: Iterator[torch.nn.Parameter], process_group: dist.ProcessGroup | None) -> None:
    """Replace parameters by their mean over the group, in place; on a rank that is not in the group, do nothing.

    Bytes: 2(N-1)/N * n * itemsize.

    Memory: none that stays; a few chunks of 4 MiB meanwhile.

    Arguments:
      `params`: the parameters, in the same order on all ranks.
      `process_group`: the ranks to average over; None: all.

    >>> import torch
    >>> from laconic.compat.model_averaging.utils import average_parameters
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> average_parameters(torch.nn.Linear(4, 2).parameters(), None)
    >>> torch.distributed.destroy_process_group()
    """
    group = process_group if process_group is not None else default_group()
    if not is_outside(group):
        named = {str(index): parameter for index, parameter in enumerate(params)}
        ParameterAverager(named, Ledger()).average(TorchGroup(group))


def get_params_to_average(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
) -> list[torch.nn.Parameter]:
    """The parameters of a model, or of an optimizer's parameter groups: all of them, in their order.

    Arguments:
      `params`: parameters, or an optimizer's parameter groups; anything else is a NotImplementedError, as in torch.

    >>> import torch
    >>> from laconic.compat.model_averaging.utils import get_params_to_average
    >>> model = torch.nn.Linear(4, 2)
    >>> len(get_params_to_average(torch.optim.SGD(model.parameters()).param_groups))
    2
    """
    found: list[torch.nn.Parameter] = []
    for item in params:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            found.extend(item["params"])
        else:
            raise NotImplementedError(
                f"params must be parameters or an optimizer's parameter groups, got {type(item).__name__}"
            )
    return found


def average_parameters_or_parameter_groups(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], process_group: dist.ProcessGroup | None
) -> None:
    """Average the parameters of a model, or of an optimizer's parameter groups, in place.

    Bytes: 2(N-1)/N * n * itemsize.

    Memory: none that stays; a few chunks of 4 MiB meanwhile.

    Arguments:
      `params`: parameters, or an optimizer's parameter groups, in the same order on all ranks.
      `process_group`: the ranks to average over; None: all.

    >>> import torch
    >>> from laconic.compat.model_averaging.utils import (
    ...     average_parameters_or_parameter_groups,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> average_parameters_or_parameter_groups(
    ...     torch.optim.SGD(model.parameters()).param_groups, None
    ... )
    >>> torch.distributed.destroy_process_group()
    """
    average_parameters(iter(get_params_to_average(params)), process_group)
