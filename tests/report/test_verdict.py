"""A comparison in numbers and words: made-up records in, sentences out."""

import io
import time

import pytest
from rich.console import Console
from rich.progress_bar import ProgressBar

from laconic.report import comparison_records as records
from laconic.report.charts import figures
from laconic.report.live_comparison import Board
from laconic.report.summary import rows
from laconic.report.terminal import cells, columns, human, legend, limit, loss, reached, show
from laconic.report.verdict import ground, verdict
from tests.report.made import result


def test_the_verdict_takes_the_fastest_that_is_good_enough() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.01, 50, 500), ("b()", 1.5, 10, 10), ("silent()", 2.0, 40, 0))
    words = verdict(results)
    assert "Take a()" in words
    assert "+1.0%" in words
    assert "0.5 of its bytes" in words
    assert "2 times its speed, 80% of the rate" in words
    assert "digits, 2 workers, link 100mbit, 1 seed, 2 cores" in words


def test_of_several_that_are_good_enough_the_fastest_is_taken_and_of_none_the_nearest_is_named() -> None:
    slow_first = result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 50, 500), ("b()", 1.019, 40, 500), ("c()", 1.021, 1, 1))
    assert "Take b()" in verdict(slow_first)
    far = result(("ddp()", 1.0, 100, 1000), ("a()", 1.7, 50, 500), ("b()", 1.5, 40, 500), ("c()", 1.6, 1, 1))
    assert "the nearest is b() with 1.5000" in verdict(far)


def test_each_cell_stands_under_its_head() -> None:
    """In the order of the table: ddp first, the limit last, whatever the order of the runs."""
    results = result(("silent()", 2.0, 25, 0), ("b()", 1.1, 50, 2.5e9), ("a()", 1.0, 40, 999.4), ("ddp()", 1.0, 100, 1e6))
    for run in results.runs:
        run.wire_bytes_per_step |= {"predicted": 1200.0, "kernel": 1999.0}
        run.expected_step_ms = run.step_ms + 10
    assert [row.strategy for row in rows(results)] == ["ddp()", "b()", "a()", "silent()"]
    _, b, *_ = rows(results)
    assert dict(zip(columns(results), cells(b, results), strict=True)) == {
        "strategy": "b()", "val loss": "1.1000", "vs ddp": "1.100", "spread": "-", "bytes/step": "2.5 GB",
        "predicted": "1.2 kB", "kernel": "2 kB", "step": "50.0 ms", "model": "60.0 ms", "speed": "2.00x", "limit": "50%",
        "to ddp loss": "never",
    }  # fmt: skip
    assert [human(count) for count in (999.4, 1000, 2.5e6)] == ["999 B", "1 kB", "2.5 MB"]
    assert "PREDICTED" not in legend(results)
    results.link_note = "no namespaces"
    assert "PREDICTED" in legend(results)


def test_what_a_comparison_rests_on() -> None:
    one = result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 50, 500), ("silent()", 2.0, 40, 0))
    assert "Noise: not known; one seed, so nothing is known over seeds." in ground(one)
    # 100 and 200 ms a step from look to look, then 100 and 110; what another strategy does is no noise of the machine.
    for run, last in zip(one.runs, (2.5, 9.0, 1.6), strict=True):
        run.curve = [[5, 0.5, 1, 3.0], [10, 1.0, 2, 2.0], [15, 1.5 if run.strategy == "ddp()" else 1.05, 2, 1.0]]
        run.curve += [[20, last, 2, 1.0]]
    one.runs[2].curve = [[5, 0.5, 1, 3.0], [10, 1.0, 2, 2.0], [15, 1.55, 2, 1.0]]
    words = ground(one)
    assert "Machine: 2 cores, some. Link: 100mbit. 1 seed: number 0." in words
    assert "the step time of ddp() and silent() varied by up to 43%; one seed" in words, "of 100, 100 and 200 ms"
    several = result(*[(name, 1.0, ms, 10.0) for name in ("ddp()", "a()") for ms in (90.0, 110.0)])
    for place, run in enumerate(several.runs):
        run.seed = place % 2
    several.runs[-1].step_ms = 270.0
    for run, wait in zip(several.runs, (10.0, 20.0, 30.0, None), strict=True):
        run.wait_ms = wait
    ddp, _ = rows(several)
    assert ddp.noise_ms == pytest.approx(10.0), "of two seeds"
    assert ddp.wait_ms == 15.0
    assert rows(several)[1].wait_ms is None
    several.runs[1].curve = [[5, 0.5, 1, 3.0], [10, 3.0, 2, 1.0]]
    assert rows(several)[0].to_base_loss == pytest.approx(2.0, rel=0.01), "the mean of 1 and 3 seconds"
    assert "2 seeds: number 0, 1." in ground(several)
    assert ground(several).endswith("Noise: over seeds by up to 50%.")


