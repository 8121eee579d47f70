"""An advice as one HTML file, with its two curves: the share of the rate over bandwidth, and over the number of workers."""

import html
import math
from pathlib import Path

from laconic.report.advice_records import FILE, PAGE, AdviceRecord
from laconic.report.advice_table import cells, columns, legend
from laconic.report.charts import COLOURS, Figure, layout
from laconic.report.comparison_records import write_whole
from laconic.report.page import document

BASE = "ddp()"
LABEL_LENGTH = 44


def write(record: AdviceRecord, folder: Path) -> Path:
    """The page and the record beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, record.text() + "\n")
    write_whole(folder / PAGE, page(record))
    return folder / PAGE


def page(record: AdviceRecord) -> str:
    """The page. What came from the user is escaped."""
    return document(
        record.title,
        f"{record.verdict} {record.reason}",
        [columns(record), *(cells(row, record) for row in record.rows)],
        legend(record),
        figures(record),
        "Each strategy has the parameters of the table, which are filled in for the link that was asked for. A click on a name "
        "in a legend switches that strategy off and on in both charts.",
        [*(f"{row.strategy}: {row.loss}" for row in record.rows), *record.assumptions],
    )


def figures(record: AdviceRecord) -> dict[str, Figure]:
    """By heading."""
    bits = record.link_bits_per_second
    bandwidth = _chart(record, record.by_bandwidth, "bits a second", bits, f"link {record.link}")
    workers = _chart(record, record.by_workers, "workers", record.workers, f"{record.workers} workers")
    return {"Share of the rate against bandwidth": bandwidth, "Share of the rate against number of workers": workers}


def _chart(
    record: AdviceRecord, curves: dict[str, list[tuple[float, float]]], title: str, mark: float | None, words: str
) -> Figure:
    others = [name for name in curves if name != BASE]
    traces = [
        {
            "name": html.escape(label(name)),
            "legendgroup": html.escape(name),
            "type": "scatter",
            "mode": "lines",
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "line": {
                "color": "#222222" if name == BASE else COLOURS[others.index(name) % len(COLOURS)],
                "width": 4 if name == record.choice else 2,
                "dash": "dot" if name == BASE else "solid",
            },
            "hovertemplate": f"%{{y:.1%}} at %{{x:.3s}}<extra>{html.escape(name)}</extra>",
        }
        for name, points in curves.items()
    ]
    axis = {"title": {"text": title}, "type": "log", "exponentformat": "SI", "automargin": True}
    shares = {"title": {"text": "share of the full rate"}, "tickformat": ".0%", "range": [0, 1.03]}
    figure: Figure = {"data": traces, "layout": layout(xaxis=axis, yaxis={**shares, "automargin": True})}
    if mark is not None:
        line = {"color": "#888888", "width": 1, "dash": "dash"}
        figure["layout"]["shapes"] = [
            {"type": "line", "x0": mark, "x1": mark, "y0": 0, "y1": 1, "yref": "paper", "line": line},
            {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": record.share, "y1": record.share, "line": line},
        ]
        figure["layout"]["annotations"] = [
            {
                "x": math.log10(mark),
                "y": 0.02,
                "yref": "paper",
                "text": html.escape(words),
                "showarrow": False,
                "xanchor": "left",
            }
        ]
    return figure


def label(strategy: str) -> str:
    """A strategy in a legend: its first arguments.

    >>> label("diloco(period=16, warmup=100, reducer=Quantized(8), warmup_reducer=Quantized(8))")
    'diloco(period=16, warmup=100, …)'
    """
    if len(strategy) <= LABEL_LENGTH:
        return strategy
    kept, _, _ = strategy[: LABEL_LENGTH - 3].rpartition(", ")
    return f"{kept}, …)" if kept else f"{strategy[: LABEL_LENGTH - 1]}…"
