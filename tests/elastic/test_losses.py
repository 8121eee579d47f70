"""Workers that die, stop, leave and come back: the others go on, alike to the bit."""

import random
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from laconic.report import meter_records
from tests.elastic.crew import Crew, Lighthouse, assert_alike, at_version, crew, syncs
from tests.elastic.training import HEARTBEAT_SECONDS, loss_of, model

FOUR = ["a", "b", "c", "d"]
PERIOD = 8
DILOCO = f"diloco(period={PERIOD})"
INT8 = f"diloco(period={PERIOD}, reducer=ErrorFeedback(Quantized(8)))"


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    made = Lighthouse()
    yield made
    made.kill()


def version(workers: Crew) -> int:
    return int(max((record["version"] for record in syncs(workers.records())), default=0))


def grown(workers: Crew, by: int, *names: str) -> None:
    """Wait until these have made so many syncs more."""
    for name in names:
        wanted = version(workers) + by
        workers.until(lambda found: any(r["version"] >= wanted for r in syncs(found) if r["name"] == name))  # noqa: B023


def nobody_waited_long(workers: Crew, names: list[str], seconds: float) -> None:
    for name in names:
        own = [record["time"] for record in syncs(workers.records()) if record["name"] == name]
        assert max((later - before for before, later in pairwise(own)), default=0) < seconds, name


def kills(workers: Crew, seed: int, times: int, pause_seconds: float) -> None:
    """One of four is killed at random moments: in compute, in a sync, or while another one heals; each comes back."""
    chance = random.Random(seed)
    workers.start(*FOUR)
    workers.until(lambda found: any(record["workers"] == FOUR for record in syncs(found)))
    for _ in range(times):
        victim = chance.choice(FOUR)
        others = [name for name in FOUR if name != victim]
        time.sleep(chance.uniform(0, pause_seconds))
        workers.kill(victim)
        if chance.random() < 0.5:  # it is back before anybody has missed it
            workers.start(victim)
        else:
            grown(workers, 2, *others)
            workers.start(victim)
        if chance.random() < 0.5:
            grown(workers, 2, *FOUR)
        # else the next one dies while this one joins
    grown(workers, 2, *FOUR)


def end_alike(workers: Crew, names: list[str]) -> dict[str, float]:
    """All come to the end at the same bits, and were alike after every sync before."""
    ends = workers.finish(*names, seconds=300)
    assert len({end["digest"] for end in ends.values() if end["name"] in names}) == 1
    assert assert_alike(workers.records()) > 10
    return {name: end["loss"] for name, end in ends.items()}


def killed(folder: Path, address: str, seed: int, times: int, pause_seconds: float, **options: Any) -> float:
    """Nobody hangs, nobody differs after a sync; the loss at the end."""
    with crew(folder, INT8, lighthouse=address, **options) as workers:
        kills(workers, seed, times, pause_seconds)
        losses = end_alike(workers, FOUR)
        limit = workers.job.timeout_seconds + 2 * HEARTBEAT_SECONDS + 6
        nobody_waited_long(workers, FOUR, limit + 10)  # and 10 s for a process to start
    return losses["a"]


def test_workers_that_are_killed_come_back(tmp_path: Path, lighthouse: Lighthouse) -> None:
    assert killed(tmp_path, lighthouse.start(), 0, 3, 0.2, steps=1600, step_seconds=0.005) < loss_of(model()) / 10


