"""Sharded gradients: what FSDP2 holds of a gradient hook, and how its flat tensors become buckets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.futures import Future

from laconic._torch.fsdp import ShardGroup, after_accumulation, failed_in_collective, shard_groups
from laconic._torch.tensors import at_end_of_backward, backward_id
from laconic.comm.flat_tensors import local, unflatten
from laconic.comm.group import is_lost
from laconic.gradients.hook import GradientHook


@dataclass
class _ShardBucket:
    """The gradients of one `fully_shard` group in the backward that is running: a `Gradients` for the hook.

    `flat` is the reduce-scatter's own output where FSDP's gradients will be views of it: there the mean is written in place.
    Else it is a copy without padding, FSDP is left zeros, and the mean is added to what it makes of them.
    """

    number: int
    last: bool
    shards: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    in_place: bool
    mean: Future[Tensor] | None = field(default=None)

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    def parameters(self) -> list[Tensor]:
        return list(self.shards)

    def write(self) -> None:
        """Put the mean into the parameters' gradients."""
        assert self.mean is not None
        mean = self.mean.value()
        if self.in_place:
            if mean.data_ptr() != self.flat.data_ptr():
                self.flat.copy_(mean)
            return
        for parameter, part in zip(self.shards, unflatten(mean, self.views), strict=True):
            assert parameter.grad is not None, "FSDP has made one of what it was left"
            local(parameter.grad).add_(part.to(parameter.grad.device))


