"""The report in a real browser: it draws, it switches, it is quiet, and it asks the network for nothing."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from laconic.report import comparison_records as records
from laconic.report import page, run_page
from laconic.report.charts import COLOURS, figures
from tests.report.made import result

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "</script><script>document.title='taken'</script><b>\"bold\"</b>&amp;'"


def results(task: str = "digits") -> records.Results:
    made = result(
        ("ddp()", 1.0, 100, 1e6),
        ("diloco(period=4)", 1.01, 50, 5e3),
        ("diloco(period=8)", 1.1, 45, 2e3),
        ("silent()", 2.0, 40, 0),
    )
    made.task = task
    for run in made.runs:
        size = run.wire_bytes_per_step["counted"] or 0.0
        run.curve = [[5, 0.5, 5 * size, 3.0], [10, 1.0, 10 * size, run.val_loss]]
    return made


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    if BROWSER is None:
        pytest.skip("no browser is installed: apt install chromium")
    quiet = [
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=quiet)
        yield browser.new_page()
        browser.close()


def opened(window: Page, folder: Path, made: records.Results, width: int = 1000) -> tuple[list[str], list[str]]:
    """What it said on the console, and what it asked for."""
    said: list[str] = []
    asked: list[str] = []
    window.on("console", lambda message: said.append(message.text))
    window.on("pageerror", lambda error: said.append(str(error)))
    window.on("request", lambda request: asked.append(request.url))
    window.set_viewport_size({"width": width, "height": 800})
    window.goto(page.write(made, folder).as_uri())
    window.wait_for_selector(".chart >> nth=3 >> .legend")
    return said, asked


def drawn(window: Page, chart: int, what: str) -> int:
    """How many curves, or bars, a chart has."""
    count: Any = window.locator(".chart").nth(chart).locator(what).count()
    return int(count)


def test_it_draws_and_the_legend_switches_in_all_charts(window: Page, tmp_path: Path) -> None:
    said, asked = opened(window, tmp_path, results())
    lines, bars = ".scatterlayer .trace", ".barlayer .trace"
    assert [drawn(window, chart, kind) for chart, kind in enumerate([lines, lines, bars, bars])] == [4, 3, 3, 8]
    window.locator(".chart").nth(0).locator(".legendtoggle").nth(1).click()  # diloco(period=4)
    window.wait_for_function("document.querySelectorAll('.chart')[3].querySelectorAll('.barlayer .trace').length == 6")
    assert [drawn(window, chart, kind) for chart, kind in enumerate([lines, lines, bars, bars])] == [3, 2, 2, 6]
    window.wait_for_timeout(400)  # two clicks in a short time would be a double click
    window.locator(".chart").nth(1).locator(".legendtoggle").nth(1).click()
    window.wait_for_function("document.querySelectorAll('.chart')[0].querySelectorAll('.scatterlayer .trace').length == 4")
    assert "diloco(period=4)" in window.inner_text("table")
    assert "Take diloco(period=4)" in window.inner_text(".verdict")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_it_fits_a_phone(window: Page, tmp_path: Path) -> None:
    opened(window, tmp_path, results(), width=360)
    assert window.evaluate("document.documentElement.scrollWidth") <= 360, "only the table scrolls, in its own box"
    charts: Any = window.evaluate(
        "[...document.querySelectorAll('.chart .xy')].map(plot => plot.getBoundingClientRect().width)"
    )
    assert min(charts) > 180, "the chart has most of the width"


def test_a_table_has_the_width_of_the_window_and_scrolls_beyond_it(window: Page, tmp_path: Path) -> None:
    made = results()
    made.runs[1].strategy = "streaming_diloco(period=16, fragments=4, delay=3, carry=True, warmup_reducer=Quantized(8))"
    cut = "(box => box.scrollWidth - box.clientWidth)(document.querySelector('.wide'))"
    opened(window, tmp_path, made, width=1280)
    assert window.evaluate(cut) <= 0, "all columns are seen"
    assert window.evaluate("document.documentElement.scrollWidth") <= 1280
    opened(window, tmp_path, made, width=360)
    assert window.evaluate(cut) > 0
    window.evaluate("document.querySelector('.wide').scrollLeft = 1e6")
    assert window.evaluate("[...document.querySelectorAll('th')].at(-1).getBoundingClientRect().right") <= 360


def test_what_came_from_the_user_is_text(window: Page, tmp_path: Path) -> None:
    made = results(task=NASTY)
    made.runs[1].strategy = f"diloco(period={NASTY})"
    said, _ = opened(window, tmp_path, made)
    assert window.title().startswith("laconic: </script>")
    assert NASTY in window.inner_text("h1")
    assert window.locator("h1 b, td b").count() == 0
    assert said == []


def test_a_runs_page_draws_too(window: Page, tmp_path: Path) -> None:
    start = {"kind": "start", "version": 1, "time": 0, "strategy": NASTY, "rank": 0, "world": 2, "step": 0}
    start |= {"parameters": 1000, "torch": "2", "host": NASTY}
    step = {"kind": "step", "time": 0, "seconds": 0.5, "wire_bytes": 10, "wait_seconds": 0.1, "work_seconds": 0.1}
    sync = {"kind": "sync", "step": 1, "drift": 0.5, "norm": 1.0, "mean_norm": 0.5, "cosine": 0.1}
    layers = {"kind": "layers", "step": 1, "layers": {NASTY: {"error": 0.5, "residual": None, "wire_bytes": 10}}}
    for rank in range(2):
        rows = [{**start, "rank": rank}, {**step, "step": 1}, sync, layers, {**step, "step": 2}]
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    window.on("console", lambda message: said.append(message.text))
    window.on("pageerror", lambda error: said.append(str(error)))
    window.goto(run_page.write(tmp_path).as_uri())
    window.wait_for_selector(".chart >> nth=4 >> .barlayer .trace")
    assert [drawn(window, chart, ".trace") > 0 for chart in range(5)] == [True] * 5
    window.locator(".chart").nth(0).locator(".legendtoggle").nth(1).click()
    window.wait_for_function("document.querySelectorAll('.chart')[2].querySelectorAll('.barlayer .trace').length == 2")
    assert drawn(window, 3, ".scatterlayer .trace") == 4, "what is of no rank stays"
    assert said == []


def test_it_carries_all_it_needs(tmp_path: Path) -> None:
    text = page.write(results(), tmp_path).read_text()
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=[\"']?http", own)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_what_came_from_the_user_is_escaped_in_every_place_of_the_page() -> None:
    """As the browser's test above, where none is installed."""
    made = results(task=NASTY)
    made.runs[1].strategy, made.link_note, made.versions = f"diloco({NASTY})", f"no {NASTY}", {"torch": NASTY}
    text = page.page(made)
    own = re.sub(r"<style>.*?</style>|<script>(?!document).*?</script>", "", text, flags=re.DOTALL)
    assert NASTY not in own
    assert "<b>" not in own
    assert "document.title='taken'" not in own, "its quotes are escaped, too"
    assert own.count("<script") == own.count("</script>") == 4, "one for each chart's data"
    assert "<th>val loss</th>" in own
    assert own.count("<tr>") == 1 + len(made.runs)
    assert "Equal for all: initial weights" in own, "the ground"
    assert "torch &lt;/script&gt;" in own


