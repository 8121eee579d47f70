"""Averaging of a model every so many steps.

What differs from torch:
- What `utils` does better (all parameters, in place, few MiB).
- Ranks compare their parameters' shapes at the first averaging, and say where they differ instead of hanging
  (tests/compat/test_averagers.py::test_ranks_with_other_parameters_are_told).
- An averager can be copied, as an optimizer that holds it is (tests/compat/test_optimizer.py::test_deepcopy).

As in torch, the phases differ: `PeriodicModelAverager` counts its period from the end of the warm-up and so averages in the
very step that ends it; `HierarchicalModelAverager` counts from step 0
(tests/compat/test_averagers.py::test_when_each_averager_averages).
"""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Self

import torch
import torch.distributed as dist

from laconic._torch.process_groups import control_device, default_group
from laconic.comm.group import TorchGroup
from laconic.compat.model_averaging import utils
from laconic.ranks.agreement import agree

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """What averages a model's parameters after some of the optimizer's steps; derive from it.

    `step` counts the calls of `average_parameters`.

    Arguments:
      `process_group`: the ranks to average over. Default None: all.

    >>> import torch
    >>> from laconic.compat.model_averaging.averagers import ModelAverager
    >>> class Seldom(ModelAverager):
    ...     def average_parameters(self, params):
    ...         self.step += 1
    ...         if self.step in (1, 10, 100):
    ...             self._average(params, self.process_group)
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> averager = Seldom()
    >>> averager.average_parameters(torch.nn.Linear(4, 2).parameters())
    >>> averager.step
    1
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group: dist.ProcessGroup = process_group if process_group is not None else default_group()
        self.step: int = 0
        self._compared = False

    @abstractmethod
    def average_parameters(self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Call it after each optimizer step, on all ranks: it averages if it is time.

        Arguments:
          `params`: a model's parameters, or an optimizer's parameter groups.
        """
        raise NotImplementedError

    def _average(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], process_group: dist.ProcessGroup
    ) -> None:
        found = utils.get_params_to_average(params)
        if not self._compared:  # with all ranks, also where only some of them average now
            facts = [f"parameter {place}: {p.dtype} {tuple(p.shape)}" for place, p in enumerate(found)]
            agree(facts, None, TorchGroup(self.process_group), control_device(self.process_group))
            self._compared = True
        utils.average_parameters(iter(found), process_group)

    def __deepcopy__(self, memo: object) -> Self:
        # Process groups are not copied: a copy averages with the same ranks.
        return copy.copy(self)


class PeriodicModelAverager(ModelAverager):
    """Averages parameters every `period` steps, beginning with step `warmup_steps`.

    Call `average_parameters` after each optimizer step. With `post_localSGD_hook`, give `warmup_steps` as its
    `start_localSGD_iter`. `laconic.local_sgd(period)` is the same as a strategy.

    Bytes: 2(N-1)/N * n * itemsize, every `period` steps.

    Memory: none between steps; a few chunks of 4 MiB in an averaging.

    Not: buffers and the optimizer's state stay each rank's own.

    Arguments:
      `period`: steps from one averaging to the next, at least 1.
      `warmup_steps`: steps before the first one. Default 0.
      `process_group`: the ranks to average over. Default None: all.

    >>> import torch
    >>> from laconic.compat.model_averaging.averagers import PeriodicModelAverager
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 2)
    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
    >>> averager.average_parameters(model.parameters())  # after optimizer.step()
    >>> averager.step
    1
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}")
        if period < 1:
            raise ValueError(f"period must be at least 1, got {period}")
        if period == 1:
            warnings.warn(
                "with period=1 a model averager sends as much as DistributedDataParallel does; use that, or a longer period",
                stacklevel=2,
            )
        self.warmup_steps: int = warmup_steps
        self.period: int = period

    def average_parameters(self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average, if `step` is the warm-up's end or whole periods after it; then count the step.

        Arguments:
          `params`: a model's parameters, or an optimizer's parameter groups. All ranks have the same: where shapes differ at
            the first averaging, all raise a ValueError.
        """
        since = self.step - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            self._average(params, self.process_group)
        self.step += 1
