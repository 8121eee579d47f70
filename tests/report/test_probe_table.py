"""A probe's record as a table and as a page."""

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from laconic.report.probe_page import figure, groups, page
from laconic.report.probe_progress import Progress
from laconic.report.probe_table import findings, lines, promised, show


def record(**changes: Any) -> dict[str, Any]:
    """As probe.json has it, of two ranks."""
    sizes = [1024, 65536, 1 << 20]
    samples = [
        {
            "kind": kind,
            "ranks": 2,
            "in_flight": in_flight,
            "wire_bytes": size,
            "seconds": 1e-3 + size / 12.5e6,
            "low_seconds": 0.9e-3 + size / 12.5e6,
            "high_seconds": 1.2e-3 + size / 12.5e6,
            "repeats": 10,
            "busy": 0.1,
        }
        for in_flight in (1, 4)
        for kind in ("AllReduce", "AllGather")
        for size in sizes
    ]
    fits = [
        {
            "kind": kind,
            "ranks": 2,
            "in_flight": 1,
            "alpha_seconds": 1e-3,
            "seconds_per_byte": per_byte,
            "alpha_range": (0.9e-3, 1.2e-3),
            "per_byte_range": (0.9 * per_byte, 1.1 * per_byte),
            "error": 0.01,
            "worst_error": 0.3,
        }
        for kind, per_byte in (("AllReduce", 1 / 12.5e6), ("AllGather", 0.0))
    ]
    workers = [{"rank": rank, "host": f"<b>host{rank}</b>", "node": rank} for rank in range(2)]
    made: dict[str, Any] = {
        "world": 2,
        "backend": "gloo",
        "device": "cpu",
        "seconds": 3.2,
        "asked_seconds": 4.0,
        "wire_bytes": 5_000_000,
        "workers": workers,
        "samples": samples,
        "fits": fits,
        "left_out": [{"kind": "AllReduce", "ranks": 2, "in_flight": 1, "wire_bytes": 1 << 26, "reason": "too long"}],
        "bits_per_second": 99.9e6,
        "delay_seconds": 0.02,
        "link_note": "seen",
        "slow": ["rank 1 (<b>host1</b>) sends at 12 Mbit/s, the others at 95 Mbit/s"],
        "slow_downs": {"AllReduce": 0.25},
        "versions": {"laconic": "0.1.0"},
    }
    return {**made, **changes}


def test_a_row_says_latency_rate_and_how_far_the_fit_is_off() -> None:
    first, second = lines(record())
    assert first == [
        "AllReduce", "2", "1", "1 ms", "900 µs - 1.2 ms", "100 Mbit/s", "90.9 Mbit/s - 111 Mbit/s", "1%", "30%",
        "1.02 kB - 1.05 MB",
    ]  # fmt: skip
    assert second[5] == "any", "time did not grow with the size"


def test_what_was_found_is_said_in_words() -> None:
    said = "\n".join(findings(record()))
    assert "Link: 99.9 Mbit/s each way for each host (seen)." in said
    assert "Delay: 20 ms one way" in said
    assert "SLOW: rank 1 (<b>host1</b>) sends at 12 Mbit/s, the others at 95 Mbit/s." in said
    assert "AllReduce 0.25" in said
    assert "Left out for lack of time: 1 sizes, the smallest of 67.1 MB." in said
    assert "It took 3.2 s of 4, and each rank sent 5 MB." in said


def test_a_large_message_that_is_far_off_the_line_is_a_warning() -> None:
    off = record()
    del off["fits"][1]
    assert "WARNING" not in "\n".join(findings(off))
    (large,) = [
        each for each in off["samples"] if (each["kind"], each["in_flight"]) == ("AllReduce", 1) and each["wire_bytes"] > 1e6
    ]
    large["seconds"] *= 15
    off["fits"][0]["worst_error"] = 14.0
    assert lines(off)[0][8] == "15x"
    (warning,) = [text for text in findings(off) if text.startswith("WARNING")]
    assert "AllReduce of 1.05 MB among 2 ranks took 15 times as long as the fitted line says" in warning
    large["seconds"] /= 15 * 4
    assert "took 1/4 of what the fitted line says" in "\n".join(findings(off))


def test_what_was_not_found_is_not_claimed() -> None:
    none = record(
        bits_per_second=None, link_note="all ranks are on one host", delay_seconds=0.0, slow=[], slow_downs={}, left_out=[]
    )
    said = "\n".join(findings(none))
    assert "Link: all ranks are on one host." in said
    assert "Compute beside a collective: not measured" in said
    assert not re.search("each way|Delay|SLOW|Left out", said)


def test_the_table_is_printed_whole() -> None:
    out = io.StringIO()
    show(record(), Console(file=out, width=160))
    text = out.getvalue()
    assert "2 ranks on 2 hosts, gloo on cpu" in text
    assert "90.9 Mbit/s - 111 Mbit/s" in text
    assert "<b>host1</b>" in text
    assert promised(4, 30.0, 4.2e9) == "probing 4 ranks: 30 s at most, in which each rank sends 4.2 GB at most"


def test_the_page_has_a_chart_for_each_group_and_escapes_names() -> None:
    text = page(record())
    assert "<b>host1</b>" not in text
    assert "&lt;b&gt;host1&lt;/b&gt;" in text
    assert "Time of a collective among all 2 ranks, 4 at once" in text
    charts = [json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert len(charts) == len(groups(record())) == 2
    assert "too long" in text


def test_points_are_measured_and_lines_are_fitted() -> None:
    points, line, other, flat = figure(record(), 2, 1)["data"]
    assert (points["mode"], line["mode"]) == ("markers", "lines")
    assert points["y"][0] == pytest.approx(1e-3 + 1024 / 12.5e6)
    assert points["error_y"]["array"][0] == pytest.approx(0.2e-3)
    assert line["y"][0] == pytest.approx(points["y"][0])
    assert (line["x"][0], line["x"][-1]) == (pytest.approx(1024), pytest.approx(1 << 20))
    assert other["marker"] != points["marker"]
    assert set(flat["y"]) == {1e-3}


def test_progress_is_a_few_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=80)) as progress:
        for share in (0.0, 0.1, 0.26, 0.3, 0.8, 1.0, 1.0):
            progress(share)
    assert out.getvalue().splitlines() == ["probing: 25%", "probing: 75%", "probing: 100%"]


def test_progress_is_a_bar_in_a_terminal() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=80, force_terminal=True)) as progress:
        progress(0.5)
    assert "50 %" in out.getvalue()
    assert "probing: " not in out.getvalue()