def test_with_one_seed_the_noise_is_that_from_look_to_look() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 90, 500), ("silent()", 2.0, 40, 0))
    results.runs[0].curve = [[0, 0.0, 0, 3.0], [5, 0.4, 1, 3.0], [10, 1.0, 2, 1.0]]  # 80 and 120 ms
    assert "is faster by more than the noise, 40%" in verdict(results)


def test_the_verdict_says_when_none_is() -> None:
    assert "No strategy came within 2%" in verdict(result(("ddp()", 1.0, 100, 1000), ("b()", 1.5, 10, 10)))
    nothing_sent = result(("ddp()", 1.0, 100, 0), ("a()", 1.0, 50, 0))
    assert "at all of its bytes" in verdict(nothing_sent)
    assert "nothing to compare" in verdict(result(("ddp()", 1.0, 100, 1000)))


def timed(*runs: tuple[str, float | None, float, float]) -> records.Results:
    """As `result`, of runs of a second each."""
    results = result(*runs)
    results.seconds, results.warm, results.command = 1.0, 300, "laconic compare digits --seconds 1"
    for run in results.runs:
        run.steps = round(1000 / run.step_ms)
        run.curve = [[run.steps / 2, 0.5, 1, 3.0], [run.steps, 1.0, 2, run.val_loss]]
    return results


def test_at_equal_time_the_lowest_loss_wins_and_its_price_is_said() -> None:
    results = timed(("ddp()", 2.0, 100, 1000), ("a()", 1.6, 50, 500), ("b()", 1.7, 40, 10), ("silent()", 1.9, 40, 0))
    words = verdict(results)
    assert "Take a(): after 1 s a loss -20.0% against ddp()'s, in 2 times as many steps" in words
    assert "0.5 of its bytes, 80% of the rate" in words
    assert "at equal steps, its loss is +50.0%" in words, "after 10 steps ddp() had 2, and a() 3"
    assert "300 warm steps, 2 workers" in words
    assert words.endswith("a hint, not a verdict. For three seeds:\nlaconic compare digits --seconds 1 --seeds 3 --resume")
    _, a, *_ = rows(results)
    shown = dict(zip(columns(results), cells(a, results), strict=True))
    assert (shown["steps"], shown["equal steps"]) == ("20", "1.500")
    assert "time" in ground(results)
    assert "same time" in legend(results)
    tie = verdict(timed(("ddp()", 2.0, 100, 1000), ("a()", 1.97, 50, 500), ("silent()", 3.0, 40, 0)))
    assert "Stay with ddp(): within 1 s none ends below its loss by more than 2%. The lowest is a()" in tie
    apart = verdict(timed(("ddp()", 2.0, 100, 1000), ("a()", 1.6, 50, 500), ("silent()", 1.605, 40, 0)))
    assert apart.startswith(
        "No recommendation: averaging gained nothing within 1 s. silent(), whose replicas never communicate, ended at 1.6050, "
        "and the best of the others, a(), at 1.6000. More steps tell more"
    )
    assert apart.endswith("Run it for longer, about 1 min:\nlaconic compare digits --seconds 4")
    assert "Take" not in apart
    held_up = verdict(timed(("ddp()", 2.0, 100, 1000), ("a()", 1.6, 50, 500), ("silent()", 1.5, 10, 0)))
    assert "All of these send too much for this link: the fastest has 20% of the rate of silent()" in held_up
    assert held_up.endswith('laconic compare digits --seconds 1 -s "streaming_diloco(32, fragments=4, delay=4)"')
    near_enough = verdict(timed(("ddp()", 2.0, 100, 1000), ("a()", 1.6, 50, 500), ("silent()", 1.5, 30, 0)))
    assert "the fastest has 60% of the rate" in near_enough
    assert "too much" not in verdict(timed(("ddp()", 2.0, 100, 1000), ("a()", 1.6, 50, 500), ("silent()", 1.5, 36, 0)))
    little = ("streaming_diloco(32)", 1.6, 50, 10)
    assert "--seconds 4" in verdict(timed(("ddp()", 2.0, 100, 1000), little, ("silent()", 1.5, 10, 0)))
    assert "ddp() itself diverged" in verdict(timed(("ddp()", None, 100, 1000), ("a()", 1.6, 50, 500)))
    assert "Stay with ddp(): all others diverged." in verdict(timed(("ddp()", 1.0, 100, 1000), ("a()", None, 50, 500)))
    worse = verdict(timed(("ddp()", 1.0, 100, 1000), ("a()", 1.5, 50, 500), ("silent()", 1.5, 40, 0)))
    assert "Stay with ddp()" in worse, "ddp() averages, and is lower than both"


