"""Draw docs/pictures/elastic.svg: four workers, two syncs, and one that dies in the first of them."""

from collections.abc import Sequence
from pathlib import Path

import drawing as d

WORKERS = ("a", "b", "c", "d")
ROW, HEIGHT, LEFT = 44, 34, 40
TITLE = "One sync with a death in it, and the next one"
Cell = tuple[str, float, float, str]  # class, begin, end, words
STEPS, DELTAS = (("fill-blue", 0, 175, "local steps"), ("fill-red", 290, 375, "deltas"))
FIRST: dict[str, Sequence[Cell]] = {
    worker: [*steps, ("fill-red", 205, 288, "quorum"), DELTAS, ("waits", 377, 440, "lost"), ("fill-blue", 442, 546, "steps")]
    for worker, steps in {
        "a": [STEPS, ("waits", 177, 203, "")],
        "b": [STEPS, ("waits", 177, 203, "")],
        "c": [("fill-blue", 0, 203, "local steps")],
    }.items()
}
FIRST["d"] = [STEPS, ("waits", 177, 203, ""), ("fill-red", 205, 288, "quorum"), ("fill-red", 290, 360, "deltas")]
SYNC: Sequence[Cell] = [("fill-red", 372, 454, "deltas"), ("fill-green", 456, 546, "commit")]
SECOND: dict[str, Sequence[Cell]] = {
    worker: [("fill-blue", 0, 185, "local steps"), ("fill-red", 187, 280, "quorum"), ("waits", 282, 370, ""), *SYNC]
    for worker in "abc"
}
SECOND["d"] = [("fill-red", 187, 280, "quorum"), ("fill-pink", 282, 370, "heals"), *SYNC]


def workers(top: float, cells: dict[str, Sequence[Cell]]) -> list[str]:
    """A row for each of them."""
    body: list[str] = []
    for place, name in enumerate(WORKERS):
        y = top + ROW * place
        body.append(d.text(d.EDGE, y + 23, name))
        for kind, begin, end, words in cells[name]:
            body += d.block(kind, LEFT + begin, y, end - begin, HEIGHT, words)
    return body


def draw() -> str:
    """The picture as SVG."""
    body = [d.text(d.EDGE, 32, TITLE, "title"), d.text(d.EDGE, 57, "Four workers; time goes to the right.", "note")]
    y = 76
    body += workers(y, FIRST)
    dead = y + ROW * 3
    body += [
        d.line("line-ink", f"M{LEFT + 364} {dead + 7}l20 20m0 -20l-20 20", 4),
        d.line("line-grey", f"M{LEFT + 396} {dead + 17}H{LEFT + 546}", 1.5, ' stroke-dasharray="2 5"'),
    ]
    y += ROW * len(WORKERS) + 18
    first = (
        "Worker d dies in the first sync. Nobody has written anything: a, b and c drop it, keep what they learnt and train on."
    )
    body += (words := d.lines(d.EDGE, y, first, "note"))
    y += d.LINE * len(words)
    body += [d.line("line-rule", f"M{d.EDGE} {y - 6}H{d.WIDTH - d.EDGE}")]
    body += workers(y + 12, SECOND)
    body.append(d.text(LEFT, y + 12 + ROW * 3 + 23, "started again", "note"))
    y += ROW * len(WORKERS) + 30
    second = (
        "In the next, d takes the state of a peer. The others' deltas are of two periods; d brings none, so its weight is 0."
    )
    body += (words := d.lines(d.EDGE, y, second, "note"))
    kinds = {"blue": "compute", "red": "network", "pink": "state of a peer", "green": "written by all"}
    samples = [(d.box(f"fill-{paint}", -12, -9, 24, 18), words_) for paint, words_ in kinds.items()]
    samples.append((d.box("waits", -12, -9, 24, 18), "waits"))
    marks, y = d.legend(y + d.LINE * len(words) + 8, samples)
    described = (
        "Four workers make local steps and come together. Worker d dies while deltas are exchanged: the others drop the sync "
        "and train on. At the next sync d is back, takes the state of a peer, and all commit together."
    )
    return d.picture(TITLE, described, y - 6, [*body, *marks])


if __name__ == "__main__":
    (Path(__file__).parent / "elastic.svg").write_text(draw())
    print("drawn: docs/pictures/elastic.svg")
