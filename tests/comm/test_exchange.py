"""Counting and the drivers, without processes."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future

from laconic.comm import exchange
from laconic.comm.collectives import AllGather, AllReduce, AllToAll, Collective, Traffic
from laconic.comm.dryrun import predict, simulate
from laconic.comm.exchange import Rounds, complete
from laconic.comm.group import CommunicationError
from laconic.comm.ledger import Ledger
from laconic.ranks.agreement import alike, gather_texts
from laconic.ranks.presence import still_training


@given(count=st.integers(1, 10_000), world=st.integers(1, 300))
def test_wire_bytes_are_the_least_a_rank_must_send(count: int, world: int) -> None:
    flat = torch.empty(count, device="meta")
    rows = torch.empty(world, count, device="meta")
    assert AllReduce(flat).traffic(world).wire_bytes == -(-2 * (world - 1) * 4 * count // world)
    assert AllGather(flat).traffic(world) == Traffic(4 * count, (world - 1) * 4 * count, 1)
    assert AllToAll(rows).traffic(world) == Traffic(4 * count * world, (world - 1) * 4 * count, 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sparse_tensor_sends_its_indices_as_well(world: int) -> None:
    """Two of three entries in the same place: as they are handed over, not as they would be added up."""
    values = torch.ones(3, 5, dtype=torch.float16)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 7, 7], [1, 2, 2]]), values, (100, 100, 5), check_invariants=True)
    payload = 2 * 3 * 8 + 3 * 5 * 2
    assert AllReduce(sparse).traffic(world) == Traffic(payload, -(-2 * (world - 1) * payload // world), 1)


def once(collective: Callable[[torch.Tensor], Collective], tensor: torch.Tensor) -> Rounds[torch.Tensor]:
    return (yield collective(tensor))


def test_simulated_collectives_do_what_they_say() -> None:
    values = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(3)]
    for answer in simulate([once(AllReduce, value.clone()) for value in values]):
        assert torch.allclose(answer, values[1])
    for answer in simulate([once(AllGather, value) for value in values]):
        assert torch.equal(answer, torch.stack(values))
    for rank, answer in enumerate(simulate([once(AllToAll, value) for value in values])):
        assert torch.equal(answer, torch.stack([value[rank] for value in values]))


def test_an_empty_tensor_is_not_worth_a_message() -> None:
    ledger = Ledger()
    simulate([once(AllGather, torch.empty(0)) for _ in range(2)], ledger)
    assert ledger.total == Traffic() == predict(once(AllGather, torch.empty(0, device="meta")), 2)


def test_ranks_that_yield_different_things_are_found_out() -> None:
    with pytest.raises(AssertionError, match="disagree"):
        simulate([once(AllReduce, torch.ones(2)), once(AllReduce, torch.ones(3))])
    with pytest.raises(AssertionError, match="finished"):
        simulate([once(AllReduce, torch.ones(2)), nothing()])


def nothing() -> Rounds[torch.Tensor]:
    return torch.ones(1)
    yield AllReduce(torch.ones(1))


def test_the_ledger_keeps_totals_and_nothing_else() -> None:
    ledger = Ledger()
    ledger.launch(AllGather(torch.empty(2)), 3)
    size = len(pickle.dumps(ledger))
    for _ in range(4999):
        ledger.launch(AllGather(torch.empty(2)), 3)
        ledger.wait(0.001)
    assert ledger.total == Traffic(5000 * 8, 5000 * 16, 5000)
    assert ledger.wait_seconds == pytest.approx(4.999)
    assert len(pickle.dumps(ledger)) < size + 32, "it grows with what it counts"
    ledger.wait(None)
    ledger.wait(1.0)
    assert ledger.wait_seconds is None, "an unknown wait is not a wait of nothing"


def test_texts_of_any_letters_reach_every_rank() -> None:
    """An error may name a folder in any language: letters are not bytes."""
    texts = ["", "plain", "/données/modèle № 3 は無い"]
    answers = simulate([gather_texts(text, torch.device("cpu")) for text in texts])
    assert answers == [texts] * 3


def test_ranks_that_go_on_and_texts_that_differ_are_known_to_all() -> None:
    going = [True, False, True]
    assert simulate([still_training(one, torch.device("cpu")) for one in going]) == [going] * 3
    for texts in (["a", "a", "a"], ["a", "a", "b"], ["b", "a", "a"], [f"{number}" for number in range(60)]):
        answers = simulate([alike(text, torch.device("cpu")) for text in texts])
        assert answers == [len(set(texts)) == 1] * len(texts)


class Timed:
    """A group whose collectives take a second each, by a clock of its own."""

    rank, world, who = 0, 2, "2 ranks"

    def __init__(self) -> None:
        self.now = 0.0
        self.left: list[Collective] = []
        self.error: Exception | None = None

    def check_peers(self) -> None:
        """They are there."""

    def launch(self, collective: Collective) -> "Timed":
        self.left.append(collective)
        return self

    def wait(self) -> torch.Tensor:
        self.now += 1
        if self.error:
            raise self.error
        return self.left[-1].tensor

    def future(self) -> Future[torch.Tensor]:
        raise AssertionError("nobody asks for it")

    def when_done(self, call: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it")

    def settle(self, seconds: float) -> bool:
        return True


def working(group: Timed, device: str) -> Rounds[str]:
    for _ in range(2):
        group.now += 10
        yield AllReduce(torch.ones(3, device=device))
    group.now += 10
    return "done"


@pytest.mark.parametrize(("device", "waited"), [("cpu", 2.0), ("meta", None)])
def test_time_is_waiting_or_working_and_unknown_where_waiting_does_not_block(
    device: str, waited: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, ledger = Timed(), Ledger()
    monkeypatch.setattr(exchange, "time", SimpleNamespace(perf_counter=lambda: group.now))
    assert complete(working(group, device), group, ledger) == "done"
    assert (ledger.wait_seconds, ledger.work_seconds) == (waited, 30.0)
    assert {kind: cost.collectives for kind, cost in ledger.kinds.items()} == {"AllReduce": 2}


def hollow() -> Rounds[list[tuple[int, ...]]]:
    """Empty ones in a row, at the start, in between and at the end."""
    shapes = []
    for tensor in (torch.empty(0), torch.empty(0, 3), torch.ones(2), torch.empty(0), torch.empty(0)):
        answer = yield AllGather(tensor)
        shapes.append(tuple(answer.shape))
    answer = yield AllToAll(torch.empty(2, 0))
    return [*shapes, tuple(answer.shape)]


def test_of_empty_tensors_only_the_answer_is_made() -> None:
    group, ledger = Timed(), Ledger()
    assert complete(hollow(), group, ledger) == [(2, 0), (2, 0, 3), (2,), (2, 0), (2, 0), (2, 0)]
    assert [tuple(collective.tensor.shape) for collective in group.left] == [(2,)]
    assert ledger.total == Traffic(8, 8, 1)


@pytest.mark.parametrize("error", [RuntimeError("gone"), dist.DistNetworkError("gone")])
def test_a_collective_that_failed_says_which_it_was(error: Exception) -> None:
    group = Timed()
    group.error = error
    with pytest.raises(CommunicationError, match=r"^AllGather of 24 bytes among 2 ranks failed: gone$"):
        complete(once(AllGather, torch.ones(3, dtype=torch.float64)), group, Ledger())
    group.error = NotImplementedError("a mistake of ours")
    with pytest.raises(NotImplementedError):
        complete(once(AllGather, torch.ones(3)), group, Ledger())
