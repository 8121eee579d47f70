"""Draw docs/pictures/mesh.svg: two islands of two ranks, as in docs/sharded.md, and what travels where."""

from pathlib import Path

import drawing as d

SHARDS, ISLANDS = 2, 2
PAINT = ("sky", "green")
RANK, HEIGHT, TOP, APART = 190, 84, 112, 232
TITLE = "Sharded inside an island, averaged between islands"


def rank(island: int, shard: int) -> list[str]:
    """One rank and what it holds."""
    x, y = place(island, shard)
    name = f"rank {island * SHARDS + shard}"
    held = d.box(f"fill-{PAINT[shard]}", x + 10, y + 36, RANK - 20, 36)
    return [
        d.box("package", x, y, RANK, HEIGHT, 6),
        d.text(x + RANK / 2, y + 25, name, "middle name"),
        held,
        d.text(x + RANK / 2, y + 60, f"shard {shard}", "on-sky middle" if shard == 0 else "on middle"),
    ]


def place(island: int, shard: int) -> tuple[float, float]:
    """The upper left corner of a rank."""
    wide = d.WIDTH - 2 * d.EDGE - 24
    return d.EDGE + 12 + shard * (wide - RANK) / (SHARDS - 1), TOP + APART * island


def island(number: int) -> list[str]:
    """Its frame, its ranks, and what travels inside it."""
    _, y = place(number, 0)
    frame = d.box("band", d.EDGE, y - 38, d.WIDTH - 2 * d.EDGE, HEIGHT + 56, 10)
    body = [frame, d.text(d.EDGE + 12, y - 12, f"island {number}: all-gather, reduce-scatter", "")]
    for shard in range(SHARDS - 1):
        left, right = place(number, shard)[0] + RANK, place(number, shard + 1)[0]
        body.append(arrows(left + 5, y + HEIGHT / 2, right - 5, y + HEIGHT / 2, "blue"))
    return body + [shape for shard in range(SHARDS) for shape in rank(number, shard)]


def arrows(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 2.5) -> str:
    """A line with a tip at both ends."""
    tip = f'<marker id="tip-{colour}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" '
    tip += f'orient="auto-start-reverse"><path class="fill-{colour}" d="M0 0L8 4L0 8z"/></marker>'
    ends = f' marker-start="url(#tip-{colour})" marker-end="url(#tip-{colour})"'
    return f"<defs>{tip}</defs>" + d.line(f"line-{colour}", f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", width, ends)


def draw() -> str:
    """The picture as SVG."""
    body = [d.text(d.EDGE, 32, TITLE, "title")]
    body += d.lines(d.EDGE, 57, "Each island holds one replica of the model.", "note")
    for number in range(ISLANDS):
        body += island(number)
    upper, lower = TOP + HEIGHT, TOP + APART
    for shard in range(SHARDS):
        x = place(0, shard)[0] + RANK / 2
        body.append(arrows(x, upper + 24, x, lower - 44, "red", 3.5))
    x = place(0, 0)[0] + RANK / 2
    middle = (upper + lower) / 2 - 4
    body.append(d.text(x + 16, middle - 4, "laconic averages the ranks", ""))
    body.append(d.text(x + 16, middle + d.LINE - 4, "that hold the same shard", ""))
    bottom = TOP + APART * (ISLANDS - 1) + HEIGHT + 58
    wire = d.line("line-blue", "M-12 0H12", 2.5)
    slow = d.line("line-red", "M-12 0H12", 3.5)
    words = [(wire, "torch's FSDP2, in every step: a fast network"), (slow, "laconic, by the strategy: a slow network")]
    samples, y = d.legend(bottom, words)
    described = (
        f"{ISLANDS} islands of {SHARDS} ranks. In an island each rank holds one shard; FSDP2 gathers parameters and scatters "
        "gradients among them in every step. Between islands, laconic averages the ranks that hold the same shard."
    )
    return d.picture(TITLE, described, y - 4, [*body, *samples])


if __name__ == "__main__":
    (Path(__file__).parent / "mesh.svg").write_text(draw())
    print("drawn: docs/pictures/mesh.svg")
