"""Draw docs/pictures/tree.svg: the packages of laconic and which imports which, from the real imports.

Lines between so many boxes can't be followed; so each box names what it imports.
"""

import tomllib
from pathlib import Path

import drawing as d
import grimp

ROOT = Path(__file__).parents[2]
GAP, INSIDE, BAND = 8, 10, 6  # between boxes; from a box to its words; around the boxes of a row
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
    rows = layers()
    below: dict[str, list[str]] = {name: [] for row in rows for name in row}
    order = list(below)
    for name, other in sorted(imports(order), key=lambda pair: order.index(pair[1])):
        below[name].append(other)
    title = "The packages of laconic"
    intro = "A package imports only from rows below its own. → names what it imports, without what follows from others."
    body = [d.text(d.EDGE, 32, title, "title"), *(notes := d.lines(d.EDGE, 58, intro, "note"))]
    y = 58 + d.LINE * len(notes) - 4
    for row in rows:
        top, columns = y, min(2, len(row))
        width = (d.WIDTH - 2 * d.EDGE - 2 * BAND - GAP * (columns - 1)) / columns
        shapes: list[str] = []
        y += BAND
        for start in range(0, len(row), 2):
            found = [_words(name, below[name], width - 2 * INSIDE) for name in row[start : start + 2]]
            height = d.LINE * max(map(len, found)) + 12
            for place, words in enumerate(found):
                x = d.EDGE + BAND + place * (width + GAP)
                shapes.append(d.box("package", x, y, width, height, 6))
                shapes += [d.text(x + INSIDE, y + d.LINE * (line + 1) - 2, *each) for line, each in enumerate(words)]
            y += height + BAND
        body += [d.box("band", d.EDGE, top, d.WIDTH - 2 * d.EDGE, y - top, 8), *shapes]
        y += GAP
    described = ". ".join(f"{name}: {WORDS[name]}; imports {', '.join(below[name]) or 'none'}" for name in order)
    return d.picture(title, described, y + 2, body)


def _words(name: str, below: list[str], width: float) -> list[tuple[str, str]]:
    """The lines of a box, each with its class."""
    found = [(name, "name"), *((line, "") for line in d.wrapped(WORDS[name], width))]
    return [*found, *((line, "note") for line in d.wrapped(f"→ {', '.join(below)}", width) if below)]


if __name__ == "__main__":
    (ROOT / "docs" / "pictures" / "tree.svg").write_text(draw())