def test_what_seeds_differ_by_is_no_difference() -> None:
    """ddp() itself differs by 10 % between seeds: so a loss 4 % above its mean is as good, and one 7 % above it is not."""
    results = result(("ddp()", 1.0, 100, 1000), ("ddp()", 1.15, 100, 1000), ("a()", 1.12, 50, 10), ("a()", 1.12, 50, 10))
    for place, run in enumerate(results.runs):
        run.seed = place % 2
    ddp, a = rows(results)
    assert ddp.loss_spread == pytest.approx(0.0987, rel=0.01)
    assert a.loss_spread == 0.0
    assert "Take a()" in verdict(results)
    assert "hint" not in verdict(results), "two seeds"
    results.runs[2].val_loss = results.runs[3].val_loss = 1.15
    assert "No strategy came within 5% of ddp()'s loss" in verdict(results), "not by more than 5 %, however noisy ddp() is"
    results.runs[1].val_loss = 1.0
    assert "No strategy came within 2%" in verdict(results)


def test_with_one_seed_the_last_looks_tell_how_noisy_a_loss_is() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.04, 50, 10))
    steps = range(4, 11)
    results.runs[0].curve = [[step, step / 10, 1, 2.0 - step / 10] for step in steps]
    assert rows(results)[0].loss_spread == pytest.approx(0.0, abs=1e-9), "a loss that falls is no noise"
    assert "No strategy came within 2%" in verdict(results)
    results.runs[0].curve = [[step, step / 10, 1, 2.0 - step / 10 + (0.1 if step % 2 else -0.1)] for step in steps]
    assert rows(results)[0].loss_spread == pytest.approx(0.126, rel=0.01)
    assert "Take a()" in verdict(results)


def zigzag(loss_: float, by: float) -> list[list[float | None]]:
    """The last looks of a curve that goes up and down."""
    return [[step, step / 10, 1, loss_ + (by if step % 2 else -by)] for step in range(4, 11)]


def test_a_wild_curve_excuses_no_loss_and_wins_nothing() -> None:
    """With one seed a strategy's own spread was its own excuse: +69 % of loss counted as good."""
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.69, 50, 10), ("b()", 1.0, 80, 10), ("silent()", 1.5, 40, 0))
    results.runs[1].curve, results.runs[3].curve = zigzag(1.69, 0.9), zigzag(1.5, 0.9)
    assert rows(results)[1].loss_spread > 0.5  # type: ignore[operator]
    assert verdict(results).startswith("Take b()")
    apart = result(("ddp()", 1.0, 100, 1000), ("a()", 1.69, 50, 10), ("silent()", 1.5, 40, 0))
    apart.runs[1].curve, apart.runs[2].curve = zigzag(1.69, 0.9), zigzag(1.5, 0.9)
    assert verdict(apart).startswith("No strategy came within 2% of ddp()'s loss of 1.0000; the nearest is a() with 1.69")
    apart.runs[0].curve = zigzag(1.0, 0.9)
    assert verdict(apart).startswith("No strategy came within 5%"), "nor is ddp()'s noise an excuse for so much"
    apart.runs[2].val_loss = 1.0
    words = verdict(apart)
    assert words.startswith(
        "No strategy came within 5% of ddp()'s loss of 1.0000; the nearest is a() with 1.6900. silent(), whose"
    )
    assert "never communicate, did: more steps tell more." in words
    assert "Take" not in words
    lower = timed(("ddp()", 1.0, 100, 1000), ("a()", 0.9, 50, 500), ("silent()", 3.0, 40, 0))
    assert "Take a()" in verdict(lower)
    lower.runs[1].curve = zigzag(0.9, 0.3)
    assert "Stay with ddp()" in verdict(lower), "a low loss may be luck where the curve is wild"


