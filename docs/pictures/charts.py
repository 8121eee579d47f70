"""Charts as SVG: marks in rows, bars, and points or lines over two axes. They are made for a phone: words above, not beside."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import drawing as d

LEFT, RIGHT = 66, d.WIDTH - 24
PAINTS = ("blue", "red", "green", "orange", "pink", "sky", "ink")
SHAPES = tuple(d.SHAPES)


class Axis(NamedTuple):
    """Numbers from `low` to `high`, and those at which there is a line."""

    low: float
    high: float
    ticks: Sequence[float]
    title: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """Where it is, from 0 to 1."""
        low, high, at = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return (at - low) / (high - low)


class Point(NamedTuple):
    """A value, with its standard error or deviation."""

    x: float
    y: float
    error: float = 0.0


class Series(NamedTuple):
    """Points that belong together."""

    name: str
    points: Sequence[Point]
    colour: str
    shape: str = "circle"
    dash: str = ""
    joined: bool = False

    @property
    def sample(self) -> str:
        """What the legend shows."""
        lead = d.line(f"line-{self.colour}", "M-12 0H12", 2.5, self.dash) if self.joined else ""
        return lead + d.mark(self.shape, self.colour, 0, 0)


class Row(NamedTuple):
    """A line of words, and the marks below it: colour, shape and value of each."""

    words: str
    values: Sequence[tuple[str, str, Point]]
    strong: bool = False


def rows(
    top: float, axis: Axis, found: Sequence[Row], x0: float = d.EDGE + 8, limit: float | None = None
) -> tuple[list[str], float]:
    """Marks on a line for each row; the y below them."""
    wide, height = RIGHT - x0, d.LINE + 20
    bottom = top + height * len(found) + 4
    body = [d.line("line-rule", f"M{x0 + wide * axis.share(tick):.1f} {top - 16:.0f}V{bottom:.0f}") for tick in axis.ticks]
    body += [d.text(x0 + wide * axis.share(tick), bottom + 20, f"{tick:g}", "note middle") for tick in axis.ticks]
    for place, row in enumerate(found):
        y = top + height * place
        if limit is not None:
            body.append(d.line("line-ink", f"M{x0 + wide * axis.share(limit):.1f} {y + 5:.0f}v20", 2.5))
        body.append(d.text(d.EDGE, y, row.words, "name" if row.strong else ""))
        spread = [x0 + wide * axis.share(point.x) for *_, point in row.values]
        body.append(d.line("line-grey", f"M{min(spread):.1f} {y + 15:.0f}H{max(spread):.1f}", 1))
        for (colour, shape, point), x in zip(row.values, spread, strict=True):
            body += _whiskers(colour, [(x0 + wide * axis.share(each), y + 15) for each in _ends(point.x, point.error, axis)], 0)
            body.append(d.mark(shape, colour, x, y + 15))
    body.append(d.text(x0 + wide / 2, bottom + 44, axis.title, "note middle"))
    return body, bottom + 44


def bars(
    top: float, high: float, found: Sequence[tuple[str, float, str]], limit: float | None = None
) -> tuple[list[str], float]:
    """A bar under each line of words, with its value in words; the y below them."""
    x0, wide, height = d.EDGE, RIGHT - d.EDGE - 66, d.LINE + 34
    body: list[str] = []
    for place, (words, value, shown) in enumerate(found):
        y, end = top + height * place, x0 + max(1.0, wide * value / high)
        body += [
            d.text(x0, y, words),
            d.box("fill-blue", x0, y + 8, end - x0, 22),
            d.text(d.WIDTH - d.EDGE, y + 25, shown, "end"),
        ]
    bottom = top + height * len(found) - 12
    if limit is not None:
        x = x0 + wide * limit / high
        # In pieces between the words, so that it crosses none.
        body += [d.line("line-ink", f"M{x:.1f} {top + height * place + 5:.0f}v28", 2.5) for place in range(len(found))]
    return body, bottom


def plane(top: float, height: float, x: Axis, y: Axis, found: Sequence[Series]) -> tuple[list[str], float]:
    """Points or lines over two axes; the y below them."""
    bottom = top + height
    body: list[str] = []

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * x.share(point[0]), bottom - height * y.share(point[1])

    for tick in x.ticks:
        over, _ = at((tick, y.low))
        body += [
            d.line("line-rule", f"M{over:.1f} {top:.0f}V{bottom:.0f}"),
            d.text(over, bottom + 22, f"{tick:g}", "note middle"),
        ]
    for tick in y.ticks:
        _, level = at((x.low, tick))
        body += [d.line("line-rule", f"M{LEFT} {level:.1f}H{RIGHT}"), d.text(LEFT - 8, level + 6, f"{tick:g}", "note end")]
    for series in found:
        places = [at((point.x, point.y)) for point in series.points]
        if series.joined:
            path = "L".join(f"{d.number(over)} {d.number(level)}" for over, level in places)
            body.append(d.line(f"line-{series.colour}", f"M{path}", 2.2, series.dash))
        for point, (over, level) in zip(series.points, places, strict=True):
            ends = [at((point.x, each)) for each in _ends(point.y, point.error, y)]
            body += [*_whiskers(series.colour, ends, 90), d.mark(series.shape, series.colour, over, level)]
    body.append(d.text((LEFT + RIGHT) / 2, bottom + 47, x.title, "note middle"))
    return body, bottom + 47


DASHES = ("", ' stroke-dasharray="3 4"', ' stroke-dasharray="9 5"')


def _ends(value: float, error: float, axis: Axis) -> list[float]:
    return [max(axis.low, value - error), min(axis.high, value + error)] if error else []


def _whiskers(colour: str, ends: Sequence[tuple[float, float]], turn: int) -> list[str]:
    """A line from one end to the other, with a bar across each."""
    if not ends:
        return []
    (x1, y1), (x2, y2) = ends
    across = "h-4h8" if turn else "v-4v8"
    paths = [f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", *(f"M{x:.1f} {y:.1f}{across}" for x, y in ends)]
    return [d.line(f"line-{colour}", "".join(paths), 1.5)]
