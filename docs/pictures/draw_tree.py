"""Draw docs/pictures/tree.svg: the packages of laconic and which imports which, from the real imports."""

import math
import tomllib
from collections import Counter
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
WIDTH, ROW, HEIGHT, GAP, MARGIN = 1000, 78, 44, 14, 16
WORDS = {
    "cli": "the command line",
    "auto": "import laconic.auto",
    "script": "a script as it is",
    "lab": "comparisons over a link",
    "report": "records to table and page",
    "compat": "torch's names",
    "elastic": "workers that come and go",
    "integrations": "Lightning, Accelerate, Transformers",
    "advisor": "which strategy, before a run",
    "probing": "a network, measured",
    "checkpoint": "whole runs on disk",
    "cost": "how long a step takes",
    "meter": "counts while it runs",
    "run": "attach, Run, the engine",
    "forecast": "bytes before a run",
    "gradients": "averaging inside backward",
    "local": "averaging between steps",
    "ranks": "what ranks know of each other",
    "strategies": "when, with whom, what, then",
    "reducers": "how it is averaged on few bytes",
    "kernels": "arithmetic, compiled",
    "comm": "collectives, exchanges, the pipeline",
    "_torch": "the one door to torch's private parts",
}
STYLE = """
text { font: 13px system-ui, sans-serif; text-anchor: middle; fill: #1f2328 }
text.name { font-weight: 600; font-size: 15px }
rect { fill: #ddf4ff; stroke: #0969da }
path { fill: none; stroke: #6e7781; stroke-width: 1.2; marker-end: url(#tip) }
#tip path { fill: #6e7781; stroke: none; marker-end: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  rect { fill: #121d2f; stroke: #4493f8 }
  path { stroke: #9198a1 }
  #tip path { fill: #9198a1 }
}"""


def layers() -> list[list[str]]:
    """The rows of the picture, highest first: those of the contract that `make check` holds."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [row.split(" | ") for row in contracts[0]["layers"]]


def imports(names: list[str]) -> set[tuple[str, str]]:
    """(importer, imported) between packages, without those that follow from others."""
    graph = grimp.build_graph("laconic", exclude_type_checking_imports=True)
    for name in names:
        graph.squash_module(f"laconic.{name}")
    direct = {name: {other for other in names if _imports(graph, name, other)} for name in names}
    return {
        (name, other)
        for name in names
        for other in direct[name]
        if not any(other in _reached(direct, between) for between in direct[name] - {other})
    }


def _imports(graph: grimp.ImportGraph, name: str, other: str) -> bool:
    return name != other and graph.direct_import_exists(importer=f"laconic.{name}", imported=f"laconic.{other}")


def _reached(direct: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        new = direct[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def draw() -> str:
    """The picture as SVG."""
    rows, width = layers(), (WIDTH - 2 * MARGIN - 240) / 2
    place: dict[str, tuple[float, float]] = {}
    shapes: list[str] = []
    for number, row in enumerate(rows):
        y = MARGIN + number * ROW
        total = len(row) * width + (len(row) - 1) * GAP * 6
        for index, name in enumerate(row):
            x = (WIDTH - total) / 2 + index * (width + GAP * 6)
            place[name] = (x + width / 2, y)
            middle = x + width / 2
            shapes.append(f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="6"/>')
            shapes.append(f'<text class="name" x="{middle:.0f}" y="{y + 18}">{escape(name)}</text>')
            shapes.append(f'<text x="{middle:.0f}" y="{y + 36}">{escape(WORDS[name])}</text>')
    lines, lanes = [], Counter()  # type: list[str], Counter[str]
    for upper, lower in sorted(imports([name for row in rows for name in row])):
        (x1, y1), (x2, y2) = place[upper], place[lower]
        if round((y2 - y1) / ROW) == 1:
            lines.append(f'<path d="M{x1:.0f} {y1 + HEIGHT}L{x2:.0f} {y2 - 2}"/>')
            continue
        # A line that passes other rows runs between the columns, or beside them.
        crosses = (x1 - WIDTH / 2) * (x2 - WIDTH / 2) < 0
        side = "middle" if crosses else "left" if x1 < WIDTH / 2 else "right"
        lane = {"middle": WIDTH / 2 - 20, "left": 78.0, "right": WIDTH - 78.0}[side]
        lane += {"middle": 14, "left": -18, "right": 18}[side] * lanes[side]
        lanes[side] += 1
        towards = [math.copysign(width / 2, lane - x) for x in (x1, x2)]
        start, end = f"M{x1 + towards[0]:.0f} {y1 + HEIGHT / 2:.0f}", f"{x2 + towards[1]:.0f}"
        lines.append(f'<path d="{start}H{lane:.0f}V{y2 + HEIGHT / 2 + 6 * (lanes[side] - 2):.0f}H{end}"/>')
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0 0L8 4L0 8z"/></marker>'
    height = 2 * MARGIN + (len(rows) - 1) * ROW + HEIGHT
    body = "\n".join([*lines, *shapes])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="the packages of laconic; arrows point to what a package imports">\n<style>{STYLE}\n</style>\n'
        f"<defs>{tip}</defs>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    (ROOT / "docs" / "pictures" / "tree.svg").write_text(draw())
