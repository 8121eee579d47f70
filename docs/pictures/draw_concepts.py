"""Draw docs/pictures/concepts.svg: step, round, exchange, sync, anchor and delta on two ranks."""

from pathlib import Path

import drawing as d

LEFT, HEIGHT, ROW = 92, 34, 42
STEP, SYNC, PERIOD = 36, 92, 250  # of the lower half
RANKS = ("rank 0", "network", "rank 1")
TITLE = "Steps, rounds, exchanges and syncs on two ranks"


def names(top: float) -> list[str]:
    """Of the three rows."""
    return [d.text(d.EDGE, top + ROW * place + 23, name) for place, name in enumerate(RANKS)]


def bracket(x1: float, x2: float, y: float, words: str) -> list[str]:
    """What lies between two times has a name."""
    return [d.line("line-note", f"M{x1} {y}v6H{x2}v-6"), d.text((x1 + x2) / 2, y + 26, words, "middle")]


def gradients(top: float) -> list[str]:
    """One step that averages gradients, and the beginning of the next."""
    body = names(top)
    for place in (0, 2):
        y = top + ROW * place
        cells = (("fill-sky", 0, 90, "forward"), ("fill-blue", 92, 206, "backward"), ("waits", 208, 304, "wait"))
        for kind, begin, end, words in (*cells, ("fill-pink", 306, 386, "update"), ("fill-sky", 404, 494, "forward")):
            body += d.block(kind, LEFT + begin, y, end - begin, HEIGHT, words)
    y = top + ROW
    body += d.block("fill-red", LEFT + 116, y, 90, HEIGHT, "round 1")
    body += d.block("fill-red", LEFT + 208, y, 96, HEIGHT, "round 2")
    body.append(d.text(LEFT + 108, y + 23, "exchange:", "end"))
    body += bracket(LEFT, LEFT + 386, top + 3 * ROW + 2, "step 1")
    return [*body, d.text(LEFT + 449, top + 3 * ROW + 28, "step 2", "middle")]


def local(top: float) -> list[str]:
    """Two periods of four steps, each with a sync behind it."""
    body = names(top)
    for period in range(2):
        x = LEFT + PERIOD * period
        for place in (0, 2):
            for step in range(4):
                words = str(4 * period + step + 1)
                body += d.block("fill-blue", x + STEP * step, top + ROW * place, STEP - 2, HEIGHT, words)
        body.append(d.box("fill-red", x + 4 * STEP + 4, top, SYNC, 2 * ROW + HEIGHT))
        for line, words in enumerate(("sync:", "mean of", "deltas")):
            body.append(d.text(x + 4 * STEP + 4 + SYNC / 2, top + 38 + d.LINE * line, words, "on middle"))
        body += bracket(x, x + 4 * STEP - 2, top + 3 * ROW + 2, "a delta")
        end = x + 4 * STEP + 4 + SYNC
        body += [d.mark("diamond", "green", end - 8, top - 16), d.text(end - 20, top - 10, "new anchor", "end")]
    return [*body, d.mark("diamond", "green", LEFT + 8, top - 16), d.text(LEFT + 20, top - 10, "anchor")]


def draw() -> str:
    """The picture as SVG."""
    body = [d.text(d.EDGE, 32, "Gradients, averaged in every step: bf16()", "title")]
    body += (words := d.lines(d.EDGE, 58, "An exchange has two rounds here. It begins while the backward still runs.", "note"))
    y = 58 + d.LINE * len(words) - 6
    body += gradients(y)
    y += 3 * ROW + 50
    body += [d.line("line-rule", f"M{d.EDGE} {y}H{d.WIDTH - d.EDGE}")]
    body.append(d.text(d.EDGE, y + 34, "Local updates: diloco(4)", "title"))
    note = "Each rank makes steps of its own. Every 4 steps, a sync gives all ranks the same anchor."
    body += (words := d.lines(d.EDGE, y + 60, note, "note"))
    y += 60 + d.LINE * len(words) + 26
    body += local(y)
    y += 3 * ROW + 56
    body += d.lines(d.EDGE, y, "delta = anchor − parameters. Time goes to the right.", "note")
    described = (
        "Above: in each step both ranks compute forward and backward, an exchange of two rounds averages the gradients, then "
        "the optimizer updates. Below: both ranks make four steps alone, then a sync averages their deltas and gives both the "
        "same new anchor."
    )
    return d.picture(TITLE, described, y + 16, body)


if __name__ == "__main__":
    (Path(__file__).parent / "concepts.svg").write_text(draw())
    print("drawn: docs/pictures/concepts.svg")
