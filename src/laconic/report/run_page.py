"""A real run as a page, out of what its meter wrote down."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laconic.report.charts import COLOURS, TIMELINE_STEPS, Figure, layout
from laconic.report.comparison_records import PAGE, write_whole
from laconic.report.meter_records import RankRecord, read, worst
from laconic.report.page import document
from laconic.report.terminal import human

MOST_LAYERS, MOST_POINTS = 40, 2000
LEGEND = (
    "step: mean time of a step. Bytes: what this rank put on the cable in a step, on average, counted. waiting: share of the "
    "time in which the training thread stood still for a collective. encoding: share in which exchanges encoded and decoded."
)


def write(folder: Path) -> Path:
    """The report next to the records."""
    path = folder / PAGE
    write_whole(path, page(read(folder)))
    return path


def page(records: list[RankRecord]) -> str:
    """A run of which some steps have been made."""
    going = [record for record in records if record.steps]
    if not going:
        raise ValueError("no step has been recorded yet")
    first = going[0]
    title = f"{first.strategy}, {first.start['world']} ranks"
    table = [["rank", "steps", "step", "bytes/step", "waiting", "encoding", "ended"], *map(_cells, going)]
    charts = {
        "Bytes against seconds": _lines(going, "bytes that one rank put on the cable", "seconds", _cumulative),
        "Step by step": _lines(going, "milliseconds", "step", _step_ms),
        "Where the time goes": _timeline(going),
    }
    longest = max(going, key=lambda record: len(record.workers))
    if longest.workers:
        charts["Who took part"] = _workers(longest)
    if first.syncs:
        charts["Between replicas"] = _syncs(first)
    if first.layers:
        charts["What compression loses"] = _layers(first)
    note = (
        "A click on a name in a legend switches it off and on; waiting is drawn pale, at the end of its step. Between "
        f"replicas: of {first.label}. What compression loses: ||x - sent|| / ||x||, in the last look; "
        f"the {MOST_LAYERS} largest."
    )
    grounds = f"{first.start['parameters']:,} parameters, torch {first.start['torch']}, on {first.start['host']}."
    return document(title, _lead(going), table, LEGEND, charts, note, [grounds])


def _lead(records: list[RankRecord]) -> str:
    first = records[0]
    seconds, sent = first.mean("seconds"), first.mean("wire_bytes")
    waits = [share for record in records if (share := _share(record, "wait_seconds")) is not None]
    waiting = f"; waiting took {min(waits):.0%} to {max(waits):.0%} of the time, by rank" if waits else ""
    return (
        f"{len(first.steps)} steps of {first.strategy} on {first.start['world']} ranks, "
        f"{(seconds or 0) * 1e3:.1f} ms and {human(sent)} a step{waiting}."
    )


def _cells(record: RankRecord) -> list[str]:
    shares = [_share(record, key) for key in ("wait_seconds", "work_seconds")]
    return [
        record.name,
        str(len(record.steps)),
        f"{(record.mean('seconds') or 0) * 1e3:.1f} ms",
        human(record.mean("wire_bytes")),
        *("" if share is None else f"{share:.0%}" for share in shares),
        "no" if record.end is None else record.end.get("failure") or "yes",
    ]


def _share(record: RankRecord, key: str) -> float | None:
    part, whole = record.mean(key), record.mean("seconds")
    return None if part is None or not whole else part / whole


def _named(record: RankRecord) -> dict[str, Any]:
    return {"name": record.label, "legendgroup": record.label}


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _cumulative(record: RankRecord) -> list[tuple[float, float]]:
    seconds = sent = 0.0
    points = []
    for row in record.steps:
        seconds, sent = seconds + row["seconds"], sent + row["wire_bytes"]
        points.append((seconds, sent))
    return points


def _step_ms(record: RankRecord) -> list[tuple[float, float]]:
    return [(row["step"], row["seconds"] * 1e3) for row in record.steps]


def _lines(records: list[RankRecord], y: str, x: str, points: Callable[[RankRecord], list[tuple[float, float]]]) -> Figure:
    traces = []
    for place, record in enumerate(records):
        found = points(record)
        found = found[:: max(1, len(found) // MOST_POINTS)]
        traces.append(
            {
                **_named(record),
                "type": "scatter",
                "mode": "lines",
                "x": [point[0] for point in found],
                "y": [point[1] for point in found],
                "line": {"color": _colour(place)},
            }
        )
    axes = {"xaxis": _axis(x), "yaxis": {**_axis(y), "exponentformat": "SI"}}
    return {"data": traces, "layout": layout(**axes)}


def _timeline(records: list[RankRecord]) -> Figure:
    traces = []
    shown = max(len(record.steps[-TIMELINE_STEPS:]) for record in records)
    for place, record in enumerate(records):
        spans: dict[str, list[tuple[float, float]]] = {"computing": [], "waiting": []}
        start = 0.0
        for row in record.steps[-TIMELINE_STEPS:]:
            waited = row["wait_seconds"] or 0.0
            spans["computing"].append((start, row["seconds"] - waited))
            spans["waiting"].append((start + row["seconds"] - waited, waited))
            start += row["seconds"]
        for part, found in spans.items():
            traces.append(
                {
                    **_named(record),
                    "type": "bar",
                    "orientation": "h",
                    "base": [begin for begin, _ in found],
                    "x": [length for _, length in found],
                    "y": [record.label] * len(found),
                    "marker": {"color": _colour(place), "opacity": 1.0 if part == "computing" else 0.25},
                    "showlegend": part == "computing",
                    "hovertemplate": f"{part} %{{x:.3f}} s<extra></extra>",
                }
            )
    axes = {
        "xaxis": _axis(f"seconds, of the last {shown} steps"),
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return {"data": traces, "layout": layout(**axes, barmode="overlay")}


def _syncs(record: RankRecord) -> Figure:
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": key.replace("_", " "),
            "x": [row["step"] for row in record.syncs],
            "y": [row[key] for row in record.syncs],
            "line": {"color": _colour(place)},
        }
        for place, key in enumerate(("norm", "mean_norm", "drift", "cosine"))
        if any(row[key] is not None for row in record.syncs)
    ]
    return {"data": traces, "layout": layout(xaxis=_axis("step"), yaxis={"automargin": True})}


def _workers(record: RankRecord) -> Figure:
    """How much each worker counted in the syncs that this one knows of; a gap: it was not there."""
    rows = [row for row in record.workers if row["dropped"] is None]
    names = sorted({name for row in rows for name in row["weights"]})
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": html.escape(name),
            "x": [row["step"] for row in rows],
            "y": [row["weights"].get(name) for row in rows],
            "line": {"color": _colour(place)},
        }
        for place, name in enumerate(names)
    ]
    lost = [row["step"] for row in record.workers if row["dropped"] is not None]
    if lost:
        marks = {"symbol": "x", "color": "#222222"}
        traces.append(
            {"type": "scatter", "mode": "markers", "name": "dropped", "x": lost, "y": [0] * len(lost), "marker": marks}
        )
    return {"data": traces, "layout": layout(xaxis=_axis("step"), yaxis=_axis("weight in the mean"))}


def _layers(record: RankRecord) -> Figure:
    found = worst(record, MOST_LAYERS)
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [error for _, error in found],
        "y": [html.escape(name) for name, _ in found],
        "marker": {"color": COLOURS[0]},
        "showlegend": False,
    }
    axes = {"xaxis": _axis("share of the norm that was lost"), "yaxis": _downwards()}
    return {"data": [trace], "layout": layout(**axes)}


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True}


def _downwards() -> dict[str, Any]:
    return {"autorange": "reversed", "automargin": True}
