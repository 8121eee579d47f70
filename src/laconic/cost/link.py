"""A link: what a worker's cable carries, and its text."""

import re
from dataclasses import dataclass

SLOWEST, FASTEST, LONGEST_MS = 10 * 10**3, 10 * 10**12, 10_000  # bits a second
FASTEST_EMULATED = 34 * 10**9  # the kernel's token buckets (tbf) hold up to 34.3 gbit in 32 bits
# `10gbps` and `10Gbit/s` are 10gbit. A capital B would be bytes, which a link is never given in.
TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT])(?:[bB][iI][tT](?:/s|ps)?|bps|b/s)(?::(\d+(?:\.\d+)?)\s*ms)?")
BYTES = re.compile(r"[\d.\s]+[kKmMgGtT]B(?:/s|ps)?\b")
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
    """`10mbit`, `1gbit`, `100mbit:20ms`, `none`; also `10gbps` and `10Gbit/s`.

    >>> parse("100mbit:20ms")
    Link(bits_per_second=100000000, delay_seconds=0.02)
    """
    if text == "none":
        return Link()
    found = TEXT.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        hint = ". B are bytes, of 8 bits each" if BYTES.match(text) else ""
        raise ValueError(
            f"a link is a rate with its unit, and a delay if you like: 100mbit, 1gbit, 100mbit:20ms, none; got {text!r}{hint}"
        )
    bits, delay = round(float(found[1]) * UNITS[f"{found[2].lower()}bit"]), float(found[3] or 0)
    if not SLOWEST <= bits <= FASTEST or delay > LONGEST_MS:
        rates = f"from {Link(SLOWEST)} to {Link(FASTEST)}"
        raise ValueError(f"a link has a rate {rates}, and a delay of up to {LONGEST_MS}ms; got {text!r}")
    return Link(bits, delay / 1e3)