LAB: dict[str, Any] = {"steps": 1200, "task": "bytes-gpt:500k", "step_seconds": 0.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss at the end of a run in which nobody dies."""
    light = Lighthouse()
    try:
        with crew(tmp_path_factory.mktemp("calm"), INT8, lighthouse=light.start(min_replicas=4), **LAB) as workers:
            workers.start(*FOUR)
            return end_alike(workers, FOUR)["a"]
    finally:
        light.kill()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_kills_cost_the_labs_task_no_loss(seed: int, tmp_path: Path, lighthouse: Lighthouse, undisturbed: float) -> None:
    """After as many steps, within 2 % of a run in which nobody died; the workers that died were away for some of these."""
    loss = killed(tmp_path, lighthouse.start(), seed, 5, 20.0, **LAB)
    print(f"{loss:.4f} with kills, {undisturbed:.4f} without")
    assert loss < 1.02 * undisturbed


@pytest.mark.soak
def test_workers_that_die_while_a_state_is_sent(tmp_path: Path, lighthouse: Lighthouse) -> None:
    """First who sends it, then who gets it: the one is healed by another worker, and the others go on."""
    with crew(tmp_path, INT8, 10_000, lighthouse.start(min_replicas=2)) as workers:  # b is there from the start
        workers.start("a", die_at=("send", 4))  # in the midst of the tensors
        workers.start("b")
        workers.until(lambda found: any(record["workers"] == ["a", "b"] for record in syncs(found)))
        workers.start("c")
        workers.await_death("a")
        workers.until(lambda found: any(record["workers"] == ["b", "c"] for record in syncs(found)))
        workers.start("d", die_at=("get", 4))
        workers.await_death("d")
        grown(workers, 3, "b", "c")
        assert assert_alike(workers.records()) > 3


@pytest.mark.soak
def test_a_worker_dies_at_every_collective_of_a_sync(tmp_path: Path, lighthouse: Lighthouse) -> None:
    """The others have dropped the sync, or all have made it: half of it is never written."""
    with crew(tmp_path, INT8, 100_000, lighthouse.start()) as workers:
        workers.start("a", "b")
        workers.until(at_version(3))
        for number in range(12, 24):  # more than one sync has
            workers.start("c", die_at=("launch", number))
            workers.await_death("c")
            grown(workers, 2, "a", "b")
        assert assert_alike(workers.records()) > 20


@pytest.mark.parametrize("number", [44, *[pytest.param(number, marks=pytest.mark.soak) for number in (42, 43, 45, 46, 47)]])
def test_nobody_waits_for_the_timeout_when_one_dies(number: int, tmp_path: Path, lighthouse: Lighthouse) -> None:
    """Whichever collective it leaves unfinished: those who are not connected to it there learn of it by those who are."""
    strategy = "streaming_diloco(8, fragments=2, delay=1)"
    with crew(tmp_path, strategy, 10_000, lighthouse.start(), timeout_seconds=50, quorum_seconds=60, collect=False) as workers:
        workers.start("a", die_at=("launch", number))
        workers.start("b", "c", "d")
        workers.await_death("a")
        died = time.monotonic()
        workers.until(lambda found: any(record["workers"] == ["b", "c", "d"] for record in syncs(found)))
        grown(workers, 2, "b", "c", "d")
        assert time.monotonic() - died < 25, "that is half the timeout, and ten times what they need"


@pytest.mark.soak
def test_all_but_one_die_and_a_stopped_one_wakes_up(tmp_path: Path, lighthouse: Lighthouse) -> None:
    with crew(tmp_path, INT8, 10_000, lighthouse.start(deadline_seconds=2)) as workers:
        workers.start(*FOUR)
        workers.until(at_version(4))
        workers.signal("d", signal.SIGSTOP)
        grown(workers, 2, "a", "b", "c")
        workers.signal("d", signal.SIGCONT)
        grown(workers, 3, *FOUR)
        workers.kill("a")  # two at once
        workers.kill("b")
        grown(workers, 2, "c", "d")
        workers.kill("c")
        grown(workers, 2, "d")
        assert assert_alike(workers.records()) > 5


@pytest.mark.soak
def test_the_lighthouse_dies_and_comes_back(tmp_path: Path, lighthouse: Lighthouse) -> None:
    with crew(tmp_path, DILOCO, 10_000, lighthouse.start(), quorum_seconds=5) as workers:
        workers.start("a", "b")
        workers.until(at_version(4))
        lighthouse.kill()
        time.sleep(1)
        lighthouse.start()
        grown(workers, 3, "a", "b")
        assert assert_alike(workers.records()) > 3


def test_a_worker_with_another_model_or_strategy_is_refused(tmp_path: Path, lighthouse: Lighthouse) -> None:
    with crew(tmp_path, DILOCO, 10_000, lighthouse.start()) as workers:
        workers.start("a", "b")
        workers.until(at_version(4))
        workers.start("wide", width=7)
        records = workers.until(lambda found: any("error" in record for record in found))
        error = next(record["error"] for record in records if "error" in record)
        assert "MembershipError: this worker trains something else than the others" in error
        assert "parameter 0.weight of shape (7, 16)" in error
        assert "(32, 16)" in error
        workers.start("other", strategy="diloco(period=9)")
        records = workers.until(lambda found: sum("error" in record for record in found) == 2)
        assert "diloco(period=9)" in next(r["error"] for r in records if "error" in r and r["name"] == "other")
        grown(workers, 3, "a", "b")
        assert assert_alike(workers.records()) > 3


@pytest.mark.soak
def test_a_worker_leaves_at_sigterm_and_hands_over_its_residual(tmp_path: Path, lighthouse: Lighthouse) -> None:
    with crew(tmp_path, INT8, 450, lighthouse.start()) as workers:
        workers.start("a", "b", "c")
        for name in ("a", "b", "c"):
            workers.until(lambda found: any(r["name"] == name and len(r["workers"]) == 3 for r in syncs(found)))  # noqa: B023
        workers.signal("c", signal.SIGTERM)
        grown(workers, 3, "a", "b")
        ends = workers.finish("a", "b")
        for name in ("a", "b"):
            assert ends[name]["stats"]["left"] == 1
            assert ends[name]["stats"]["lost"] == 0
            assert ends[name]["stats"]["lost_residual_norm"] == 0
        assert assert_alike(workers.records()) > 5


@pytest.mark.soak
def test_workers_count_by_the_steps_that_they_bring_along(tmp_path: Path, lighthouse: Lighthouse) -> None:
    """A slow one misses syncs, and takes part again with what it has done."""
    with crew(tmp_path, DILOCO, 10_000, lighthouse.start(deadline_seconds=0.3), step_seconds=0.02) as workers:
        workers.start("a", "b", "c")
        workers.until(at_version(3))
        (tmp_path / "c.slow").write_text("0.15")
        records = workers.until(lambda found: any(len(set(record.get("weights", []))) > 1 for record in syncs(found)))
        uneven = next(record for record in syncs(records) if len(set(record.get("weights", []))) > 1)
        assert sum(uneven["weights"]) == pytest.approx(len(uneven["weights"]))
        grown(workers, 3, "a", "b")
        assert assert_alike(workers.records()) > 3


@pytest.mark.soak
def test_the_world_grows_and_shrinks(tmp_path: Path, lighthouse: Lighthouse) -> None:
    """A worker that joins decodes by the factors that the others have warmed up, or it would differ from them."""
    strategy = f"diloco(period={PERIOD}, reducer=ErrorFeedback(AlternatingPowerSGD(2)))"
    with crew(tmp_path, strategy, 10_000, lighthouse.start(), record=True) as workers:
        workers.start("a", "b")
        workers.until(at_version(4))
        workers.start("c", "d")
        workers.until(lambda found: any(record["workers"] == FOUR for record in syncs(found)))
        grown(workers, 3, *FOUR)
        workers.signal("b", signal.SIGTERM)
        workers.until(lambda found: any(record["workers"] == ["a", "c", "d"] for record in syncs(found)))
        grown(workers, 3, "a", "c", "d")
        assert assert_alike(workers.records()) > 6
        losses = [record["loss"] for record in syncs(workers.records()) if record["name"] == "a" and "loss" in record]
        assert losses[-1] < losses[0]
        (first, *_) = (record for record in meter_records.read(tmp_path / "records") if record.name == "a")
        committed = [row for row in first.workers if row["dropped"] is None]
        assert [name for row in committed for name in row["left"]] == ["b"]
        assert {name for row in committed for name in row["joined"]} >= {"c", "d"}
        assert sum(row["wire_bytes"] for row in first.steps) > 0
        assert first.syncs
        assert first.layers


@pytest.mark.soak
@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_of_two_ranks_dies_and_comes_back(first: int, tmp_path: Path, lighthouse: Lighthouse) -> None:
    """Whichever of its ranks dies first; both are started again, as by torchrun."""
    with crew(tmp_path, INT8, 10_000, lighthouse.start(), ranks=2) as workers:
        workers.start("a", "b")
        workers.until(lambda found: any(record["workers"] == ["a", "b"] for record in syncs(found)))
        workers.kill("b", first=first)
        grown(workers, 2, "a")
        workers.start("b")
        workers.until(
            lambda found: any(r["workers"] == ["a", "b"] and r["version"] > version(workers) - 3 for r in syncs(found))
        )
        grown(workers, 3, "a", "b")
        assert assert_alike(workers.records()) > 5
