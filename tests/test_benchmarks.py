"""The gate over benchmarks: what counts as worse, and what it is compared with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import check, harness, sharded_memory, sharded_rates
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
