"""Gradients as products of thin matrices.

What differs from torch:
- It works with several buckets on any backend: no collective is launched from a callback
  (tests/compat/test_powersgd.py::test_many_buckets_keep_replicas_equal).
- `batched_powerSGD_hook` works (::test_batched).
- Memory is kept by parameter name: saved with one DDP, it goes on in another with other buckets
  (::test_resume_with_other_buckets).
- A state can be read by `torch.load` as it is (::test_torch_load_reads_a_saved_state), and has a `state_dict` of plain data.
- What is not compressed is averaged exactly, with no error fed back (::test_what_is_not_compressed_stays_exact).
- Scalars and empty parameters work (::test_scalar_and_empty_parameters); a gradient of zeros (::test_zeros_then_good_steps) or
  an overflow on one rank (::test_an_overflow_on_one_rank) leaves no trace in the steps that follow.
- A rank's error is taken against what that rank sent, not against the mean: the same sum, bounded on each rank
  (::test_as_torch_from_the_same_start).
- Under accumulation without `no_sync`, `iter` counts optimizer steps (::test_the_warm_up_counts_optimizer_steps).
- With a GradScaler, set `state.grad_scaler`: errors are then kept in units of the unscaled loss, whatever the scale does
  (tests/compat/test_edges.py::test_a_loss_scale_that_changes). Without, they are in units of the scaled loss, as in torch.
- `error_dict` and `q_memory_dict` are by parameter name; there is no `rng`, as the seed is all that has to be kept.
- `orthogonalization_epsilon` and `batch_tensors_with_same_shape` are taken and not needed: bases are found without dividing by
  zero, and matrices of the same shape are always worked on together. P is worked out anew in each step: `p_memory_dict` is
  empty. Factors travel as fp32 also inside `fp16_compress_wrapper`.
"""

import logging
import math
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from laconic._torch.optimizers import loss_scale
from laconic.comm.bucket import RESIDUAL, Slot
from laconic.compat._bucket_owner import watch
from laconic.compat._hooks import Binding, checked_memory
from laconic.reducers.base import Reducer
from laconic.reducers.batched_powersgd import BatchedPowerSGD
from laconic.reducers.error_feedback import ErrorFeedback
from laconic.reducers.exact import Exact
from laconic.reducers.lowrank import split_shapes
from laconic.reducers.powersgd import PowerSGD

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)

SAVED = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "orthogonalization_epsilon",
    "use_error_feedback",
    "warm_start",
    "batch_tensors_with_same_shape",
    "random_seed",
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "compression_stats_logging_frequency",
    "next_stats_report",
)