def test_nobody_is_faster_than_the_limit() -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 39, 10), ("silent()", 2.0, 40, 0))
    assert [limit(row) for row in rows(results)] == ["40%", "noise", "100%"]
    assert "as fast as a run that never communicates." in verdict(results)


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
    for run, name in zip(results.runs, ("a()", "ddp()", "ddp()"), strict=True):
        run.strategy = name
    assert "ddp() itself diverged with 1 of 2 seeds" in verdict(results)
    assert ", 2 seeds, 2 cores" in verdict(results)


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
    results = result(("ddp()", 1.0, 100, 1000), ("a()", 1.0, 50, 500), ("silent()", 1.01, 40, 0))
    words = verdict(results)
    assert words.startswith("No recommendation: the losses tell nothing apart. silent(), whose replicas never communicate")
    assert words.endswith(" Give --steps 40.")
    assert "By speed alone, a() is the fastest that came so near: a loss +0.0%" in words
    assert "Take" not in words
    for run in results.runs:
        run.seconds = 45.0
    results.command = "laconic compare digits --steps 10 --out here"
    assert verdict(results).endswith("Run it for longer, about 9 min:\nlaconic compare digits --steps 40 --out here")
    results.runs[0].steps, results.command = 250_001, "laconic compare digits --steps 250001"
    assert verdict(results).endswith("--steps 1000004")


def test_where_nothing_tells_losses_apart_the_fastest_may_be_ddp() -> None:
    words = verdict(result(("ddp()", 1.0, 40, 1000), ("a()", 1.0, 50, 500), ("silent()", 1.01, 30, 0)))
    assert "By speed alone, ddp() is the fastest; the next that came so near is a(): a loss +0.0%" in words


def test_seeds_tell_apart_what_one_run_does_not() -> None:
    """1.7 % between ddp() and silent() is nothing for one seed, and something where two differ by 0.1 %."""
    runs = [("ddp()", 1.0), ("ddp()", 1.001), ("a()", 1.0), ("a()", 1.0), ("b()", 1.018), ("b()", 1.018)]
    results = result(*((name, loss_, 50.0 if name == "a()" else 100.0, 10.0) for name, loss_ in runs))
    silent = result(("silent()", 1.017, 40.0, 0.0), ("silent()", 1.018, 40.0, 0.0))
    results.runs += silent.runs
    for place, run in enumerate(results.runs):
        run.seed = place % 2
    assert verdict(results).startswith("Take a()")
    for run in results.runs:
        run.step_ms = 10.0 if run.strategy == "b()" else run.step_ms
    assert verdict(results).startswith("Take a()"), "b() is faster, and no better than replicas that never communicate"
    results.runs[1].val_loss = 1.02
    assert verdict(results).startswith("No recommendation")


def test_runs_that_had_another_time_are_not_compared_by_it() -> None:
    results = timed(("ddp()", 2.0, 100, 1000), ("a()", 1.6, 50, 500), ("silent()", 3.0, 40, 0))
    results.runs[1].seconds = 1.15
    assert verdict(results).startswith("Take a()")
    results.runs[2].seconds = 2.5
    assert verdict(results).startswith("Take a()"), "on silent() nothing rests here"
    results.runs[1].seconds = 0.55
    words = verdict(results)
    assert words.startswith(
        "No recommendation: the runs did not have the same time. Of the 1 s that were asked for, a() had 0.55"
    )
    assert "silent() had" not in words
    results.runs[2].val_loss = 1.6
    assert "silent() had 2.5 s" in verdict(results), "now it is as low as a()"
    assert words.endswith(" At equal steps:\nlaconic compare digits --steps 10")
    assert "--seeds" not in words


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


