"""Markdown as this project writes it, for git hosts and in docstrings, made into what Python-Markdown takes."""

import inspect
import re
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*(\w*)\s*$")
ITEM = re.compile(r"^ *([-*]|\d+\.) +(?=\S)")
WITHIN = re.compile(r" {2,3}(?![-* ]|\d+\. )\S")
NAMED = re.compile(r"^ *`[^`]+`(?:,? (?:and )?`[^`]+`)*: ")  # an argument, and what it is
LABELS = "Maths|Bytes|Memory|Papers?|Not|Known|Biased|Unbiased|Rounds|Raises|Returns|Needs|Limits|Arguments|Fields|Examples?"
LABEL = re.compile(rf"^({LABELS}):(?= |$)")
LATER_LABEL = re.compile(r"(?<=[.;]) +(?=(?:Maths|Bytes|Memory|Papers?): )")
CALLS = re.compile(
    r"^(from [\w.]+ import |import |[\w.]+\(|laconic [a-z-]+(?= |$))"
)  # code, where all lines of a paragraph are
ARXIV = re.compile(r"(?<![\[/\w])arXiv:(\d{4}\.\d{4,5})")

Rewrite = Callable[[str], str]


def for_site(text: str, prose: Rewrite) -> str:
    """A page as git hosts read it; `prose` is applied to each line outside of blocks of code."""
    out: list[str] = [""]
    fence, pad, within, in_list = "", "", False, False
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        mark = FENCE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) and not mark[2] else fence
            out.append(pad + line if line else line)
            continue
        pad = "  " if in_list and WITHIN.match(line) and not out[-1] else ""  # a block in an item: here it takes 4 spaces
        if mark:
            fence = mark[1]
            out.append(pad + line[: mark.end(1)] + language(mark[2], following))
            continue
        item = bool(ITEM.match(line))
        starts = (item and (within or not in_list)) or (line.startswith("|") and not out[-1].startswith("|"))
        if starts and out[-1].strip():  # elsewhere these end a paragraph, in Python-Markdown they are a part of it
            out.append("")
        in_list = item or (in_list and (not line or line.startswith(" ") or bool(out[-1].strip())))
        within = bool(pad) or (within and bool(line) and not item)  # a paragraph that belongs to an item
        out.append(pad + prose(line))
    return "\n".join(out[1:]) + "\n"


def language(given: str, first: str) -> str:
    """What a block of code is in. Sessions have prompts, which are not copied."""
    if first.lstrip().startswith(">>> "):
        return "pycon"
    return given or ("console" if first.startswith("$ ") else "text")


def from_docstring(text: str, prose: Rewrite) -> str:
    """A docstring: prose, what is labelled, arguments one below the other, code that is indented, and sessions."""
    blocks = "\n\n".join(map(_block, _joined(re.split(r"\n\s*\n", inspect.cleandoc(text)))))
    return for_site(blocks, lambda line: prose(ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", line)))


def _joined(blocks: list[str]) -> Iterator[str]:
    """Blocks, with sessions and code that go on after an empty line put together."""
    kept = ""
    for block in filter(None, blocks):
        if kept and _is_code(kept) and _is_code(block) and _is_session(kept) == _is_session(block):
            kept = f"{kept}\n\n{block}"
            continue
        if kept:
            yield kept
        kept = block
    if kept:
        yield kept


def _is_session(block: str) -> bool:
    return block.lstrip().startswith(">>> ")


def _is_code(block: str) -> bool:
    """Code that is indented, or a session."""
    lines = block.splitlines()
    if all(CALLS.match(line) for line in lines):
        return True
    indented = all(line.startswith("    ") or not line for line in lines)
    return _is_session(block) or (indented and not ITEM.match(block) and not NAMED.match(block))


def _block(block: str) -> str:
    if _is_code(block):
        code = re.sub(r"  # doctest: .*", "", inspect.cleandoc(block))
        given = "text" if code.startswith("laconic ") else "python"
        return f"```{given}\n{code}\n```"
    lines = LATER_LABEL.sub("\n", block).splitlines()
    named = sum(bool(NAMED.match(line)) for line in lines) > 1 or any(line.startswith(" ") for line in lines)
    out: list[str] = []
    indents: list[int] = []  # of the items that are open
    for line in lines:
        text = line.strip()
        item = ITEM.match(line)
        if item or (named and NAMED.match(line)):
            indent = len(line) - len(line.lstrip())
            indents = [*(one for one in indents if one < indent), indent]
            out.append("    " * (len(indents) - 1) + (text if item else f"- {text}"))
        elif found := LABEL.match(line):
            out += ["", f"**{found[1]}:**{line[found.end() :]}"]
        elif indents:
            out[-1] += f" {text}"
        else:
            out.append(text)
    return "\n".join(out).strip()