class PowerSGDState:
    """Settings and memory of PowerSGD, for one DDP; the state of `powerSGD_hook` and `batched_powerSGD_hook`.

    Settings may be changed between steps. `iter` is the number of steps so far. With a GradScaler, set `grad_scaler` to it:
    errors are then kept in units of the unscaled loss. A state can be pickled and read by `torch.load` as it is, without its
    process group; each rank saves its own.

    Memory: n numbers, the error; and `matrix_approximation_rank` * columns a matrix, for `warm_start`.

    Arguments:
      `process_group`: the ranks to average over; None: the DDP's own.
      `matrix_approximation_rank`: thin matrices of so many columns; 1 to 4 for most models, more for language models.
        Default 1.
      `start_powerSGD_iter`: plain averaging in the first so many steps; a tenth of the run is a good start. Default 1000.
      `min_compression_rate`: parameters that would shrink by less are sent as they are. Default 2.
      `use_error_feedback`: whether what a message left out goes into the next one. Default True.
      `warm_start`: whether to begin from the last step's factors. Default True.
      `orthogonalization_epsilon`: not needed; bases are found without dividing by zero. Default 0.
      `random_seed`: of the first factors, the same on all ranks. Default 0.
      `compression_stats_logging_frequency`: steps between two lines in the log. Default 10000.
      `batch_tensors_with_same_shape`: not needed; matrices of the same shape are always worked on together. Default False.

    A ValueError says that `start_powerSGD_iter` must be above 1 with error feedback or warm start, as in torch.

    >>> from laconic.compat.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    >>> state.iter, state.compression_stats()
    (0, (0, 0, 0))
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803  # torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                f"start_powerSGD_iter must be above 1 with error feedback or warm start, as in torch; got {start_powerSGD_iter}"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.iter: int = 0
        self.total_numel_before_compression: int = 0
        self.total_numel_after_compression: int = 0
        self.compression_stats_logging_frequency: int = max(1, compression_stats_logging_frequency)
        self.next_stats_report: int = 0
        self._memory: dict[str, Slot] = {}
        self._exchanges = 0
        self._binding: Binding | None = None
        self.grad_scaler: torch.amp.GradScaler | None = None  # if there is one, errors are kept in units of the unscaled loss
        self._per_layer()  # complains of a rank or a rate that can't be
        logger.info("PowerSGD settings: %s", ", ".join(f"{name} = {getattr(self, name)}" for name in SAVED[:8]))

    # Memory, by parameter name

    @property
    def error_dict(self) -> MutableMapping[str, torch.Tensor]:
        """What this rank has left out so far, by parameter name; it can be changed."""
        return _Kept(self._memory, RESIDUAL)

    @error_dict.setter
    def error_dict(self, errors: Mapping[str, torch.Tensor]) -> None:
        _Kept(self._memory, RESIDUAL).replace(errors)

    @property
    def q_memory_dict(self) -> MutableMapping[str, torch.Tensor]:
        """The last step's Q, rank x columns, by parameter name; it can be changed."""
        return _Kept(self._memory, "q")

    @q_memory_dict.setter
    def q_memory_dict(self, factors: Mapping[str, torch.Tensor]) -> None:
        _Kept(self._memory, "q").replace(factors)

    @property
    def p_memory_dict(self) -> Mapping[str, torch.Tensor]:
        """Nothing: P is not kept."""
        return MappingProxyType({})

    def state_dict(self) -> dict[str, Any]:
        """This rank's settings and memory as plain data, copied. Every rank saves its own: each has its own error."""
        memory = {name: {key: tensor.clone() for key, tensor in slot.items()} for name, slot in self._memory.items() if slot}
        exchanges = self._exchanges if self._binding is None else self._binding.hook.exchanges
        return {**{name: getattr(self, name) for name in SAVED}, "memory": memory, "rounds": exchanges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, in this DDP or another of the same model, also with other buckets.

        Arguments:
          `state`: what `state_dict` gave. What is none, or of another model, is a ValueError.
        """
        missing = [name for name in (*SAVED, "memory", "rounds") if name not in state]
        if missing:
            raise ValueError(f"this is no state_dict of a PowerSGDState: {missing[0]!r} is missing")
        memory = {name: {key: tensor.clone() for key, tensor in slot.items()} for name, slot in state["memory"].items()}
        ddp = self._binding.watch.ddp() if self._binding is not None else None
        if ddp is not None:
            checked_memory(memory, ddp)
        for name in SAVED:
            setattr(self, name, state[name])
        self._memory, self._exchanges, self._binding = memory, state["rounds"], None

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("A process group can't be saved: it is left out of the saved PowerSGD state.")
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._binding = self.grad_scaler = None
        self.process_group = dist.group.WORLD
        self.load_state_dict(state)
        logger.warning("The loaded PowerSGD state averages over all ranks; for another process group, set its `process_group`.")

    # Steps

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count a step at its last bucket; the hooks call it.

        Arguments:
          `bucket`: the one that DDP has handed over.
        """
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD begins after %s iterations.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """How many times fewer numbers were sent, how many there were, and how many were sent, since PowerSGD began."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def _average(self, bucket: dist.GradBucket, compressor: Reducer) -> torch.futures.Future[torch.Tensor]:
        binding = self._bound(bucket)
        if bucket.index() == 0:
            # A backward of the optimizer step that was counted already doesn't count again.
            binding.hook.step = self.iter if binding.watch.next_step() else max(self.iter - 1, 0)
        step = binding.hook.step
        begun = step >= self.start_powerSGD_iter
        if begun:
            self._count(bucket, compressor)
        future = binding.average(bucket, compressor if begun else Exact(), self.process_group)
        if step == self.iter:
            self.maybe_increase_iter(bucket)
        return future

    def _bound(self, bucket: dist.GradBucket) -> Binding:
        watched = watch(bucket, self)
        if self._binding is None or self._binding.watch is not watched:
            ddp = watched.ddp()
            assert ddp is not None, "its backward is running"
            checked_memory(self._memory, ddp)
            exchanges = self._exchanges if self._binding is None else self._binding.hook.exchanges
            self._binding = Binding(watched, self._memory)
            self._binding.hook.exchanges = exchanges
            scaler = self.grad_scaler
            if scaler is not None and scaler.is_enabled():
                self._binding.hook.scale = loss_scale(scaler)
        return self._binding

    def _per_layer(self) -> Reducer:
        return self._fed_back(
            PowerSGD(self.matrix_approximation_rank, self.min_compression_rate, self.warm_start, self.random_seed)
        )

    def _batched(self) -> Reducer:
        return self._fed_back(BatchedPowerSGD(self.matrix_approximation_rank, self.warm_start, self.random_seed))

    def _fed_back(self, reducer: Reducer) -> Reducer:
        return ErrorFeedback(reducer) if self.use_error_feedback else reducer

    def _count(self, bucket: dist.GradBucket, compressor: Reducer) -> None:
        numbers = bucket.buffer().numel()
        inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
        if isinstance(inner, PowerSGD):
            shapes = tuple(tuple(parameter.shape) for parameter in bucket.parameters())
            parts = split_shapes(shapes, inner.rank, inner.min_compression_rate)
            sent = parts.tall + parts.wide + parts.plain
        else:
            sent = 2 * math.ceil(math.sqrt(numbers)) * self.matrix_approximation_rank
        self.total_numel_before_compression += numbers
        self.total_numel_after_compression += sent
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            logger.info("PowerSGD at iteration %s: %s numbers sent as %s, %.3g times fewer.", self.iter, before, after, rate)
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency


class _Kept(MutableMapping[str, torch.Tensor]):
    """One kind of memory, by parameter name."""

    def __init__(self, memory: dict[str, Slot], key: str) -> None:
        self._memory, self._key = memory, key

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._memory[name][self._key]

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._memory.setdefault(name, {})[self._key] = value

    def __delitem__(self, name: str) -> None:
        del self._memory[name][self._key]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, slot in self._memory.items() if self._key in slot])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Forget all, and keep these instead."""
        kept = dict(values)
        self.clear()
        self.update(kept)


def powerSGD_hook(  # noqa: N802  # torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send each matrix as two thin factors, after `state.start_powerSGD_iter` plain steps.

    Maths: that of `laconic.PowerSGD`, in `laconic.ErrorFeedback` with `state.use_error_feedback`.

    Bytes: 2(N-1)/N * 4(r(rows + columns) a matrix + the rest), for a rank r.

    Memory: that of `state`.

    Paper: Vogels et al. 2019, arXiv:1905.13727.

    Not: sparse gradients, which are a TypeError. Factors travel as fp32 also inside `fp16_compress_wrapper`.

    Arguments:
      `state`: a `PowerSGDState`.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    >>> state = PowerSGDState(None, start_powerSGD_iter=2)
    >>> ddp.register_comm_hook(state, powerSGD_hook)
    >>> optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    >>> for batch in torch.ones(3, 8, 64):
    ...     ddp(batch).sum().backward()
    ...     optimizer.step()
    >>> state.compression_stats()  # 64 * 64 + 64 numbers as 64 + 64 + 64
    (21.666666666666668, 4160, 192)
    >>> torch.distributed.destroy_process_group()
    """
    return state._average(bucket, state._per_layer())


def batched_powerSGD_hook(  # noqa: N802  # torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send a whole bucket as one square matrix in two thin factors: fewer bytes than `powerSGD_hook`, and less true.

    Maths: that of `laconic.BatchedPowerSGD`, in `laconic.ErrorFeedback` with `state.use_error_feedback`.

    Bytes: 2(N-1)/N * 4 * 2r * sqrt(n), for a rank r and buckets of n numbers.

    Memory: that of `state`.

    Paper: Vogels et al. 2019, arXiv:1905.13727.

    Not: warm starts don't go on in other buckets: the matrix is the bucket.

    Arguments:
      `state`: a `PowerSGDState`; its `min_compression_rate` is not used.
      `bucket`: DDP hands it over. The future that is returned gets the mean, flat.

    >>> import torch
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> from laconic.compat.ddp_comm_hooks.powerSGD_hook import (
    ...     PowerSGDState,
    ...     batched_powerSGD_hook,
    ... )
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    >>> state = PowerSGDState(None, start_powerSGD_iter=2)
    >>> ddp.register_comm_hook(state, batched_powerSGD_hook)
    >>> optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    >>> for batch in torch.ones(3, 8, 64):
    ...     ddp(batch).sum().backward()
    ...     optimizer.step()
    >>> state.compression_stats()  # 64 * 64 + 64 numbers, 65 * 65 as a square
    (32.0, 4160, 130)
    >>> torch.distributed.destroy_process_group()
    """
    return state._average(bucket, state._batched())


# What `torch.load` may build when it reads a checkpoint with its default weights_only=True.
torch.serialization.add_safe_globals([PowerSGDState, powerSGD_hook, batched_powerSGD_hook])
