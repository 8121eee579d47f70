"""Exchanges without a network: all ranks in one process, or one rank on meta tensors."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from laconic.comm.collectives import Collective, Traffic
from laconic.comm.exchange import Answer, Reduced, Rounds, check_collective, check_generator
from laconic.comm.ledger import Ledger


class Round(NamedTuple):
    """One collective of an exchange, as it will be."""

    kind: str
    traffic: Traffic
    world: int

    @property
    def wire_bytes(self) -> int:
        """What it puts on a rank's cable."""
        return self.traffic.wire_bytes


def rounds_of(rounds: Rounds[Answer], world: int) -> list[Round]:
    """What an exchange would send, without sending it. For exchanges over meta tensors: no data, no network."""
    found: list[Round] = []
    check_generator(rounds)
    try:
        collective = next(rounds)
        while True:
            check_collective(collective, rounds)
            if collective.tensor.numel():
                found.append(Round(collective.kind, collective.traffic(world), world))
            collective = rounds.send(collective.blank(world))
    except StopIteration:
        return found


def work_of(rounds: Rounds[Answer], world: int) -> list[float]:
    """The seconds that a rank works on an exchange before each of its rounds, and after the last; real tensors, no network.

    What comes back from the others is blank. How long it takes to decode does not depend on it.
    """
    found: list[float] = []
    began = time.perf_counter()
    try:
        collective = next(rounds)
        while True:
            found.append(time.perf_counter() - began)
            answer = collective.blank(world)
            if answer is not collective.tensor:
                answer.zero_()
            began = time.perf_counter()
            collective = rounds.send(answer)
    except StopIteration as stop:
        if isinstance(stop.value, Reduced):
            stop.value.finish()
        found.append(time.perf_counter() - began)
    return found


def predict(rounds: Rounds[Answer], world: int) -> Traffic:
    """What all rounds of an exchange would send together."""
    return sum((each.traffic for each in rounds_of(rounds, world)), Traffic())


def simulate(ranks: Sequence[Rounds[Answer]], ledger: Ledger | None = None) -> list[Answer]:
    """Run the exchanges of all ranks in this process, in step with each other; what each returns, by rank.

    No process group is needed. Of a reducer, each result is a `Reduced`: call its `finish` before you read its mean.

    Arguments:
      `ranks`: an exchange for each rank, such as reducer.reduce(bucket).
      `ledger`: counts the bytes of one rank; None: nobody does. Default None.

    >>> import torch, laconic
    >>> def bucket(rank):
    ...     flat = torch.tensor([1.0, 2.0, 3.0 + rank])
    ...     return laconic.Bucket(flat, [flat], ["w"], [{}], rank=rank, world=2)
    >>> results = laconic.simulate(
    ...     [laconic.Cast("bf16").reduce(bucket(rank)) for rank in range(2)]
    ... )
    >>> for reduced in results:
    ...     reduced.finish()
    >>> results[0].mean, torch.equal(results[0].mean, results[1].mean)
    (tensor([1.0000, 2.0000, 3.5000]), True)
    """
    ledger = ledger or Ledger()
    world = len(ranks)
    for rounds in ranks:
        check_generator(rounds)
    results: dict[int, Answer] = {}
    answers: list[Tensor] | None = None
    while True:
        collectives: list[Collective] = []
        for rank, rounds in enumerate(ranks):
            try:
                collective = next(rounds) if answers is None else rounds.send(answers[rank])
                check_collective(collective, rounds)
                collectives.append(collective)
            except StopIteration as stop:
                results[rank] = stop.value
        if not collectives:
            return [results[rank] for rank in range(world)]
        assert len(collectives) == world, f"ranks {sorted(results)} have finished, the others have not"
        shapes = {(type(c), c.tensor.shape, c.tensor.dtype) for c in collectives}
        assert len(shapes) == 1, f"ranks disagree on what to send: {shapes}"
        if collectives[0].tensor.numel():
            ledger.launch(collectives[0], world)
        answers = collectives[0].answers([collective.tensor for collective in collectives])
