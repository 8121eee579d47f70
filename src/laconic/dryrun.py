"""Exchanges without a network: all ranks in one process, or one rank on meta tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.wire import AllGather, AllReduce, AllToAll, Answer, Collective, Ledger, Rounds, Traffic, blank, traffic


def predict(rounds: Rounds[Answer], world: int) -> Traffic:
    """Count what an exchange would send, without sending it. For exchanges over meta tensors: no data, no network."""
    total = Traffic()
    try:
        collective = next(rounds)
        while True:
            if collective.tensor.numel():
                total += traffic(collective, world)
            collective = rounds.send(blank(collective, world))
    except StopIteration:
        return total


def simulate(ranks: Sequence[Rounds[Answer]], ledger: Ledger | None = None) -> list[Answer]:
    """Run the exchanges of all ranks in this process, in step with each other; `ledger` counts for one rank.

    >>> import torch
    >>> def mean(x):
    ...     return (yield AllReduce(x))
    >>> simulate([mean(torch.tensor([1.0])), mean(torch.tensor([3.0]))])
    [tensor([2.]), tensor([2.])]
    """
    ledger = ledger or Ledger()
    world = len(ranks)
    results: dict[int, Answer] = {}
    answers: list[Tensor] | None = None
    while True:
        collectives: list[Collective] = []
        for rank, rounds in enumerate(ranks):
            try:
                collectives.append(next(rounds) if answers is None else rounds.send(answers[rank]))
            except StopIteration as stop:
                results[rank] = stop.value
        if not collectives:
            return [results[rank] for rank in range(world)]
        assert len(collectives) == world, f"ranks {sorted(results)} have finished, the others have not"
        shapes = {(type(c), c.tensor.shape, c.tensor.dtype) for c in collectives}
        assert len(shapes) == 1, f"ranks disagree on what to send: {shapes}"
        if collectives[0].tensor.numel():
            ledger.launch(collectives[0], world)
        answers = _answers(collectives)


def _answers(collectives: Sequence[Collective]) -> list[Tensor]:
    tensors = [collective.tensor for collective in collectives]
    world = len(tensors)
    match collectives[0]:
        case AllReduce():
            for tensor in tensors:
                tensor.mul_(1 / world)
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [tensor.copy_(total) for tensor in tensors]
        case AllGather():
            return [torch.stack(tensors) for _ in tensors]
        case AllToAll():
            return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(world)]
