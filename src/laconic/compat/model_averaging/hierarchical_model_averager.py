"""Averaging within small groups often, within larger ones more rarely.

What differs from torch:
- Periods that are not in rising order, or below 1, are refused wherever they stand, and so are group sizes that don't divide
  the ranks (tests/compat/test_averagers.py::test_hierarchies_that_make_no_sense_are_refused).
- What `averagers` and `utils` do better.

As in torch, a period is counted from step 0, not from the end of the warm-up.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from laconic._torch.process_groups import control_device
from laconic.comm.group import TorchGroup
from laconic.compat.model_averaging.averagers import ModelAverager
from laconic.ranks.agreement import agree
from laconic.ranks.groups import Groups
from laconic.ranks.islands import whole

__all__ = ["HierarchicalModelAverager"]

logger = logging.getLogger(__name__)


class HierarchicalModelAverager(ModelAverager):
    """Averages parameters over groups of several sizes: of those whose period divides the step, over the largest.

    All ranks build it together, and call `average_parameters` after each optimizer step. `laconic.hierarchical_sgd` is the same
    as a strategy.

    Bytes: 2(N-1)/N * n * itemsize in an averaging, with N the ranks of the group that averages.

    Memory: none between steps; a few chunks of 4 MiB in an averaging.

    Paper: Wang et al. 2020, arXiv:2010.12998.

    Not: buffers and the optimizer's state stay each rank's own. Periods count from step 0, not from the end of the warm-up.

    Arguments:
      `period_group_size_dict`: periods in steps to group sizes in ranks, both rising; the last size is that of `process_group`.
        {4: 8, 16: 16}: groups of 8 every 4 steps, all 16 every 16. None, its default, is refused, as in torch.
      `warmup_steps`: steps before the first averaging. Default 0.
      `process_group`: all ranks that take part. Default None: all of the job.

    Periods or sizes that make no sense are a ValueError.

    >>> import torch
    >>> from laconic.compat.model_averaging.hierarchical_model_averager import (
    ...     HierarchicalModelAverager,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> averager = HierarchicalModelAverager({4: 1}, warmup_steps=100)
    >>> # after optimizer.step()
    >>> averager.average_parameters(torch.nn.Linear(4, 2).parameters())
    >>> averager.step
    1
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ValueError("period_group_size_dict must map at least one period to a group size, such as {4: 8, 16: 16}")
        self._periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        world = self.process_group.size()
        if min(self._periods) < 1:
            raise ValueError(f"the periods in period_group_size_dict must be at least 1, got {self._periods}")
        if self._periods != sorted(self._periods):
            raise ValueError(f"the periods in period_group_size_dict must be in rising order, got {self._periods}")
        if self._periods == [1]:
            warnings.warn(
                "with period 1 a model averager sends as much as DistributedDataParallel does; use that, or longer periods",
                stacklevel=2,
            )
        if sizes[-1] != world:
            raise ValueError(f"the last group size in period_group_size_dict must be all {world} ranks, got {sizes[-1]}")
        if sizes != sorted(sizes) or any(size < 1 or world % size for size in sizes):
            raise ValueError(f"group sizes must be in rising order and divide the {world} ranks, got {sizes}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}")
        self.warmup_steps = warmup_steps
        device = control_device(self.process_group)
        facts = [f"period {period}: groups of {size}" for period, size in period_group_size_dict.items()]
        identity = agree(facts, None, TorchGroup(self.process_group), device)
        self._groups = Groups(whole(self.process_group), identity, sizes, None, device)
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        logger.info("Hierarchy of model averaging:")
        for period, size in period_group_size_dict.items():
            logger.info("  groups of %s processes every %s iterations, unless a larger group averages then", size, period)
            self.period_process_group_dict[period] = self._groups[size].process_group

    def _find_process_group(self) -> dist.ProcessGroup | None:
        """The group of the largest period that divides this step, or None."""
        due = [period for period in self._periods if self.step % period == 0]
        return self.period_process_group_dict[due[-1]] if due else None

    def average_parameters(self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average over the group that is due at this step, if any; then count the step.

        Arguments:
          `params`: a model's parameters, or an optimizer's parameter groups; the same on all ranks.
        """
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            self._average(params, group)
        self.step += 1
