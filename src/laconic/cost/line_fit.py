"""A line through times that a few outliers don't move: alpha + beta * bytes."""

import math
from collections.abc import Sequence
from itertools import combinations

Point = tuple[float, float]
"""A size and its seconds."""


def line(points: Sequence[Point]) -> tuple[float, float]:
    """alpha, beta >= 0 that make the sum of |log((alpha + beta * size) / seconds)| least, of lines through two of the points.

    Ratios count, because sizes span five decades, and the microseconds of the smallest matter as much as the seconds of the
    largest. Their logarithm counts, so that half as long is as wrong as twice as long; by plain relative errors a line that
    ignores large sizes would never be wrong by more than 1. Absolute values count and not squares, so a size that is off pulls
    no harder the further it is off. What is not guarded against is a largest size that is off: beta may rest on it alone, so
    it can't be told from an outlier. That is what medians over the repeats are for.

    A line of least absolute errors goes through two of the points, and they are few, so all pairs are tried.

    >>> alpha, beta = line([(1e3, 1.001e-3), (1e4, 1.01e-3), (1e5, 1.1e-3), (1e6, 99.0), (1e7, 1.1e-2)])
    >>> round(alpha, 5), round(1 / beta / 1e9, 2)
    (0.001, 1.0)
    """
    pairs = [(one, other) for one, other in combinations(points, 2) if one[0] != other[0]]
    assert pairs, "two sizes at least"
    candidates = [found for one, other in pairs for found in _through(one, other)]
    return min(candidates, key=lambda found: sum(abs(math.log((found[0] + found[1] * size) / took)) for size, took in points))


def errors(found: tuple[float, float], points: Sequence[Point]) -> list[float]:
    """How far off the line is at each point: by how much the larger of line and time is above the other, as a share of it.

    >>> [round(off, 6) for off in errors((0.0, 1.0), [(2.0, 2.0), (2.0, 3.0), (3.0, 2.0), (2.0, 30.0)])]
    [0.0, 0.5, 0.5, 14.0]
    """
    ratios = [(found[0] + found[1] * size) / took for size, took in points]
    return [max(ratio, 1 / ratio) - 1 for ratio in ratios]


def _through(one: Point, other: Point) -> list[tuple[float, float]]:
    """The line through two points; where a part of it is negative, those without that part through either."""
    beta = (other[1] - one[1]) / (other[0] - one[0])
    alpha = one[1] - beta * one[0]
    if beta < 0:
        return [(one[1], 0.0), (other[1], 0.0)]
    if alpha < 0:
        return [(0.0, one[1] / one[0]), (0.0, other[1] / other[0])]
    return [(alpha, beta)]
