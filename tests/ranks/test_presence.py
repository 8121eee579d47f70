"""Who has left, and why: two ranks that share a store in one process."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from laconic.ranks.agreement import differences
from laconic.ranks.presence import Presence, UnevenError

MEMBERS = ["rank 3", "rank 5"]  # what a person calls them


@pytest.fixture
def calls() -> list[Presence]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    return [Presence(store, "run", rank, MEMBERS) for rank in range(2)]


def test_a_peer_that_has_left_is_missed_by_those_who_wait(calls: list[Presence]) -> None:
    first, second = calls
    first.check_peers()
    first.report("is in step 1")
    first.check_peers()  # it is not its own peer
    second.step = 4
    second.report("left after 4 steps")
    first.step = 6
    first.check_peers_in_background()  # what is outstanding can still be completed
    wanted = (
        r"^the ranks are not in step: rank 3 is in step 7, rank 5 left after 4 steps; "
        r"give every rank as many batches, or attach with uneven='stop'$"
    )
    with pytest.raises(UnevenError, match=wanted):
        first.check_peers()


def test_a_peer_that_has_failed_is_missed_by_all(calls: list[Presence]) -> None:
    first, second = calls
    first.report("failed in step 2 with ValueError: no")
    first.check_peers_in_background()
    with pytest.raises(UnevenError, match=r"^the ranks are not in step: rank 3 failed in step 2 with ValueError: no$"):
        second.check_peers_in_background()
    with pytest.raises(UnevenError, match=r"rank 3 failed in step 2 with ValueError: no, rank 5 is in step 1$"):
        second.check_peers()


def leave(calls: list[Presence], steps: tuple[int, int], drifted: tuple[bool, bool], may_differ: bool) -> list[bool]:
    for call, step in zip(calls, steps, strict=True):
        call.step = step
    with ThreadPoolExecutor(2) as pool:
        leaving = [
            pool.submit(call.leave, drifted=one, may_differ=may_differ) for call, one in zip(calls, drifted, strict=True)
        ]
        return [one.result() for one in leaving]


@pytest.mark.parametrize("drifted", [(False, False), (False, True), (True, False)])
def test_ranks_that_leave_together_know_whether_any_has_drifted(calls: list[Presence], drifted: tuple[bool, bool]) -> None:
    assert leave(calls, (4, 4), drifted, False) == [any(drifted)] * 2
    for call in calls:
        call.check_peers()  # the last average takes long: those who have left are still there
    assert calls[0].restored() == [False, False]
    calls[1].mark_restored()
    assert calls[0].restored() == [False, True]


def test_ranks_that_leave_after_different_steps(calls: list[Presence]) -> None:
    assert leave(calls, (4, 6), (False, False), True) == [False, False]
    with pytest.raises(UnevenError, match=r"rank 3 left after 4 steps, rank 5 left after 6 steps; give every rank as many"):
        leave(calls, (4, 6), (False, False), False)


def test_nobody_waits_for_ever_for_one_that_does_not_leave() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    call = Presence(store, "run", 0, MEMBERS)
    with pytest.raises(UnevenError, match=r"^the ranks are not in step: rank 3 left after 0 steps; waited 0 s for the others$"):
        call.leave(drifted=False, may_differ=True)
    with pytest.raises(UnevenError, match=r"^after step 0 rank 3 loaded an optimizer's state, rank 5 did not"):
        Presence(store, "another", 0, MEMBERS).await_loads()


def test_loads_are_made_together_each_time(calls: list[Presence]) -> None:
    first, second = calls
    first.step = second.step = 2
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(call.await_loads) for call in calls]:
                one.result()
    second.check_peers()  # those are over
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(first.await_loads)
        sentence = r"^after step 2 rank 3 loaded an optimizer's state, rank 5 did not: load it on all ranks, or on none$"
        while not second._loaders():
            pass
        with pytest.raises(UnevenError, match=sentence):
            second.check_peers()
        with pytest.raises(UnevenError, match=sentence):
            alone.result()


def test_the_first_fact_that_differs_is_named_for_each_rank() -> None:
    reports = ["a\nb\nc", "a\nb\nc", "a\nx\ny", "a\nb", "a\nb\nc\nd"]
    assert differences(reports, [f"rank {rank}" for rank in range(10, 15)]) == [
        "rank 12 has x, rank 10 has b",
        "rank 13 has nothing, rank 10 has c",
        "rank 14 has d, rank 10 has nothing",
    ]
