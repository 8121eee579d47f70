"""A comparison in numbers and words: made-up records in, sentences out."""

import io

import pytest
from rich.console import Console

from laconic.report.charts import figures
from laconic.report.summary import rows
from laconic.report.terminal import cells, columns, loss, reached, show
from laconic.report.words import verdict
from tests.lab.made import result


def test_the_verdict_takes_the_fastest_that_is_good_enough() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.01, 50, 500), ("b()", 1.5, 10, 10), ("silent()", 2.0, 40, 0))
    words = verdict(results)
    assert "Take a()" in words
    assert "+1.0%" in words
    assert "0.5 of its bytes" in words
    assert "2 times its speed, 80% of the rate" in words
    assert "digits, 2 workers, link 100mbit, 1 seed, 2 cores" in words


def test_the_verdict_says_when_none_is() -> None:
    assert "No strategy came within 2%" in verdict(result(("ddp()", 1.0, 100, 1000), ("b()", 1.5, 10, 10)))
    assert "nothing to compare" in verdict(result(("ddp()", 1.0, 100, 1000)))


def test_seconds_to_the_loss_of_ddp() -> None:
    table = {row.strategy: row for row in rows(result(("ddp()", 1.0, 100, 1000), ("a()", 0.5, 50, 500), ("b()", 2.0, 10, 10)))}
    assert table["a()"].to_base_loss == pytest.approx(0.5 + 0.5 * 1.999 / 2.5)
    assert table["b()"].to_base_loss is None


def test_a_run_that_diverged_is_named_and_never_taken() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", None, 10, 10), ("b()", 1.0, 50, 500), ("silent()", 2.0, 40, 0))
    assert "Take b()" in verdict(results)
    assert [loss(row) for row in rows(results)] == ["1.0000", "diverged", "1.0000", "2.0000"]
    words = verdict(result(("ddp()", 1.0, 100, 1000), ("a()", None, 10, 10)))
    assert "No strategy came within 2%" in words
    assert "all of them diverged" in words
    near = verdict(result(("ddp()", 1.0, 100, 1000), ("a()", None, 10, 10), ("b()", 1.5, 10, 10)))
    assert "the nearest is b() with 1.5" in near
    itself = verdict(result(("ddp()", None, 100, 1000), ("a()", None, 10, 10), ("b()", 1.5, 10, 10)))
    assert "ddp() itself diverged: there is no loss to compare with. Not so: b()." in itself
    nothing = result(("ddp()", None, 100, 1000), ("a()", 1.0, 10, 10))
    assert [reached(row) for row in rows(nothing)] == ["-", "-"], "there is nothing to reach"


def test_of_several_seeds_one_that_diverged_is_enough() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 10, 10), ("a()", None, 10, 10))
    results.runs[2].seed = 1
    assert [loss(row) for row in rows(results)] == ["1.0000", "diverged (1 of 2)"]
    assert "all of them diverged" in verdict(results)


@pytest.mark.parametrize("base", [0.0, -5.0])
def test_a_loss_of_ddp_that_is_not_above_zero(base: float) -> None:
    results = result(("ddp()", base, 100, 1000), ("a()", base, 50, 500), ("b()", base + 1, 10, 10), ("silent()", 9.0, 9, 0))
    assert f"Take a(): a loss of {base:.4f} against ddp()'s" in verdict(results)
    assert [cells(row, results)[2] for row in rows(results)] == ["-"] * 4
    assert [reached(row) for row in rows(results)] == ["1.0 s", "1.0 s", "never", "never"]


def test_each_seed_is_measured_against_ddp_with_the_same_seed() -> None:
    runs = [("ddp()", 1.0), ("a()", 1.0), ("b()", 1.5), ("ddp()", 2.0), ("a()", 2.0), ("b()", 1.5)]
    results = result(*((name, loss_, 100.0, 10.0) for name, loss_ in runs))
    for place, run in enumerate(results.runs):
        run.seed = place // 3
    assert [reached(row) for row in rows(results)] == ["1.0 s", "1.0 s", "0.8 s (1 of 2)"]


