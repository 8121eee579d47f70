"""The gate over benchmarks: what counts as worse, and what it is compared with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import check, first_step, harness, quiet, sharded_memory, sharded_rates
from benchmarks.harness import Ratio, Timing, ratio, report
from tests.live import ranks


def test_a_ratio_is_of_what_ran_at_the_same_time() -> None:
    slow_moment = 10.0
    ours, theirs = Timing([1.0, 1.1 * slow_moment, 1.0, 1.0]), Timing([2.0, 2.2 * slow_moment, 2.0, 2.0])
    found = ratio("half", ours, theirs)
    assert found.value == pytest.approx(0.5)
    assert found.noise == pytest.approx(0, abs=1e-9)


def test_worse_is_more_than_the_noise_allows() -> None:
    committed = {"quiet": [1.0, 0.01], "loud": [1.0, 0.1], "gone": [1.0, 0.0], "fine": [1.0, 0.0]}
    now = {"quiet": [1.1, 0.01], "loud": [1.1, 0.1], "fine": [0.5, 0.0], "new": [3.0, 0.0]}
    verdicts = {row["ratio"]: row["verdict"] for row in check.compare(committed, now)}
    assert verdicts == {"quiet": "worse", "loud": "same", "gone": "gone", "fine": "better"}


def test_the_gate_runs_the_benchmark_again_and_leaves_the_committed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    (tmp_path / "growth.json").write_text(json.dumps({"ratios": {"bytes": [1.0, 0.0]}}))
    before = (tmp_path / "growth.json").read_text()
    from benchmarks import growth

    for value, code in ((1.0, 0), (1.2, 1)):
        monkeypatch.setattr(growth, "main", lambda value=value: report("growth", "", [{"a": 1}], "", [Ratio("bytes", value)]))
        assert check.main(["growth"]) == code
    assert "1 of the ratios got worse" in capsys.readouterr().out
    assert (tmp_path / "growth.json").read_text() == before


def test_a_benchmark_with_several_tables_is_compared_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    from benchmarks import rates

    def again(slow: float = 1.0) -> None:
        report("rates-1gbit", "", [{"a": 1}], "", [Ratio("time", 1.0)])
        report("rates-10mbit", "", [{"a": 1}], "", [Ratio("time", slow)])

    again()
    monkeypatch.setattr(rates, "main", again)
    assert check.main(["rates"]) == 0
    monkeypatch.setattr(rates, "main", lambda: again(1.5))
    assert check.main(["rates"]) == 1
    assert "rates-10mbit.json: against what is committed" in capsys.readouterr().out


def test_a_benchmark_without_committed_ratios_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="growth has no committed ratios"):
        check.main(["growth"])


def test_live_storages_are_counted_until_they_are_freed_or_emptied() -> None:
    with sharded_memory.LiveStorages() as live:
        kept, emptied = torch.ones(1000), torch.ones(500)
        before = live.total()
        live.largest = 0
        view = (kept + 1).view(10, 100)[2:]
        assert (live.total() - before, live.largest) == (4000, 4000)
        del view
        emptied.untyped_storage().resize_(0)
        assert live.total() == before - 2000
    assert live.peak == before + 4000


@pytest.mark.soak
def test_averaging_on_islands_takes_memory_of_the_size_of_shards() -> None:
    size, steps = sharded_memory.Size(32, 1, 32768), sharded_memory.PERIOD
    plain, ours = (
        ranks(4, sharded_memory.storages, "islands", strategy, size, steps)[0] for strategy in (None, sharded_memory.STRATEGY)
    )
    whole = 2 * ours["largest held"]  # the embedding
    assert 0 < ours["peak"] - plain["peak"] < 2.5 * ours["held"]  # an anchor, and for the second sync an outer momentum
    assert plain["in a sync"] == 0
    assert 0 < ours["in a sync"] <= ours["held"] < whole


def test_a_share_on_islands_is_of_the_steps_beside_it() -> None:
    both: dict[str, list[Any]] = {"seconds": [0.4, 0.8, 0.4], "beside": [0.2, 0.4, 0.2], "sent": [2000, 2000, 2000]}
    found = {sharded_rates.NATIVE: {**both, "counted": [None] * 3}, "laconic ddp()": {**both, "counted": [1900] * 3}}
    rows, watched = sharded_rates.tables(found)
    assert [row["share of the silent rate"] for row in rows] == ["0.500", "0.500"]
    assert [(row["kB"], row["kB counted"]) for row in rows] == [("2.0", ""), ("2.0", "1.9")]
    assert [(one.name, one.value) for one in watched] == [("laconic ddp(), time over the silent run's", 2.0)]


QUIET, LOUD = quiet.Reading(0.01, 0.03), quiet.Reading(0.5, 0.03)


def test_two_runs_of_what_has_noise_may_differ_by_more_than_the_repeats_of_one() -> None:
    committed = {"time": [1.0, 0.01], "bytes": [1.0, 0.0]}
    now = {"time": [1.07, 0.01], "bytes": [1.07, 0.0]}
    assert [row["verdict"] for row in check.compare(committed, now)] == ["worse", "worse"]
    assert [row["verdict"] for row in check.compare(committed, now, 0.02)] == ["same", "worse"]


@pytest.mark.parametrize(
    ("busy", "found", "said"),
    [
        (0.01, {"cpu": "a", "cores": 2, "torch": "2.13"}, ""),
        (0.2, {"cpu": "a", "cores": 2, "torch": "2.13"}, "others take 20%"),
        (0.01, {"cpu": "a", "cores": 4, "torch": "2.13"}, "from cores 4, and here is 2"),
        (0.01, {}, "from cpu None"),
    ],
)
def test_a_machine_that_is_busy_or_another_one_is_not_quiet(busy: float, found: dict[str, object], said: str) -> None:
    reasons = quiet.reasons(quiet.Reading(busy, 0.03), {"cpu": "a", "cores": 2, "torch": "2.13"}, found)
    assert said in "; ".join(reasons)
    assert bool(reasons) == bool(said)


def test_a_computation_that_is_slow_once_in_five_is_not_steady() -> None:
    steady, unsteady = [1.0, 1.01] * 10, [1.0, 1.0, 1.0, 1.0, 1.6] * 4
    assert quiet.spread(steady) < quiet.MOST_SPREAD < quiet.spread(unsteady)


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    found = {"machine": harness.machine(), "ratios": {"time": [1.0, 0.01], "only in full": [1.0, 0.0]}}
    (tmp_path / "hook_cost.json").write_text(json.dumps(found))


def measures(*values: float) -> Callable[[str], dict[str, list[float]]]:
    """What is found, time after time."""
    left: Iterator[float] = iter(values)
    return lambda name: {"time": [next(left), 0.01]}


def looks(*readings: quiet.Reading) -> Callable[[], quiet.Reading]:
    left = iter(readings)
    return lambda: next(left)


@pytest.mark.parametrize(
    ("values", "readings", "only_if_quiet", "code", "said"),
    [
        ([1.02], [QUIET, QUIET], True, 0, "nothing got worse"),
        ([1.5, 1.02], [QUIET, QUIET], True, 0, "nothing got worse"),  # once
        ([1.5, 1.4], [QUIET, QUIET], True, 1, "hook_cost: time is 1.5 and 1.4\nCONFIRMED"),
        ([1.5, 1.4], [QUIET, LOUD], True, 0, "NOT CONFIRMED, and so no failure: others take 50%"),
        ([], [LOUD], True, 0, "SPEED NOT CHECKED: others take 50%"),
        ([1.5, 1.4], [LOUD], False, 0, "NOT CONFIRMED"),
    ],
)
def test_the_gate_fails_for_what_is_worse_twice_on_a_quiet_machine(
    committed: None,
    capsys: pytest.CaptureFixture[str],
    values: list[float],
    readings: list[quiet.Reading],
    only_if_quiet: bool,
    code: int,
    said: str,
) -> None:
    found = check.gate(["hook_cost"], only_if_quiet=only_if_quiet, measure=measures(*values), look=looks(*readings))
    assert (found, said in capsys.readouterr().out) == (code, True)


def test_a_benchmark_that_dies_is_no_verdict_on_ci(committed: None, capsys: pytest.CaptureFixture[str]) -> None:
    def dies(name: str) -> dict[str, list[float]]:
        raise AssertionError("the process died")

    assert check.gate(["hook_cost"], only_if_quiet=True, measure=dies, look=looks(QUIET, QUIET)) == 0
    assert "hook_cost could not be measured: the process died" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        check.gate(["hook_cost"], only_if_quiet=False, measure=dies, look=looks(QUIET))


def test_first_steps_are_beside_ddps_of_the_same_round() -> None:
    cold, warm = "int8()" + first_step.COLD, "int8()" + first_step.WARM
    assert [name for name in first_step.labels() if name.startswith("int8")] == [cold, warm]
    ddp = [{"attach": 0.0, "first": 0.1, "later": 0.1}, {"attach": 0.0, "first": 0.3, "later": 0.3}] * 2
    slower = [{what: 1.5 * seconds for what, seconds in run.items()} for run in ddp]
    rows, watched = first_step.tables({first_step.DDP: ddp, cold: slower, warm: ddp})
    assert [row["over DDP's"] for row in rows] == ["1.00 ± 0.00", "1.50 ± 0.00", "1.00 ± 0.00"]
    assert rows[1]["over steps with compiled kernels"] == "1.50 ± 0.00"
    assert {one.name.partition(": ")[0] for one in watched} == {cold, warm}
