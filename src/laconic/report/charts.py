"""A comparison in pictures: plotly figures as plain data. A strategy has one colour and one name in all of them."""

import html
import math
from typing import Any

from laconic.report.comparison_records import Record, Results
from laconic.report.summary import BASE, LIMIT, labels, rows, stretch
from laconic.report.terminal import human

# Six colours that people with colour-blindness can tell apart (Okabe and Ito), and four dark ones which are as far from those
# and from each other as those are among themselves; grey is for what others are measured by.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255", "#661100", "#8A2BE2"]
GREYS = {BASE: "#222222", LIMIT: "#999999"}
TIMELINE_STEPS = 48

Figure = dict[str, Any]


def figures(results: Results) -> dict[str, Figure]:
    """By heading."""
    predicted = ", PREDICTED for the link" if results.link_note else ""
    return {
        "Loss against seconds": loss_over(results, 1, f"seconds of training{predicted}"),
        "Loss against bytes": loss_over(results, 2, "bytes that one worker put on the cable", log=True),
        "Bytes a step": bytes_per_step(results),
        "Where the time goes": timeline(results),
    }


def loss_over(results: Results, column: int, title: str, *, log: bool = False) -> Figure:
    """Held-out loss over a column of the curves; several seeds are several lines of one colour. A log axis has no zero."""
    traces = []
    for strategy, runs in _by_strategy(results).items():
        points: list[tuple[float | None, float | None]] = []
        for run in runs:
            unit = stretch(run) if column == 1 else 1.0
            looks = [(unit * x, y) for x, y in ((row[column], row[3]) for row in run.curve) if x is not None]
            points += [(x, y) for x, y in looks if x > 0 or not log]
            points.append((None, None))  # lifts the pen between seeds
        if not any(x is not None for x, _ in points):
            continue
        traces.append(
            {
                **_named(results, strategy),
                "type": "scatter",
                "mode": "lines+markers",
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "line": {"color": _colour(results, strategy), "dash": "dot" if strategy in GREYS else "solid"},
                "hovertemplate": f"%{{y:.4f}} at %{{x:.3s}}<extra>{html.escape(strategy)}</extra>",
            }
        )
    axis = {"title": {"text": title}, "type": "log" if log else "linear", "exponentformat": "SI", "automargin": True}
    return {"data": traces, "layout": layout(xaxis=axis, yaxis={"title": {"text": "held-out loss"}, "automargin": True})}


def bytes_per_step(results: Results) -> Figure:
    """What a step sends, counted; on a log axis, where factors are lengths."""
    sending = [row for row in rows(results) if row.bytes_per_step > 0]
    traces = [
        {
            **_named(results, row.strategy),
            "type": "bar",
            "orientation": "h",
            "x": [row.bytes_per_step],
            "y": [_label(results, row.strategy)],
            "marker": {"color": _colour(results, row.strategy)},
            "text": [human(row.bytes_per_step)],
            "hovertemplate": f"%{{x:.3s}}B a step<extra>{html.escape(row.strategy)}</extra>",
        }
        for row in sending
    ]
    ends = [math.log10(size([row.bytes_per_step for row in sending] or [1])) for size in (min, max)]
    axis = {"title": {"text": "bytes a step and worker"}, "type": "log", "exponentformat": "SI", "automargin": True}
    axis["range"] = [math.floor(ends[0]) - 0.5, ends[1] + 0.1]  # without it, the shortest bar would have no length
    return {"data": traces, "layout": layout(xaxis=axis, yaxis=_names(), barmode="overlay")}


def timeline(results: Results) -> Figure:
    """The last steps of each strategy's first run, one after the other: computing in full colour, waiting pale."""
    traces = []
    shown = max((len(run.pace[-TIMELINE_STEPS:]) for run in results.runs), default=0)
    for strategy, (run, *_) in _by_strategy(results).items():
        start, last = 0.0, run.pace[-TIMELINE_STEPS:]
        parts: dict[str, list[tuple[float, float]]] = {"computing": [], "waiting": []}
        for total, waited in last:
            compute = (total or 0.0) - (waited or 0.0)
            parts["computing"].append((start, compute))
            parts["waiting"].append((start + compute, waited or 0.0))
            start += total or 0.0
        for part, spans in parts.items():
            traces.append(
                {
                    **_named(results, strategy),
                    "type": "bar",
                    "orientation": "h",
                    "base": [begin / 1e3 for begin, _ in spans],
                    "x": [length / 1e3 for _, length in spans],
                    "y": [_label(results, strategy)] * len(spans),
                    "marker": {"color": _colour(results, strategy), "opacity": 1.0 if part == "computing" else 0.25},
                    "showlegend": part == "computing",
                    "hovertemplate": f"{part} %{{x:.3f}} s<extra>{html.escape(strategy)}</extra>",
                }
            )
    unlimited = ", without a limit" if results.link_note else ""
    axis = {"title": {"text": f"seconds, of the last {shown} steps{unlimited}"}, "automargin": True}
    return {"data": traces, "layout": layout(xaxis=axis, yaxis=_names(), barmode="overlay")}


def _by_strategy(results: Results) -> dict[str, list[Record]]:
    """As the table has them."""
    return {row.strategy: [run for run in results.runs if run.strategy == row.strategy] for row in rows(results)}


def _label(results: Results, strategy: str) -> str:
    return html.escape(labels(results)[strategy])


def _named(results: Results, strategy: str) -> dict[str, Any]:
    """What the legend shows, and what it switches in all figures at once."""
    return {"name": _label(results, strategy), "legendgroup": html.escape(strategy)}


def _colour(results: Results, strategy: str) -> str:
    others = [text for text in labels(results) if text not in GREYS]
    return GREYS.get(strategy) or COLOURS[others.index(strategy) % len(COLOURS)]


def _names() -> dict[str, Any]:
    return {"automargin": True, "autorange": "reversed"}


def layout(**parts: Any) -> dict[str, Any]:
    """Room for the legend below, so that a phone's width is left to the chart."""
    return {
        "margin": {"l": 50, "r": 15, "t": 10, "b": 40},
        "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "hoverlabel": {"namelength": -1},
        **{name: {"gridcolor": "#e5e5e5", **part} if isinstance(part, dict) else part for name, part in parts.items()},
    }
