"""The index of the search, after mkdocs has made it: what defines a name comes before what only mentions it.

The search weighs a word in a title a thousand times a word in the text. So a page called "Errors" came before error feedback.
"""

import json
import re
from pathlib import Path
from typing import Any

from public_names import public_names

# How much less a place counts: the first that matches.
BOOSTS = [
    (re.compile(r"changelog\.html|contributing\.html"), 0.01),
    (re.compile(r"reference/compat\.html"), 0.3),  # torch's names, which repeat those of the reducers
    (re.compile(r"reference/(index|errors)\.html(#(?!laconic).*)?$"), 0.05),  # lists of words from everywhere
]
DEFINITION = {1: 12.0, 2: 3.0}  # by the dots in a name: laconic.attach comes before laconic.elastic.attach
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def weigh(site: Path) -> None:
    """Write the index anew."""
    path = site / "search/search_index.json"
    index = json.loads(path.read_text())
    for entry in index["docs"]:
        _weigh(entry)
    path.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")))


def _weigh(entry: dict[str, Any]) -> None:
    place, _, anchor = entry["location"].partition("#")
    entry["title"] = re.sub(r"\s*<code>.*?</code>$", "", entry["title"]) if anchor in public_names() else entry["title"]
    boost = next((number for pattern, number in BOOSTS if pattern.match(entry["location"])), None)
    if boost is None and place.startswith("reference/") and anchor in public_names():
        boost = DEFINITION.get(anchor.count("."), 1.0)
        entry["text"] += f" <p>{WORDS.sub(' ', entry['title'])}</p>"
    if boost is not None:
        entry["boost"] = boost