def test_data_that_ends_a_script_or_is_no_number_harms_no_page() -> None:
    text = page.document("t", "l", [["a"]], "g", {"chart": {"data": ["</script>", math.nan]}}, "n", [])
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert not set("<>&") & set(data), "nor a comment, nor an entity"
    assert json.loads(data, parse_constant=pytest.fail) == {"data": ["</script>", None]}


def test_the_time_of_a_step_is_computing_and_then_waiting() -> None:
    made = results()
    before: list[list[float | None]] = [[999.0, 0.0] for _ in range(5)]
    made.runs[1].pace = [*before, *([20.0, None] for _ in range(46)), [100.0, 30.0], [50.0, 10.0]]
    traces = figures(made)["Where the time goes"]["data"]
    computing, waiting = (trace for trace in traces if trace["legendgroup"] == "diloco(period=4)")
    assert len(computing["x"]) == len(waiting["x"]) == 48, "the last ones"
    assert (computing["base"][-2:], computing["x"][-2:]) == (pytest.approx([0.92, 1.02]), pytest.approx([0.07, 0.04]))
    assert (waiting["base"][-2:], waiting["x"][-2:]) == (pytest.approx([0.99, 1.06]), pytest.approx([0.03, 0.01]))
    assert computing["marker"]["opacity"] > waiting["marker"]["opacity"]
    assert (computing["showlegend"], waiting["showlegend"]) == (True, False)
    assert {trace["y"][0] for trace in traces} == {"ddp", "diloco(period=4)", "diloco(period=8)", "silent"}