@pytest.mark.parametrize(("width", "tables"), [(150, 2), (160, 1), (80, 3), (50, 7)])
def test_no_number_is_cut_or_folded_in_a_narrow_terminal(width: int, tables: int) -> None:
    long = "streaming_diloco(period=16, delay=2, blend=0.0, warmup=10)"
    results = result(("ddp()", 1.2345, 1234.5, 12.3e6), (long, None, 56.7, 4.56e3), ("silent()", 9.8765, 43.2, 0))
    results.link_note = "no namespaces"
    for run in results.runs:
        run.predicted_step_ms, run.expected_step_ms = 8765.4, 7654.3
        run.wire_bytes_per_step["kernel"] = 987e3
    text = io.StringIO()
    show(results, Console(file=text, width=width, legacy_windows=False))
    drawn = [line for line in text.getvalue().splitlines() if line[:1] in "┃│"]
    assert max(map(len, drawn)) <= width
    words = [cell.strip() for line in drawn for cell in line.strip("┃│").replace("┃", "│").split("│")]
    assert set(columns(results)) <= set(words)
    assert {cell for row in rows(results) for cell in cells(row, results)[1:]} <= set(words)
    assert words.count("strategy") == tables


def shown(board: Board) -> list[str]:
    """The cells of the first strategy's line: its bar as (completed, total), steps a second, loss, bytes."""
    columns_ = [list(column.cells) for column in board.table().columns]
    bar = columns_[1][0]
    assert isinstance(bar, ProgressBar)
    return [f"{bar.completed:g}/{bar.total:g}", *(str(column[0]) for column in columns_[2:])]


def test_the_live_table_goes_on_over_seeds_and_lines_are_printed_where_nothing_can_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([10.0, 12.0, 100.0, 101.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    out = io.StringIO()
    board = Board(Console(file=out, width=150), ["a()"], "10 steps", seeds=3)
    first, second, third = result(("a()", 1.5, 100, 1000), ("a()", None, 50, 3000), ("a()", 2.0, 50, 0)).runs
    board.finish(first, ran=False)  # it was there already
    assert (shown(board), out.getvalue()) == (["1/3", "10.0", "1.500", "10 kB"], "")
    board.begin("a()")
    board.heard("a()", {"steps": 10})
    board.heard("a()", {"step": 2, "bytes": 2e3, "loss": 2.5})
    board.heard("a()", {"step": 6, "bytes": 6e3})
    assert shown(board) == ["1.6/3", "2.0", "2.500", "6 kB"], "4 steps in 2 seconds; the loss is the last one that was told"
    board.finish(second)
    assert shown(board) == ["2/3", "20.0", "diverged", "30 kB"]
    assert out.getvalue() == "a(), seed 0: diverged, 50.0 ms a step, 3 kB a step\n"
    board.begin("a()")
    board.heard("a()", {"step": 1, "bytes": 1e3})
    assert shown(board)[0] == "2.1/3"
    board.heard("a()", {"step": 6, "bytes": 6e3})
    assert shown(board)[1] == "5.0", "what lies between two runs doesn't count"
    board.begin("a()")
    assert shown(board)[0] == "2/3"
    board.finish(third)
    assert shown(board)[0] == "3/3"


def test_how_far_off_the_cost_model_was_is_said() -> None:
    results = result(("ddp()", 1.0, 100, 1e6), ("a()", 1.0, 50, 1e5), ("b()", 1.0, 40, 1e5), ("silent()", 2.0, 25, 0))
    assert "cost model" not in ground(results), "older records have nothing of it"
    for run, expected in zip(results.runs, (110, 40, 40, 100), strict=True):
        run.expected_step_ms = expected
    assert "The cost model was off by 10% of the step time (median), at most by -20% (a())." in ground(results)
