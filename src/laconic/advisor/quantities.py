"""What a person gives to `laconic advise`, read: workers and nodes, bytes, budgets. Imports no torch."""

import re
from dataclasses import dataclass

from laconic.report.advice_records import workers_text

UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
GIGABYTE = 10**9
MOST_WORKERS = 1_000_000


@dataclass(frozen=True)
class Workers:
    """How many there are, of which `per_node` share a node and its cable."""

    count: int
    per_node: int = 1

    @property
    def cables(self) -> int:
        """One for each node."""
        return self.count // self.per_node

    def __str__(self) -> str:
        return workers_text(self.count, self.per_node)


def workers(count: int | None, nodes: str | None) -> Workers:
    """From `--workers 16`, `--nodes 4x4`, or both.

    >>> workers(None, "4x8")
    Workers(count=32, per_node=8)
    """
    per_node = 1
    if nodes is not None:
        found = re.fullmatch(r"(\d+)x(\d+)", nodes.strip().lower())
        if found is None or not int(found[1]) or not int(found[2]):
            raise ValueError(
                f"--nodes is written as nodes x workers of each, such as 4x4 (--workers 4: one on each of four); got {nodes!r}"
            )
        total, per_node = int(found[1]) * int(found[2]), int(found[2])
        if count is not None and count != total:
            raise ValueError(f"--nodes {nodes} are {total} workers, and --workers says {count}; give one of the two")
        if found[1] == "1" and total > 1:
            raise ValueError(
                f"--nodes {nodes} is one node, which has no cable to others; give --workers for workers on one host"
            )
        count = total
    if count is None:
        raise ValueError("how many workers? Give --workers 16, or --nodes 4x4")
    if count < 1 or count > MOST_WORKERS:
        raise ValueError(f"--workers must be from 2 to {MOST_WORKERS:,}, got {count}")
    if count == 1:
        raise ValueError("with one worker there is nothing to communicate: ask for 2 workers at least")
    return Workers(count, per_node)


def data_size(text: str, option: str) -> float:
    """Bytes, from `24gb`.

    >>> data_size("1.5tb", "--memory")
    1500000000000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp]b)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{option} is a size with its unit, such as 24gb or 1.5tb; got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def budget(text: str, price_per_gb: float | None, cables: int) -> float:
    """The most bytes a day on each cable, from `500gb` a day and cable, or from `20usd` a day for all cables together.

    >>> budget("20usd", 0.1, 4)
    50000000000.0
    """
    money = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:usd|\$)", text.strip().lower())
    if money is None:
        try:
            return data_size(text, "--budget")
        except ValueError:
            raise ValueError(
                f"--budget is data a day and cable, such as 500gb, or money a day for all, such as 20usd; got {text!r}"
            ) from None
    if price_per_gb is None:
        raise ValueError(f"--budget {text} is money, so give --price-per-gb, too, or a budget in bytes such as 500gb")
    if not float(money[1]):
        raise ValueError(f"--budget must be above 0, got {text!r}")
    return float(money[1]) / price_per_gb * GIGABYTE / cables


def positive(number: float | None, option: str) -> None:
    """Refuse zero, less, and what is no number."""
    if number is not None and not 0 < number < float("inf"):
        raise ValueError(f"{option} must be a number above 0, got {number:g}")


def milliseconds(text: str, option: str) -> float:
    """From `420`, or `420ms`.

    >>> milliseconds("420ms", "--step-ms")
    420.0
    """
    try:
        number = float(text.strip().lower().removesuffix("ms"))
    except ValueError:
        raise ValueError(f"{option} must be a number of ms, such as 420, got {text!r}") from None
    positive(number, option)
    return number
