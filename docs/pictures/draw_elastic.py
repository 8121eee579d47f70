"""Draw docs/pictures/elastic.svg: four workers, two syncs, and one that dies in the first of them."""

from pathlib import Path

STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #24292f }
    .title { font-weight: 600; font-size: 15px }
    .note { fill: #57606a }
    .on { fill: #ffffff }
    .card { fill: #ffffff; stroke: #d0d7de }
    .compute { fill: #0969da }
    .wire { fill: #bc4c00 }
    .heal { fill: #6e44c0 }
    .anchor { fill: #1a7f37 }
    .wait { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
    .dead { stroke: #cf222e; stroke-width: 3 }
    .gone { fill: none; stroke: #8c959f; stroke-dasharray: 2 5 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      .note { fill: #9aa4af }
      .on { fill: #ffffff }
      .card { fill: #0d1117; stroke: #3d444d }
      .compute { fill: #1f6feb }
      .heal { fill: #8256d0 }
      .anchor { fill: #2ea043 }
      .dead { stroke: #f85149 }
    }
"""
WIDTH, ROW, TOP = 1000, 56, 92
WORKERS = ["a", "b", "c", "d"]


def box(kind: str, worker: int, start: int, end: int, text: str) -> str:
    y = TOP + ROW * worker
    ink = "" if kind == "wait" else ' class="on"'
    return (
        f'<rect class="{kind}" x="{start}" y="{y}" width="{end - start - 2}" height="32" rx="3"/>\n'
        f'<text{ink} x="{(start + end - 2) / 2}" y="{y + 20.5}" text-anchor="middle">{text}</text>'
    )


def draw() -> str:
    height = TOP + ROW * len(WORKERS) + 118
    parts = [f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>']
    parts.append('<text class="title" x="20" y="30">One sync with a death in it, and the next one</text>')
    parts.append('<text class="note" x="20" y="50">Time goes to the right. Between syncs nobody waits for anybody.</text>')
    for place, name in enumerate(WORKERS):
        y = TOP + ROW * place
        parts.append(f'<text x="20" y="{y + 20}">worker {name}</text>')
        parts.append(box("compute", place, 100, 240 if name != "c" else 272, "local steps"))
        if name != "c":
            parts.append(box("wait", place, 240, 274, ""))
        parts.append(box("wire", place, 274, 350, "quorum"))
        if name == "d":
            parts.append(box("wire", place, 350, 410, "deltas"))
            parts.append(f'<path class="dead" d="M{414} {y + 6}l20 20m0 -20l-20 20"/>')
            parts.append(f'<path class="gone" d="M440 {y + 16}H700"/>')
            parts.append(f'<text class="note" x="560" y="{y + 36}" text-anchor="middle">started again</text>')
            parts.append(box("heal", place, 776, 850, "heals"))
        else:
            parts.append(box("wire", place, 350, 430, "deltas"))
            parts.append(box("wait", place, 430, 490, "lost"))
            parts.append(box("compute", place, 490, 690, "local steps"))
            parts.append(box("wait", place, 776, 850, ""))
        parts.append(box("wire", place, 700, 776, "quorum"))
        parts.append(box("wire", place, 850, 912, "deltas"))
        parts.append(box("anchor", place, 912, 972, "commit"))
    bottom = TOP + ROW * len(WORKERS)
    notes = [
        "Worker d dies in the first sync. Nobody has written anything: a, b and c drop it, keep what they learnt and train on.",
        "In the second, d takes the state of a peer. The others' deltas are of two periods; d brings none, so its weight is 0.",
    ]
    for line, text in enumerate(notes):
        parts.append(f'<text class="note" x="20" y="{bottom + 20 + 20 * line}">{text}</text>')
    legend = [
        ("compute", "compute"),
        ("wire", "network"),
        ("heal", "state of a peer"),
        ("anchor", "written by all"),
        ("wait", "waits"),
    ]
    for place, (kind, text) in enumerate(legend):
        x = 20 + 150 * place
        parts.append(f'<rect class="{kind}" x="{x}" y="{bottom + 76}" width="18" height="14" rx="3"/>')
        parts.append(f'<text x="{x + 26}" y="{bottom + 88}">{text}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'aria-labelledby="title description">\n<title id="title">One sync with a death in it</title>\n'
        '<desc id="description">Four workers make local steps and come together. Worker d dies while deltas are exchanged: the '
        "others drop the sync and train on. At the next sync d is back, takes the state of a peer, and all commit together."
        f"</desc>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    (Path(__file__).parent / "elastic.svg").write_text(draw())
