"""Draw the pictures of docs/benchmarks.md from benchmarks/results. Every number comes from a result file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import charts as c
import drawing as d
from charts import Axis, Point, Row, Series

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks/results"
TOP = 32
LINKS = {"none": "no limit", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s", "10mbit": "10 Mbit/s"}
WORLDS = (2, 4, 8, 16, 64, 256)


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def short(name: str) -> str:
    """A label that fits: without the arguments of the long ones."""
    return name.partition("(24, fragments")[0] if "streaming_diloco(" in name else name


def head(title: str, note: str) -> tuple[list[str], float]:
    """The title, a note below it, and the y below both."""
    body = [*d.lines(d.EDGE, TOP, title, "title")]
    y = TOP + d.LINE * len(body)
    notes = d.lines(d.EDGE, y, note, "note")
    return [*body, *notes], y + d.LINE * len(notes)


def rates() -> str:
    """Marks for each link, a row for each method."""
    title = "Share of the rate without communication"
    styles = dict(zip(LINKS, zip(c.PAINTS, c.SHAPES, strict=False), strict=False))
    found: dict[str, list[tuple[str, str, Point]]] = {}
    for link, (colour, shape) in styles.items():
        for row in rows(f"rates-{link}"):
            if row["share of the silent rate"]:
                share, error = float(row["share of the silent rate"]), float(row["+-"])
                found.setdefault(short(row[""]), []).append((colour, shape, Point(share, 0, error)))
    body, y = head(title, "4 workers, links of four rates. Lines: standard errors.")
    samples, y = d.legend(y, [(d.mark(styles[link][1], styles[link][0], 0, 0), words) for link, words in LINKS.items()])
    listed = [Row(name, marks, name.startswith("laconic")) for name, marks in found.items()]
    marks, y = c.rows(y + 22, Axis(0, 1.12, (0, 0.25, 0.5, 0.75, 1), "1: as fast as without communication"), listed)
    return d.picture(title, f"{', '.join(found)}: the table below has the numbers.", y + 20, [*body, *samples, *marks])


def learning() -> str:
    title = "Loss for seconds, 100 Mbit/s"
    curves = json.loads((RESULTS / "learning_curves.json").read_text())
    found = [
        Series(name, [Point(*point) for point in curve], c.PAINTS[place % 7], c.SHAPES[place % 6], c.DASHES[place % 3], True)
        for place, (name, curve) in enumerate((name, curve) for name, curve in curves.items() if "longer" not in name)
    ]
    body, y = head(title, "Held-out loss, equal samples for all, first seed.")
    axes = Axis(5, 250, (5, 10, 20, 50, 100, 200), "seconds", log=True), Axis(2.4, 3.1, (2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0))
    lines, y = c.plane(y, 400, *axes, found)
    samples, y = d.legend(y + 34, [(series.sample, series.name) for series in found])
    return d.picture(title, f"Curves of {', '.join(each.name for each in found)}.", y - 6, [*body, *lines, *samples])


def growth() -> str:
    title = "Bytes of one rank as the world grows"
    found = []
    for place, row in enumerate(rows("growth")):
        points = [Point(world, float(row[f"N={world}"])) for world in WORLDS]
        growing = row[""].startswith("torch") or "phases=1" in row[""]
        name = row[""].removeprefix("laconic ")
        dash = c.DASHES[2] if growing else c.DASHES[0]
        found.append(Series(name, points, c.PAINTS[place % 7], c.SHAPES[(place + place // 6) % 6], dash, True))
    body, y = head(title, "Sent, in sizes of the gradient. Dashed: everybody sends to everybody.")
    ticks = (0.01, 0.1, 1, 10, 100)
    axes = Axis(2, 256, WORLDS, "ranks", log=True), Axis(0.004, 100, ticks, log=True)
    lines, y = c.plane(y, 440, *axes, found)
    samples, y = d.legend(y + 34, [(series.sample, series.name) for series in found])
    return d.picture(title, f"Lines of {', '.join(each.name for each in found)}.", y - 6, [*body, *lines, *samples])


def compressors() -> str:
    title = "Time of compressors, relative to torch's hook"
    found = rows("compressor_cost")
    styles = {1: ("blue", "circle"), 2: ("red", "triangle"), 4: ("green", "square")}
    listed = []
    for name, against in dict.fromkeys((row["reducer"], row["against"]) for row in found):
        marks = [
            (*styles[row["processes"]], Point(float(row["relative"]), 0, float(row["+-"])))
            for row in found
            if (row["reducer"], row["against"]) == (name, against) and row["processes"] in styles
        ]
        listed.append(Row(f"{name.replace('ErrorFeedback', 'EF')}, {against.removesuffix('_hook')}", marks))
    note = "19 MB of gradients, kernels compiled, two cores. EF: ErrorFeedback. Behind the comma: torch's hook."
    body, y = head(title, note)
    words = {1: "1 process", 2: "2 processes", 4: "4 processes"}
    samples, y = d.legend(y, [(d.mark(shape, colour, 0, 0), words[count]) for count, (colour, shape) in styles.items()])
    axis = Axis(0.2, 14, (0.25, 0.5, 1, 2, 4, 8), "left of 1: faster than torch's hook", log=True)
    marks, y = c.rows(y + 22, axis, listed, limit=1)
    return d.picture(title, f"{', '.join(row.words for row in listed)}.", y + 20, [*body, *samples, *marks])


def frontier() -> str:
    title = "Loss above DDP's, in %, for bytes: AdamW"
    found = [row for row in rows("frontier") if row["family"]]
    settings = [name for name in dict.fromkeys(row["setting"] for row in found) if name.startswith("transformer")]
    families = dict.fromkeys(row["family"] for row in found)
    x, y_axis = Axis(3.2, 160, (4, 8, 16, 32, 64, 128), log=True), Axis(-1.2, 3, (-1, 0, 1, 2, 3))
    body, y = head(title, "The further right, the fewer bytes: one in so many of DDP's. Lines: standard deviations.")
    styles = {name: (c.PAINTS[place], c.SHAPES[place]) for place, name in enumerate(families)}
    samples, y = d.legend(y, [(d.mark(shape, colour, 0, 0), name) for name, (colour, shape) in styles.items()])
    outside = 0
    for setting in [name for name in settings if ", adamw" in name]:
        series = []
        for family, (colour, shape) in styles.items():
            every = [_point(row) for row in found if (row["setting"], row["family"]) == (setting, family)]
            inside = [each for each in every if x.low <= each.x <= x.high and y_axis.low <= each.y <= y_axis.high]
            outside += len(every) - len(inside)
            series.append(Series(family, inside, colour, shape))
        body += d.lines(d.EDGE, y + 14, setting, "name")
        points, y = c.plane(y + 8 + d.LINE * len(d.wrapped(setting)), 260, x, y_axis, series)
        body += points
    notes = d.lines(d.EDGE, y + 12, f"{outside} points are outside of these axes; the table has them.", "note")
    return d.picture(title, f"Families: {', '.join(families)}.", y + 12 + d.LINE * len(notes), [*body, *samples, *notes])


def _point(row: dict[str, Any]) -> Point:
    mean, spread = map(float, row["above ddp, %"].split(" ± "))
    return Point(float(row["bytes"].split("/")[1]), mean, spread)


def averaging() -> str:
    title = "Averaging, relative to torch's PeriodicModelAverager"
    found = [row for row in rows("averaging_cost") if row["who"] != "torch"]
    listed = []
    for row in found:
        words = f"{row['who']}: {row['what'].split(',')[0]}{', ' + row['link'] if row['link'] else ''}"
        listed.append((words, float(row["best, relative"]), row["best, relative"]))
    body, y = head(title, "50 million parameters. The upright line is torch.")
    bars, y = c.bars(y + 6, 1.02, listed, limit=1)
    return d.picture(title, ", ".join(f"{words} {shown}" for words, _, shown in listed), y, [*body, *bars])


def startup() -> str:
    title = "Start-up: milliseconds on top"
    listed = [
        (f"{row['command']}, above {row['above']}", float(row["extra ms"]), f"{row['extra ms']} ms") for row in rows("startup")
    ]
    body, y = head(title, "Medians of 15.")
    bars, y = c.bars(y + 6, max(value for _, value, _ in listed) * 1.06, listed)
    return d.picture(title, ", ".join(f"{words} {shown}" for words, _, shown in listed), y, [*body, *bars])


PICTURES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (rates, learning, frontier, growth, compressors, averaging, startup)
}


def draw(name: str) -> str:
    """One of the PICTURES as SVG."""
    return PICTURES[name]()


if __name__ == "__main__":
    for each in PICTURES:
        (HERE / f"{each}.svg").write_text(draw(each))
        print(f"drawn: docs/pictures/{each}.svg")
