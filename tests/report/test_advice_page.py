"""An advice as a table and as a page, from plain data."""

import io
import json

import plotly.graph_objects as go
from rich.console import Console

from laconic.report.advice_page import figures, label, page
from laconic.report.advice_records import AdviceRecord, AdviceRow
from laconic.report.advice_table import show

NASTY = "<b>&'\""


def made(price: float | None = None) -> AdviceRecord:
    def row(name: str, share: float, refused: str = "") -> AdviceRow:
        step = 1 / share
        cost = None if price is None else price
        return AdviceRow(
            name, "same", "same arithmetic", f"loss of {name}", share, step, 1.0, 0.0, step - 1, 1e9, 8e13, cost, 0.0, refused
        )

    rows = [row("ddp()", 0.1), row(f"mine({NASTY})", 0.96), row("other()", 0.99, "over the budget")]
    curves = {each.strategy: [(1e7, 0.1), (1e9, each.share), (1e11, 1.0)] for each in rows}
    workers = {each.strategy: [(2.0, 0.9), (8.0, each.share)] for each in rows}
    return AdviceRecord(
        model="a model",
        workers=8,
        per_node=1,
        link="1gbit",
        link_bits_per_second=1e9,
        share=0.95,
        risk="local",
        verdict="Is the network the problem? Yes.",
        choice=f"mine({NASTY})",
        reached=True,
        reason="It reaches 96 %.",
        rows=rows,
        assumptions=["Nothing was measured."],
        by_bandwidth=curves,
        by_workers=workers,
    )


def shown(record: AdviceRecord, width: int) -> str:
    screen = io.StringIO()
    show(record, Console(file=screen, width=width))
    return screen.getvalue()


def test_the_table_says_all_at_any_width() -> None:
    for width in (60, 100, 160):
        text = shown(made(), width)
        for part in (
            "Is the network the problem?",
            "10 %",
            "96 %",
            "80 TB",
            "same arithmetic",
            "Nothing was measured.",
            "choice:",
        ):
            assert part in text, (width, part)
        assert max(map(len, text.splitlines()[:5])) <= width
    assert "over the budget" in " ".join(shown(made(), 160).split())
    assert "cost/day" not in shown(made(), 160)
    assert "1,234.50" in shown(made(1234.5), 160)


def test_the_charts_are_charts_and_the_link_is_marked() -> None:
    record = made()
    charts = figures(record)
    assert len(charts) == 2
    for chart, mark in zip(charts.values(), (1e9, 8), strict=True):
        go.Figure(chart)  # raises where a part is none of plotly's
        assert chart["layout"]["xaxis"]["type"] == "log"
        assert [line["x0"] for line in chart["layout"]["shapes"] if line.get("yref") == "paper"] == [mark]
        widths = {trace["legendgroup"]: trace["line"]["width"] for trace in chart["data"]}
        assert max(widths, key=lambda name: widths[name]) not in ("ddp()", "other()"), "the choice is the thick one"


def test_the_page_escapes_what_a_user_wrote() -> None:
    text = page(made()).partition("<script>")[0]
    assert NASTY not in text
    assert "mine(&lt;b&gt;&amp;" in text
    assert "loss of ddp()" in text


def test_json_is_read_back() -> None:
    data = json.loads(made().text())
    assert data["version"] == 1
    assert data["rows"][2]["refused"] == "over the budget"


def test_a_short_name_is_left_as_it_is() -> None:
    assert label("int8()") == "int8()"
    assert len(label("x" * 100)) <= 44
