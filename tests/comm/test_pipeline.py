"""The pipeline: whatever the ranks' speeds, all launch the same sequence, and every exchange gets its own answers."""

import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.futures import Future

from laconic.comm.collectives import AllGather, Collective
from laconic.comm.exchange import Rounds
from laconic.comm.ledger import Ledger
from laconic.comm.pipeline import Pipeline

Label = tuple[int, int]  # (exchange, round)
Answers = list[list[list[int]]]  # by round, by rank


class Meeting:
    """Where ranks meet, as in a process group: the n-th collective of one rank goes with the n-th of every other one."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.sent: list[list[Tensor]] = [[] for _ in range(world)]
        self.changed = threading.Condition()

    def labels(self, rank: int) -> list[Label]:
        """What a rank has launched, in its order."""
        return [(int(tensor[0]), int(tensor[1])) for tensor in self.sent[rank]]

    def answer(self, number: int) -> list[Tensor]:
        with self.changed:
            there = self.changed.wait_for(lambda: all(len(sent) > number for sent in self.sent), timeout=20)
            assert there, f"collective {number} never came on some rank: {[len(sent) for sent in self.sent]}"
            return [sent[number] for sent in self.sent]


class Handle:
    def __init__(self, meeting: Meeting, number: int) -> None:
        self.meeting, self.number = meeting, number

    def wait(self) -> Tensor:
        return torch.stack(self.meeting.answer(self.number))

    def future(self) -> Future[Tensor]:
        raise NotImplementedError

    def when_done(self, call: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it")

    def settle(self, seconds: float) -> bool:
        return all(len(sent) > self.number for sent in self.meeting.sent)


class Group:
    """One rank's side of a meeting; it takes its time before each launch."""

    def __init__(self, meeting: Meeting, rank: int, seed: int = 0) -> None:
        self.meeting, self.rank, self.world, self.who = meeting, rank, meeting.world, "the ranks of a meeting"
        self.chance = random.Random(f"{seed} {rank}")

    def check_peers(self) -> None:
        """They are there."""

    def launch(self, collective: Collective) -> Handle:
        time.sleep(self.chance.choice([0, 0, 0.0005, 0.002]))
        with self.meeting.changed:
            self.meeting.sent[self.rank].append(collective.tensor.clone())
            self.meeting.changed.notify_all()
        return Handle(self.meeting, len(self.meeting.sent[self.rank]) - 1)


def rounds_of(exchange: int, rounds: int, rank: int) -> Rounds[Answers]:
    """Sends (exchange, round, rank) in each round; returns what came back."""
    answers = []
    for number in range(rounds):
        answers.append((yield AllGather(torch.tensor([exchange, number, rank]))).tolist())
    return answers


def batch(pipeline: Pipeline, rank: int, rounds: Sequence[int], last: bool) -> list[Answers]:
    pending = [
        pipeline.add(number, rounds_of(number, count, rank), last=last and number == len(rounds) - 1)
        for number, count in enumerate(rounds)
    ]
    pipeline.finish()
    return [exchange.result for exchange in pending]


@given(
    rounds=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3),
    depth=st.sampled_from([None, 1, 2, 3]),
    window=st.sampled_from([None, 1, 2, 4]),
    last=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_all_ranks_launch_the_same_sequence(
    rounds: list[list[int]], depth: int | None, window: int | None, last: bool, seed: int
) -> None:
    meeting = Meeting(3)

    def rank_of(rank: int) -> list[list[Answers]]:
        group = Group(meeting, rank, seed)
        expected: dict[Hashable, int] = {}
        return [  # also other numbers of rounds than expected
            batch(Pipeline(group, Ledger(), expected, depth=depth, window=window), rank, counts, last) for counts in rounds
        ]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(rank_of, range(3)))
    assert meeting.labels(0) == meeting.labels(1) == meeting.labels(2)
    wanted = [
        [[[[number, turn, rank] for rank in range(3)] for turn in range(count)] for number, count in enumerate(counts)]
        for counts in rounds
    ]
    assert results == [wanted] * 3, "every exchange gets the answers to its own rounds"


def launched(rounds: Sequence[int], batches: int, **rule: int) -> list[Label]:
    """The sequence of the last of some batches, on one rank."""
    meeting = Meeting(1)
    expected: dict[Hashable, int] = {}
    for _ in range(batches):
        meeting.sent[0].clear()
        batch(Pipeline(Group(meeting, 0), Ledger(), expected, **rule), 0, rounds, last=True)
    return meeting.labels(0)


def test_the_order_of_a_backward() -> None:
    """What docs/ordering.md says: at first later rounds wait for the last bucket, then the next leaves a bucket later."""
    assert launched([2, 2, 2, 2], 1, depth=1) == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert launched([2, 2, 2, 2], 2, depth=1) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 0), (2, 1), (3, 1)]
    assert launched([2, 2, 2, 2], 2, depth=2) == [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (1, 1), (2, 1), (3, 1)]
    assert launched([3, 1, 3], 2, depth=1) == [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (2, 1), (2, 2)]


def test_a_window_completes_the_oldest_first() -> None:
    assert launched([2, 2, 2], 1, window=2) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
    assert launched([2, 2, 2], 2, window=1) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(("rounds", "delay"), [(1, 5), (2, 5), (3, 5), (3, 2), (4, 8)])
def test_rounds_leave_at_fixed_steps(rounds: int, delay: int) -> None:
    """The i-th of R rounds leaves i * delay / R steps after the first, in a bucket's second exchange and later."""
    meeting = Meeting(1)
    expected: dict[Hashable, int] = {}
    for turn in range(2):
        meeting.sent[0].clear()
        pipeline = Pipeline(Group(meeting, 0), Ledger(), expected)
        pipeline.add("a", rounds_of(0, rounds, 0))
        pipeline.add("b", rounds_of(1, 1, 0))
        pipeline.add("nothing to send", rounds_of(2, 0, 0))
        for elapsed in range(1, delay):
            pipeline.advance(elapsed, delay)
            due = sum(number * delay // rounds <= elapsed for number in range(rounds)) if turn else 1
            assert sum(exchange == 0 for exchange, _ in meeting.labels(0)) == due, (turn, elapsed)
        pipeline.finish()
        assert meeting.labels(0).count((1, 0)) == 1
    assert expected == {"a": rounds, "b": 1, "nothing to send": 0}


def test_what_is_abandoned_is_forgotten() -> None:
    meeting, closed = Meeting(2), []

    def noted() -> Iterator[Collective]:
        try:
            yield AllGather(torch.tensor([0, 0, 0]))
        finally:
            closed.append(True)

    pipeline = Pipeline(Group(meeting, 0), Ledger(), {})
    pipeline.add(0, noted())  # type: ignore[arg-type]
    assert not pipeline.abandon(0), "the other rank never launched its part"
    assert closed == [True]
    assert pipeline.abandon(0), "nothing is left"
    meeting.sent[1].append(torch.zeros(3))
    pipeline.add(0, rounds_of(1, 1, 0))
    meeting.sent[1].append(torch.zeros(3))
    assert pipeline.abandon(0)