class ShardedDispatcher:
    """Collects the flat gradients of a sharded model, hands them to `target` in one order, and writes the means back.

    FSDP calls a hook for each group after its reduce-scatter, in whatever order backward comes to them. Buckets leave in the
    order of the model's modules, last to first, which is as a rule the order of backward; one that comes early waits for those
    before it. The means are written when the backward ends: until then nobody may read gradients.

    A reentrant checkpoint runs a backward of its own inside the backward, so the end of one is not the end of all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.target: GradientHook | None = None
        self.muted = False  # a local phase: gradients stay those of the island
        self.apart = False  # only DDP has collectives of its own to silence
        self._groups = shard_groups(model)[::-1]
        self._turns: list[int] = []  # the groups that train something in this backward, in the order in which they leave
        self._backwards: set[int] = set()  # the one that is running, and those inside of it; none: there is nothing to do
        self._arrived: dict[int, _ShardBucket] = {}
        self._launched = 0  # of these turns
        self._partial: dict[int, Tensor] = {}  # of backwards whose gradients are only added up, by group
        for number, group in enumerate(self._groups):
            group.set_hook(partial(self._reduced, number))
        self._handle = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def release(self) -> None:
        """Plain FSDP2 again."""
        if self.target is not None:
            self.target.settle()
        self.give_back()
        for group in self._groups:
            group.set_hook(None)
        self._handle.remove()
        self.target = None

    def check_finished(self) -> None:
        """A step was made: the gradients of its backward must have been averaged."""
        if self._backwards:
            self._forget()
            raise RuntimeError(
                "the optimizer made a step before gradients were averaged between islands: the last backward failed, or it "
                "ended inside of a reentrant checkpoint, where use_reentrant=False helps"
            )

    def give_back(self) -> None:
        """Gradients that were only added up so far become the parameters' own, unless cleared: nobody will average them."""
        for number, flat in self._partial.items():
            group = self._groups[number]
            views = _views(flat, [size for size, _ in group.pieces()])
            for parameter, view in zip(group.parameters, views, strict=True):
                if parameter.grad is not None:
                    local(parameter.grad).add_(view.to(parameter.grad.device))
        self._partial = {}

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if self._backwards and backward_id() < 0:
            self._forget()  # the backward before has failed

    def _forget(self) -> None:
        if self.target is not None:
            self.target.settle()
        self._backwards, self._arrived, self._launched = set(), {}, 0

    def _reduced(self, number: int, output: Tensor) -> None:
        """FSDP has reduce-scattered the gradients of a group; they are this island's mean."""
        if self.muted or self.target is None:
            return
        if not self._backwards:
            self._turns = [place for place, one in enumerate(self._groups) if one.parameters]
        if backward_id() not in self._backwards:
            self._backwards.add(backward_id())
            # FSDP queues its own end of a backward, in which it reduces what is left. This one comes after all that are queued
            # until it is called the first time.
            at_end_of_backward(lambda: at_end_of_backward(self._finish))
        group = self._groups[number]
        self._check(group, output)
        if not group.averages:
            self._add_up(number, output)
            return
        if number in self._arrived:
            raise RuntimeError(
                f"{group.name} is reduced twice in one backward, and its gradients can be averaged once; call "
                "set_requires_gradient_sync(False) for all but the last part of a loss that is computed in parts"
            )
        self._arrived[number] = self._bucket(number, output)
        self._launch()

    def _check(self, group: ShardGroup, output: Tensor) -> None:
        numbers = sum(padded for _, padded in group.pieces())
        if output.numel() != numbers:
            raise RuntimeError(
                f"some parameters of {group.name} got no gradient in this backward: FSDP reduced {output.numel()} numbers of "
                f"{numbers}. Call model.set_reduce_scatter_unused_params(True), by which they get zeros, or freeze them with "
                "requires_grad_(False)"
            )

    def _add_up(self, number: int, output: Tensor) -> None:
        """`set_requires_all_reduce(False)`: the next average is of the sum, as in torch's own HSDP."""
        flat = _compact(self._groups[number], output)
        self._partial[number] = self._partial[number].add_(flat) if number in self._partial else flat

    def _bucket(self, number: int, output: Tensor) -> _ShardBucket:
        group = self._groups[number]
        parameters, pieces = group.parameters, group.pieces()
        if any(map(after_accumulation, parameters)):
            raise RuntimeError(
                f"a parameter of {group.name} has got a post-accumulate-grad hook, which would see the island's mean"
            )
        in_place = number not in self._partial and all(
            parameter.grad is None
            and (parameter.dtype, parameter.device) == (output.dtype, output.device)
            and size.numel() == padded
            for parameter, (size, padded) in zip(parameters, pieces, strict=True)
        )
        in_place = in_place and group.divisor(output.dtype) == 1
        flat = output if in_place else _compact(group, output)
        if number in self._partial:
            flat.add_(self._partial.pop(number))
        views = _views(flat, [size for size, _ in pieces])
        return _ShardBucket(number, number == self._turns[-1], parameters, flat, views, in_place)

    def _launch(self) -> None:
        """Hand on the buckets whose turn it is."""
        assert self.target is not None
        while self._launched < len(self._turns) and (bucket := self._arrived.get(self._turns[self._launched])) is not None:
            self._launched += 1
            bucket.mean = self.target.arrive(bucket)

    def _finish(self) -> None:
        """The backward has ended: write the means."""
        if not self._backwards or any(group.in_backward for group in self._groups):
            return  # it is the end of a backward inside the backward
        missing = [self._groups[number].name for number in self._turns if number not in self._arrived]
        if self._arrived and missing:
            self._forget()
            raise RuntimeError(
                f"{', '.join(missing)} got no gradients in this backward, and other modules did. Call "
                "model.set_reduce_scatter_unused_params(True), by which parameters without a gradient get zeros, or freeze "
                "those that are never used with requires_grad_(False)"
            )
        with torch.no_grad():
            for bucket in self._arrived.values():
                bucket.write()
        self._backwards, self._arrived, self._launched = set(), {}, 0


def in_island(error: BaseException) -> bool:
    """Whether a collective of torch's own failed, as FSDP has inside of an island: it says no more than its backend."""
    return is_lost(error) and failed_in_collective(error)


def _compact(group: ShardGroup, output: Tensor) -> Tensor:
    """The gradients in a flat tensor without their padding, as FSDP would hand them on; it is left zeros instead."""
    pieces = group.pieces()
    parts = torch.split(output, [padded for _, padded in pieces])
    flat = torch.cat([part[: size.numel()] for part, (size, _) in zip(parts, pieces, strict=True)])
    divisor = group.divisor(output.dtype)
    output.zero_()
    return flat if divisor == 1 else flat.div_(divisor)


def _views(flat: Tensor, sizes: Sequence[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [size.numel() for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
