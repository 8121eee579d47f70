"""A link: what a worker's cable carries, and its text."""

import re
from dataclasses import dataclass

SLOWEST, FASTEST, LONGEST_MS = 10 * 10**3, 10 * 10**12, 10_000  # bits a second
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


@dataclass(frozen=True)
class Link:
    """What each host's cable carries: bits a second each way, and how long each packet takes; None: no limit."""

    bits_per_second: int | None = None
    delay_seconds: float = 0.0

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "none"
        unit = next(name for name in reversed(UNITS) if self.bits_per_second % UNITS[name] == 0 or name == "kbit")
        delay = f":{self.delay_seconds * 1e3:g}ms" if self.delay_seconds else ""
        return f"{self.bits_per_second / UNITS[unit]:g}{unit}{delay}"


def parse(text: str) -> Link:
    """`10mbit`, `1gbit`, `100mbit:20ms`, `none`.

    >>> parse("100mbit:20ms")
    Link(bits_per_second=100000000, delay_seconds=0.02)
    """
    if text == "none":
        return Link()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]bit)(?::(\d+(?:\.\d+)?)ms)?", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(
            f"a link is a rate with its unit, and a delay if you like: 100mbit, 1gbit, 100mbit:20ms, none; got {text!r}"
        )
    bits, delay = round(float(found[1]) * UNITS[found[2]]), float(found[3] or 0)
    if not SLOWEST <= bits <= FASTEST or delay > LONGEST_MS:
        rates = f"from {Link(SLOWEST)} to {Link(FASTEST)}"
        raise ValueError(f"a link has a rate {rates}, and a delay of up to {LONGEST_MS}ms; got {text!r}")
    return Link(bits, delay / 1e3)
