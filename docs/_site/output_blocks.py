"""Blocks of output: prose in them wraps, what stands in columns keeps its lines and scrolls by itself.

The width of columns goes to the style sheet, which makes their text smaller where that is enough for them to fit.
"""

import html
import re
from collections.abc import Iterator
from itertools import groupby

BLOCK = re.compile(r'(<div class="language-(?:console|text) highlight"><pre>(?:<span></span>)?<code>)(.*?)(</code>)', re.DOTALL)
TAG = re.compile(r"<[^>]*>")
DRAWN = re.compile(r"[\u2500-\u257f]")  # what draws the lines of tables
COLUMNS = re.compile(r"^ {8,}\S|\S {2,}\S|[\u2500-\u257f]")
WIDE = 100  # more than fits beside a table of contents
TERMINAL = 155  # where the terminal broke a line, this and the next word are longer


def with_columns(page: str) -> str:
    """A page whose blocks of output have each run of lines in columns in an element of its own."""
    return BLOCK.sub(lambda found: found[1] + "".join(_runs(found[2])) + found[3], page)


def has_wide_table(markdown: str) -> bool:
    """Whether a page shows a table that the terminal drew, and that needs the width of the page."""
    return any(len(line) > WIDE and DRAWN.search(line) for line in markdown.splitlines())


def _runs(code: str) -> Iterator[str]:
    for in_columns, lines in groupby(code.splitlines(), lambda line: _in_columns(_text(line))):
        run = list(lines)
        if not in_columns:
            yield from _joined(run)
            continue
        kind = "columns drawn" if any(DRAWN.search(line) for line in run) else "columns"
        width = max(len(_text(line)) for line in run)
        yield f'<span class="{kind}" tabindex="0" style="--columns: {width}">' + "\n".join(run) + "\n</span>"


def _in_columns(line: str) -> bool:
    return not line.startswith("$ ") and bool(COLUMNS.search(line))


def _joined(lines: list[str]) -> Iterator[str]:
    """Prose without the breaks that the terminal made: the browser makes its own."""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        word = _text(following).partition(" ")[0]
        broken = word not in ("", "-", "$") and len(_text(line)) + 1 + len(word) > TERMINAL
        yield line + (" " if broken else "\n")


def _text(line: str) -> str:
    return html.unescape(TAG.sub("", line))