def test_a_strategy_has_one_colour_and_what_is_measured_against_is_grey() -> None:
    made = results()
    colours = [
        {trace["name"]: trace.get("line", trace.get("marker"))["color"] for trace in chart["data"]}
        for chart in figures(made).values()
    ]
    assert colours[0] == {"ddp": "#222222", "diloco(period=4)": COLOURS[0], "diloco(period=8)": COLOURS[1], "silent": "#999999"}
    assert all(each.items() <= colours[0].items() for each in colours)
    assert [len(each) for each in colours] == [4, 3, 3, 4], "what sends nothing has no place on an axis of bytes"
    many = result(*[(f"a(period={period})", 1.0, 100, 1e6) for period in range(10)])
    assert len({trace["marker"]["color"] for trace in figures(many)["Bytes a step"]["data"]}) == 10


def test_bars_are_of_the_bytes_that_were_counted() -> None:
    made = results()
    made.runs[1].wire_bytes_per_step["predicted"] = 7.0
    chart = figures(made)["Bytes a step"]
    assert [(trace["x"], trace["text"]) for trace in chart["data"]] == [
        ([1e6], ["1 MB"]), ([5e3], ["5 kB"]), ([2e3], ["2 kB"])
    ]  # fmt: skip
    low, high = chart["layout"]["xaxis"]["range"]
    assert low < math.log10(2e3) - 0.5, "the shortest bar has a length"
    assert math.log10(1e6) < high < 7


def test_seeds_are_lines_of_one_colour_and_the_log_axis_has_no_zero() -> None:
    made = results()
    made.runs += [records.Record(**{**vars(run), "seed": 1}) for run in results().runs]
    loss = figures(made)["Loss against seconds"]["data"]
    assert [trace["name"] for trace in loss] == ["ddp", "diloco(period=4)", "diloco(period=8)", "silent"]
    assert loss[0]["x"] == [0.5, 1.0, None, 0.5, 1.0, None]
    bytes_ = figures(made)["Loss against bytes"]["data"]
    assert [x for trace in bytes_ for x in trace["x"] if x is not None and x <= 0] == []
    assert (bytes_[0]["x"], bytes_[0]["y"]) == ([5e6, 1e7, None] * 2, [3.0, 1.0, None] * 2)
    for run in made.runs:
        run.predicted_step_ms = 3 * run.step_ms  # over a link that could not be had: slower, with as many bytes
    assert figures(made)["Loss against bytes"]["data"] == bytes_
    assert figures(made)["Loss against seconds"]["data"][0]["x"] == [1.5, 3.0, None] * 2


def seen(colour: str, eyes: list[list[float]]) -> tuple[float, ...]:
    """A colour in Lab, as such eyes see it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    r, g, b = (min(1.0, max(0.0, sum(a * c for a, c in zip(row, linear, strict=True)))) for row in eyes)
    white = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in (*white, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.0888)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(
    "eyes",
    [
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    ],
    ids=["most", "protanopia", "deuteranopia"],  # Machado, Oliveira and Fernandes, 2009
)
def test_every_colour_can_be_told_from_every_other(eyes: list[list[float]]) -> None:
    def nearest(colours: list[str]) -> float:
        return min(math.dist(seen(one, eyes), seen(other, eyes)) for one, other in combinations(colours, 2))

    assert len(COLOURS) == 10
    assert nearest(COLOURS) >= min(nearest(COLOURS[:6]), 20), "no nearer than Okabe's and Ito's six"
