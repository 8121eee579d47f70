"""What our drawings share: a panel of their own that is readable on a light and on a dark page, text sizes and colours.

A page shows a drawing as an `<img>`, which may not see the page's theme: some browsers tell it only the theme of the operating
system, and the two may differ. So each drawing brings its own background. A page shows it up to 600 px wide, a phone about 358:
text has 19 units, which are 11 px there, and 15 where there is more room. Layouts are made for 19.

Colours are those of Okabe and Ito for colour-blind readers, made darker or lighter until they stand out from the panel; what a
colour means is also said by a place, a shape or a word.
"""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, EDGE = 600, 14
SIZE, LINE = 19, 25  # of text on a phone, and from one line of it to the next
CHARACTER = 10.8  # the width of one, in a wide font
FAMILY = 'system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
# Names of colours, on a light panel and on a dark one.
COLOURS = {
    "panel": ("#ffffff", "#15181e"),
    "border": ("#d0d7de", "#444c56"),
    "ink": ("#1f2328", "#e6edf3"),
    "note": ("#57606a", "#a8b1bb"),
    "tint": ("#eaf4fc", "#16283a"),
    "rule": ("#d8dee4", "#39414a"),
    "grey": ("#8b949e", "#8b949e"),
    "sky": ("#3a93d0", "#7cc4f5"),
    "blue": ("#00568a", "#2d86c4"),
    "orange": ("#c98300", "#f0b13c"),
    "red": ("#c44e00", "#f08048"),
    "green": ("#007f5c", "#22b78b"),
    "pink": ("#a3487a", "#e09ac2"),
}
ON, ON_SKY = ("#ffffff", "#0d1015"), ("#0d1015", "#0d1015")  # text on a colour
SHAPES = {  # around the origin, about 12 units across
    "circle": "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0z",
    "square": "M-5.5-5.5h11v11h-11z",
    "triangle": "M0-7L7 5.5H-7z",
    "diamond": "M0-7.5L7.5 0L0 7.5L-7.5 0z",
    "cross": "M-6-3l3-3l3 3l3-3l3 3l-3 3l3 3l-3 3l-3-3l-3 3l-3-3l3-3z",
    "down": "M0 7L7-5.5H-7z",
}


def style() -> str:
    """Classes: `fill-`, `line-` and a colour's name; of text `title`, `name`, `note`, `on`, `on-sky`, and `middle`, `end`."""
    text = f"text {{ font: {SIZE}px {FAMILY}; fill: var(--ink) }} .title, .name {{ font-weight: 600 }} "
    text += ".note { fill: var(--note) } .on { fill: var(--on) } .on-sky { fill: var(--on-sky) } "
    text += ".middle { text-anchor: middle } .end { text-anchor: end }"
    colours = {**COLOURS, "on": ON, "on-sky": ON_SKY}
    light, dark = ("; ".join(f"--{name}: {pair[theme]}" for name, pair in colours.items()) for theme in (0, 1))
    classes = " ".join(
        f".fill-{name} {{ fill: var(--{name}) }} .line-{name} {{ stroke: var(--{name}); fill: none }}" for name in COLOURS
    )
    return (
        f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n{text}\n{classes}\n"
        ".package { fill: var(--tint); stroke: var(--sky) } .band { fill: none; stroke: var(--border) } "
        ".panel { fill: var(--panel); stroke: var(--border) }\n"
        ".waits { fill: none; stroke: var(--grey); stroke-dasharray: 4 3 }\n"
        "@media (min-width: 500px) { text { font-size: 15px } .title { font-size: 17px } }"
    )


def picture(title: str, description: str, height: float, body: Iterable[str]) -> str:
    """The whole file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'role="img" aria-labelledby="title description">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="description">{escape(description)}</desc>\n<style>\n{style()}\n</style>\n'
        f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def number(value: float) -> str:
    """A coordinate: to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """Words whose line is at y."""
    kind = f' class="{classes}"' if classes else ""
    return f'<text{kind} x="{number(x)}" y="{number(y)}">{escape(words)}</text>'


def lines(x: float, y: float, words: str, classes: str = "", width: float = WIDTH - 2 * EDGE) -> list[str]:
    """Words in as many lines as it takes, the first at y."""
    return [text(x, y + LINE * place, line, classes) for place, line in enumerate(wrapped(words, width))]


def wrapped(words: str, width: float = WIDTH - 2 * EDGE) -> list[str]:
    """Lines that fit into the width."""
    found: list[str] = []
    for word in words.split():
        if found and len(f"{found[-1]} {word}") * CHARACTER <= width:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def box(classes: str, x: float, y: float, width: float, height: float, radius: float = 3) -> str:
    """A rectangle."""
    return (
        f'<rect class="{classes}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
        f'rx="{number(min(radius, width / 2))}"/>'
    )


def block(classes: str, x: float, y: float, width: float, height: float, words: str) -> list[str]:
    """A rectangle with words in its middle."""
    kind = {"waits": "middle", "fill-sky": "on-sky middle"}.get(classes, "on middle")
    return [box(classes, x, y, width, height), text(x + width / 2, y + height / 2 + 6, words, kind)]


def line(classes: str, path: str, width: float = 1.2, more: str = "") -> str:
    """A path that is not filled."""
    return f'<path class="{classes}" d="{path}" stroke-width="{number(width)}"{more}/>'


def mark(shape: str, colour: str, x: float, y: float) -> str:
    """One of the SHAPES."""
    return f'<path class="fill-{colour}" transform="translate({number(x)} {number(y)})" d="{SHAPES[shape]}"/>'


def legend(y: float, items: Sequence[tuple[str, str]], left: float = EDGE) -> tuple[list[str], float]:
    """Samples, each a shape around (0, 0) of about 24 units, and their words, in as many lines as it takes; and the y below."""
    body, x = [], left
    for sample, words in items:
        width = 40 + len(words) * CHARACTER
        if x > left and x + width > WIDTH - EDGE:
            x, y = left, y + LINE
        body += [f'<g transform="translate({number(x + 12)} {number(y - 6)})">{sample}</g>', text(x + 30, y, words)]
        x += width + 16
    return body, y + LINE
