"""A probe as one HTML file: measured and fitted times over sizes. Records are those of probe.json."""

import html
from collections.abc import Sequence
from typing import Any

from laconic.report.charts import COLOURS, Figure, layout
from laconic.report.page import document
from laconic.report.probe_table import COLUMNS, LEGEND, Record, findings, lines, title

LINE_POINTS = 40  # of a fitted line: it is bent, as both axes are logarithmic


def page(record: Record) -> str:
    """The whole page."""
    lead, *more = findings(record)
    left_out = [f"{each['kind']} of {each['wire_bytes']} bytes: {each['reason']}" for each in record["left_out"]]
    hosts = ", ".join(f"rank {worker['rank']}: {worker['host']}, node {worker['node']}" for worker in record["workers"])
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return document(
        f"a probe of {title(record)}",
        " ".join([lead, *(text for text in more if text.startswith(("SLOW", "WARNING")))]),
        [COLUMNS, *lines(record)],
        LEGEND,
        {_heading(record, *key): figure(record, *key) for key in groups(record)},
        "Points are medians, with quartiles; lines are fits. Both axes are logarithmic.",
        [*more, *left_out, hosts, versions],
    )


def groups(record: Record) -> list[tuple[int, int]]:
    """Numbers of ranks and how many at once, as measured."""
    return list(dict.fromkeys((each["ranks"], each["in_flight"]) for each in record["samples"]))


def figure(record: Record, ranks: int, in_flight: int) -> Figure:
    """Seconds over bytes, of each kind a colour."""
    traces: list[dict[str, Any]] = []
    for place, kind in enumerate(dict.fromkeys(each["kind"] for each in record["samples"])):
        key = {"kind": kind, "ranks": ranks, "in_flight": in_flight}
        rows = [each for each in record["samples"] if all(each[name] == value for name, value in key.items())]
        fits = [each for each in record["fits"] if all(each[name] == value for name, value in key.items())]
        shared = {"name": html.escape(kind), "legendgroup": html.escape(kind), "type": "scatter"}
        sizes = [each["wire_bytes"] for each in rows]
        traces.append(
            {
                **shared,
                "mode": "markers",
                "x": sizes,
                "y": [each["seconds"] for each in rows],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [each["high_seconds"] - each["seconds"] for each in rows],
                    "arrayminus": [each["seconds"] - each["low_seconds"] for each in rows],
                },
                "marker": {"color": COLOURS[place]},
            }
        )
        traces += [
            {
                **shared,
                "mode": "lines",
                "showlegend": False,
                "x": (points := _between(sizes)),
                "y": [fit["alpha_seconds"] + fit["seconds_per_byte"] * size for size in points],
                "line": {"color": COLOURS[place], "dash": "dot"},
                "hoverinfo": "skip",
            }
            for fit in fits
            if sizes
        ]
    x = {"title": {"text": "bytes that each rank puts on the cable"}, "type": "log", "exponentformat": "SI", "automargin": True}
    y = {"title": {"text": "seconds"}, "type": "log", "exponentformat": "SI", "automargin": True}
    return {"data": traces, "layout": layout(xaxis=x, yaxis=y)}


def _between(sizes: Sequence[float]) -> list[float]:
    low, high = min(sizes), max(sizes)
    return [low * (high / low) ** (place / LINE_POINTS) for place in range(LINE_POINTS + 1)]


def _heading(record: Record, ranks: int, in_flight: int) -> str:
    who = f"all {ranks} ranks" if ranks == record["world"] else f"the {ranks} ranks of a node"
    return f"Time of a collective among {who}" + (f", {in_flight} at once" if in_flight > 1 else "")
