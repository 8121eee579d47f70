"""A probe in a terminal: what was fitted, the link, and who is slow. Records are those of probe.json."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laconic.report.terminal import human

COLUMNS = ["collective", "ranks", "at once", "latency", "from - to", "rate", "from - to", "off by", "at most", "sizes"]
LEGEND = (
    "A collective takes latency + bytes / rate, where the bytes are those that each rank must put on the cable. from - to: the "
    "same fit to the lower and to the upper quartiles of the repeats. off by: the median difference between fit and "
    "measurement; at most: the largest; 15x: one is 15 times the other. "
    "at once: so many were outstanding, and the time is that of all, divided by how many."
)
LARGE_BYTES, FAR_OFF = 10**6, 2.0  # a warning where a message of so many bytes is off by more than this factor

Record = Mapping[str, Any]


def console() -> Console:
    """Where tables go; a file has no width."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def say(screen: Console, text: str) -> None:
    """A line as it is."""
    screen.print(text, highlight=False, markup=False, soft_wrap=True)


def promised(ranks: int, seconds: float, wire_bytes: float) -> str:
    """Before a probe begins: what it takes."""
    return f"probing {ranks} ranks: {seconds:g} s at most, in which each rank sends {human(wire_bytes)} at most"


def show(record: Record, screen: Console) -> None:
    """The table, its legend, and what was found."""
    table = Table(title=escape(title(record)))
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for line in lines(record):
        table.add_row(*map(escape, line))
    screen.print(table)
    screen.print(LEGEND, style="dim", highlight=False, markup=False)
    say(screen, "")
    for text in findings(record):
        say(screen, text)


def title(record: Record) -> str:
    """What was probed."""
    hosts = len({worker["node"] for worker in record["workers"]})
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    return f"{record['world']} ranks on {where}, {record['backend']} on {record['device']}"


def lines(record: Record) -> list[list[str]]:
    """A row of words for each fit."""
    found = []
    for fit in record["fits"]:
        same = [each for each in record["samples"] if all(each[key] == fit[key] for key in ("kind", "ranks", "in_flight"))]
        sizes = [each["wire_bytes"] for each in same]
        slow, fast = fit["per_byte_range"][1], fit["per_byte_range"][0]
        found.append(
            [
                fit["kind"],
                str(fit["ranks"]),
                str(fit["in_flight"]),
                _time(fit["alpha_seconds"]),
                f"{_time(fit['alpha_range'][0])} - {_time(fit['alpha_range'][1])}",
                rate(fit["seconds_per_byte"]),
                f"{rate(slow)} - {rate(fast)}",
                off_by(fit["error"]),
                off_by(fit["worst_error"]),
                f"{human(min(sizes))} - {human(max(sizes))}" if sizes else "",
            ]
        )
    return found


def findings(record: Record) -> list[str]:
    """In words: the link, its delay, who is slow, what compute loses, and what was left out."""
    found = []
    if record["bits_per_second"] is None:
        found.append(f"Link: {record['link_note']}.")
    else:
        found.append(f"Link: {bits(record['bits_per_second'])} each way for each host ({record['link_note']}).")
    if record["delay_seconds"]:
        found.append(f"Delay: {_time(record['delay_seconds'])} one way, half of the shortest round trip between hosts.")
    found += [f"SLOW: {text}." for text in record["slow"]]
    found += far_off(record)
    if record["slow_downs"]:
        parts = ", ".join(f"{kind} {share:.2f}" for kind, share in record["slow_downs"].items())
        found.append(f"Compute beside a collective takes longer, for each second of it by so many seconds: {parts}.")
    else:
        found.append("Compute beside a collective: not measured, for lack of time; it counts as no slower.")
    if record["left_out"]:
        smallest = min(each["wire_bytes"] for each in record["left_out"])
        found.append(f"Left out for lack of time: {len(record['left_out'])} sizes, the smallest of {human(smallest)}.")
    found.append(
        f"It took {record['seconds']:.1f} s of {record['asked_seconds']:g}, and each rank sent {human(record['wire_bytes'])}."
    )
    return found


def far_off(record: Record) -> list[str]:
    """Warnings of large messages that the fitted line does not fit: one for each kind, of the time that is furthest off."""
    found = []
    for fit in record["fits"]:
        if fit["in_flight"] != 1:  # the cost model does not use others
            continue
        same = [each for each in record["samples"] if all(each[key] == fit[key] for key in ("kind", "ranks", "in_flight"))]
        ratios = [
            (each["seconds"] / (fit["alpha_seconds"] + fit["seconds_per_byte"] * each["wire_bytes"]), each["wire_bytes"])
            for each in same
            if each["wire_bytes"] >= LARGE_BYTES
        ]
        ratio, size = max(ratios, key=lambda one: max(one[0], 1 / one[0]), default=(1.0, 0))
        if max(ratio, 1 / ratio) > FAR_OFF:
            times = f"{ratio:.2g} times as long as" if ratio > 1 else f"1/{1 / ratio:.2g} of what"
            found.append(
                f"WARNING: {fit['kind']} of {human(size)} among {fit['ranks']} ranks took {times} the fitted line says. Don't "
                "rely on its times of large messages; measure again while nothing else runs, or with more --seconds."
            )
    return found


def off_by(error: float) -> str:
    """How far a line is off: as a share, or as a factor where it is more than twice.

    >>> off_by(0.3), off_by(1.0), off_by(14.0)
    ('30%', '100%', '15x')
    """
    return f"{error:.0%}" if error <= 1 else f"{1 + error:.2g}x"


def bits(bits_per_second: float) -> str:
    """A rate as people write it.

    >>> bits(95_400_000), bits(2_500_000_000)
    ('95.4 Mbit/s', '2.5 Gbit/s')
    """
    unit, size = ("Gbit/s", 1e9) if bits_per_second >= 1e9 else ("Mbit/s", 1e6)
    return f"{bits_per_second / size:.3g} {unit}"


def rate(seconds_per_byte: float) -> str:
    """Of a fit; a time that did not grow with the size has none."""
    return bits(8 / seconds_per_byte) if seconds_per_byte else "any"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