def test_what_is_slower_than_ddp_is_not_recommended() -> None:
    words = verdict(result(("ddp()", 1.0, 65, 1000), ("int8()", 1.0, 100, 250), ("silent()", 2.0, 40, 0)))
    assert "Stay with ddp()" in words
    assert "The fastest of them is int8(): a loss +0.0% against ddp()'s, at 0.25 of its bytes and 0.65 times its speed" in words
    assert "Take" not in words


def test_faster_by_less_than_the_noise_is_not_faster() -> None:
    def noisy(ms: float) -> str:
        results = result(*[(name, 1.0, time, 10.0) for name in ("ddp()", "a()") for time in (90.0, 100.0, 110.0)])
        for place, run in enumerate(results.runs):
            run.seed = place % 3
            run.step_ms *= ms / 100 if run.strategy == "a()" else 1
        return verdict(results)

    assert "is faster by more than the noise, 16%" in noisy(90)
    assert "Take a()" in noisy(80)
    assert "Stay with ddp()" in verdict(result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 99, 500)))


def test_a_run_in_which_talking_made_no_difference_says_so() -> None:
    words = verdict(result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 50, 500), ("silent()", 1.01, 40, 0)))
    assert "The losses tell nothing apart: silent()" in words
    assert "By speed alone: Take a()" in words


def test_where_the_link_could_not_be_had_the_predicted_step_decides() -> None:
    results = result(("ddp()", 1.0, 10, 1000), ("a()", 1.0, 12, 500), ("b()", 1.0, 9, 900), ("silent()", 2.0, 8, 0))
    results.link_note = "no namespaces"
    for run, ms in zip(results.runs, (100.0, 40.0, 91.0, 8.0), strict=True):
        run.predicted_step_ms = ms
    words = verdict(results)
    assert "Take a()" in words
    assert "2.5 times its speed, 20% of the rate" in words
    assert "Speeds are PREDICTED for that link" in words
    ddp, a, *_ = rows(results)
    assert (ddp.speed, a.speed, a.share) == (1.0, 2.5, 0.2)
    assert (ddp.to_base_loss, a.to_base_loss) == pytest.approx((10.0, 40 / 12), rel=0.001)
    charts = figures(results)
    assert charts["Loss against seconds"]["data"][0]["x"] == [5.0, 10.0, None]
    assert "PREDICTED" in charts["Loss against seconds"]["layout"]["xaxis"]["title"]["text"]
    assert "of the last 2 steps, without a limit" in charts["Where the time goes"]["layout"]["xaxis"]["title"]["text"]


@pytest.mark.parametrize(("width", "tables"), [(150, 1), (80, 2), (50, 6)])
def test_no_number_is_cut_or_folded_in_a_narrow_terminal(width: int, tables: int) -> None:
    long = "streaming_diloco(period=16, delay=2, blend=0.0, warmup=10)"
    results = result(("ddp()", 1.2345, 1234.5, 12.3e6), (long, None, 56.7, 4.56e3), ("silent()", 9.8765, 43.2, 0))
    results.link_note = "no namespaces"
    for run in results.runs:
        run.predicted_step_ms = 8765.4
        run.wire_bytes_per_step["kernel"] = 987e3
    text = io.StringIO()
    show(results, Console(file=text, width=width, legacy_windows=False))
    drawn = [line for line in text.getvalue().splitlines() if line[:1] in "┃│"]
    assert max(map(len, drawn)) <= width
    words = [cell.strip() for line in drawn for cell in line.strip("┃│").replace("┃", "│").split("│")]
    assert set(columns(results)) <= set(words)
    assert {cell for row in rows(results) for cell in cells(row, results)[1:]} <= set(words)
    assert words.count("strategy") == tables
