"""Names for the shell's completion. Nothing here imports torch: it would have the user wait for each Tab."""

import re
from collections.abc import Iterator
from pathlib import Path

TASKS = [*(f"bytes-gpt:{size}" for size in ("500k", "1m", "2m", "5m", "20m")), "digits"]  # tests hold it to laconic.lab.tasks
RISKS = ["same", "rounding", "delay", "local"]


def strategies(incomplete: str) -> Iterator[tuple[str, str]]:
    """Recipes with the first sentence of each. Without parentheses, which a shell would take for its own."""
    for name, words in recipes().items():
        if name.startswith(incomplete):
            yield name, words


_RECIPE = re.compile(r'^@recipe\ndef (\w+)\(.*?"""(.*?)(?:\.\s|\n)', re.DOTALL | re.MULTILINE)


def recipes() -> dict[str, str]:
    """Out of the source: importing it would import torch."""
    found: dict[str, str] = {}
    for file in sorted((Path(__file__).parents[1] / "strategies").glob("*.py")):
        for name, words in _RECIPE.findall(file.read_text()):
            found[name] = words.rstrip(".")
    return dict(sorted(found.items()))


def tasks(incomplete: str) -> Iterator[str]:
    """Built-in tasks, and Python files in the folder that was begun."""
    yield from (name for name in TASKS if name.startswith(incomplete))
    yield from python_files(incomplete)


def python_files(incomplete: str) -> Iterator[str]:
    """Python files, and folders in which there may be some."""
    folder, slash, start = incomplete.rpartition("/")
    try:
        for path in sorted(Path(folder + slash or ".").iterdir()):
            if path.name.startswith(start) and not path.name.startswith("."):
                if path.is_dir():
                    yield f"{folder}{slash}{path.name}/"
                elif path.suffix == ".py":
                    yield f"{folder}{slash}{path.name}"
    except OSError:
        return


def links(incomplete: str) -> Iterator[str]:
    """Rates that people have."""
    yield from (rate for rate in ("none", "10mbit", "100mbit", "1gbit", "10gbit", "100gbit") if rate.startswith(incomplete))


def risks(incomplete: str) -> Iterator[str]:
    """From mild to strong."""
    yield from (risk for risk in RISKS if risk.startswith(incomplete))
