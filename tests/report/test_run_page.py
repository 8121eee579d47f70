"""What `laconic report` and `laconic watch` show of a run, number by number."""

import html
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laconic.report import meter_records as runs
from laconic.report import run_page
from laconic.report.live_run import watch

START = {"kind": "start", "version": 1, "time": 0.0, "strategy": "diloco(2)", "cycle": 2, "world": 11, "step": 0}
START |= {"parameters": 1000, "torch": "2", "host": "here"}


def step(number: int, seconds: float, sent: int, waited: float | None, worked: float) -> dict[str, Any]:
    numbers = {"wire_bytes": sent, "payload_bytes": sent, "collectives": 1, "wait_seconds": waited, "work_seconds": worked}
    return {"kind": "step", "step": number, "time": time.time(), "seconds": seconds, **numbers}


def sync(number: int, **norms: float | None) -> dict[str, Any]:
    return {"kind": "sync", "step": number, "drift": 0.5 * number, "norm": None, "mean_norm": None, "cosine": None, **norms}


def layers(number: int, **errors: float | None) -> dict[str, Any]:
    parts = {name: {"error": error, "residual": None, "wire_bytes": 4} for name, error in errors.items()}
    return {"kind": "layers", "step": number, "layers": parts}


def record(folder: Path, rank: int, *rows: dict[str, Any]) -> None:
    lines = [{**START, "rank": rank}, *rows]
    (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven ranks; the last has waited for 10 % of its time, the first for 40 %."""
    for rank in range(11):
        waited = 0.4 - 0.03 * rank
        rows = [step(1, 1.0, 100, waited, 0.2), step(2, 3.0, 500, 3 * waited, 0.6)]
        seen = [sync(1, norm=9.0), layers(1, z=0.9), sync(2, norm=1.25, cosine=0.5), layers(2, a=0.1, b=0.3, c=None, d=0.2)]
        record(tmp_path, rank, *rows, *seen)
    return tmp_path


def charts(page: str) -> dict[str, Any]:
    found = re.findall(r'<h2>([^<]*)</h2>\n<div class="chart"></div><script type="application/json">(.*?)</script>', page)
    return {heading: json.loads(figure)["data"] for heading, figure in found}


def test_the_page_has_every_number_in_its_place(folder: Path) -> None:
    page = run_page.page(runs.read(folder))
    rows = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr>.*?</tr>", page, re.DOTALL)]
    assert rows[0] == ["rank", "steps", "step", "bytes/step", "waiting", "encoding", "ended"]
    assert [row[0] for row in rows[1:]] == [str(rank) for rank in range(11)], "in order of their numbers"
    assert rows[1] == ["0", "2", "2000.0 ms", "300 B", "40%", "20%", "no"]
    lead = "2 steps of diloco(2) on 11 ranks, 2000.0 ms and 300 B a step; waiting took 10% to 40% of the time, by rank."
    assert lead in html.unescape(page)
    drawn = charts(page)
    assert [len(data) for data in drawn.values()] == [11, 11, 22, 3, 1]
    sent, milliseconds = drawn["Bytes against seconds"][0], drawn["Step by step"][0]
    assert (sent["x"], sent["y"]) == ([1, 4], [100, 600])
    assert (milliseconds["x"], milliseconds["y"]) == ([1, 2], [1000, 3000])
    computing, waiting = drawn["Where the time goes"][:2]
    assert (computing["base"], computing["x"]) == (pytest.approx([0, 1]), pytest.approx([0.6, 1.8]))
    assert (waiting["base"], waiting["x"]) == (pytest.approx([0.6, 2.8]), pytest.approx([0.4, 1.2]))
    assert waiting["marker"]["opacity"] < computing["marker"]["opacity"]
    assert {trace["name"]: trace["y"] for trace in drawn["Between replicas"]} == {
        "norm": [9, 1.25],
        "drift": [0.5, 1],
        "cosine": [None, 0.5],
    }
    (lost,) = drawn["What compression loses"]
    assert (lost["y"], lost["x"]) == (["c", "b", "d", "a"], [None, 0.3, 0.2, 0.1])


def test_a_chart_of_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    record(tmp_path, 0, *(step(number, 0.1, 1, 0.0, 0.0) for number in range(1, 3 * run_page.MOST_POINTS + 1)))
    drawn = charts(run_page.page(runs.read(tmp_path)))
    assert drawn["Step by step"][0]["x"] == list(range(1, 3 * run_page.MOST_POINTS + 1, 3))
    assert len(drawn["Where the time goes"][0]["x"]) == 48, "the last steps"


def shown(folder: Path) -> str:
    console = Console(file=io.StringIO(), record=True, width=200)
    watch(folder, console, once=True)
    return console.export_text()


def test_watch_shows_every_number_in_its_place(folder: Path) -> None:
    (folder / "rank-1.jsonl").write_text((folder / "rank-1.jsonl").read_text().replace('"time": 1', '"time": -1'))  # long ago
    for rank, failure in ((2, None), (3, "KeyError"), (4, None)):
        with (folder / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "end", "time": 0.0, "failure": failure}) + "\n")
            if rank == 4:
                file.write(json.dumps({**START, "rank": rank, "step": 2}) + "\n")
    text = shown(folder)
    rows = [re.findall(r"[^\s│┃]+(?: [^\s│┃]+)*", line) for line in text.splitlines()]
    table = {row[0]: row[1:] for row in rows if len(row) == 7}
    assert table["rank"] == ["step", "steps/s", "bytes/step", "waiting", "encoding", "state"]
    assert table["0"] == ["2", "0.5", "300 B", "40%", "20%", "going"]
    assert re.fullmatch(r"silent for \d+ s", table["1"][-1])
    assert [table[str(rank)][-1] for rank in (2, 3, 4)] == ["ended", "failed", "going, started 2 times"]
    assert "last sync, step 2: norm 1.25, cosine 0.5, drift 1\n" in text
    assert "lost in step 2: c (not finite), b 30.00%, d 20.00%\n" in text, "the three that lose most"


def test_what_is_not_known_is_not_shown(tmp_path: Path) -> None:
    record(tmp_path, 0, step(1, 0.5, 8, None, 0.25), layers(1, a=0.0, b=0.0))
    text = shown(tmp_path)
    assert re.search(r"8 B │ +│ +50% │ going", text), text
    assert "lost in step 1: nothing" in text
    page = run_page.page(runs.read(tmp_path))
    assert re.search("<td[^>]*></td>", page)
    assert "waiting took" not in page
    with pytest.raises(ValueError, match="no step has been recorded yet"):
        run_page.page([runs.RankRecord({**START, "rank": 0})])


def worker(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    lines = [{**START, "rank": 0, "worker": name}, *rows]
    (folder / f"worker-{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def took_part(step: int, version: int, **changed: Any) -> dict[str, Any]:
    row = {"kind": "workers", "step": step, "time": time.time(), "version": version, "weights": {"a": 1.25, "b": 0.75}}
    return {**row, "joined": [], "lost": [], "left": [], "dropped": None, **changed}


def test_an_elastic_run_shows_who_is_there(tmp_path: Path) -> None:
    mine = [
        took_part(8, 2, weights={"a": 1.0}),
        took_part(16, 3, joined=["b"]),
        took_part(24, 3, weights={}, dropped="b is gone"),
    ]
    worker(tmp_path, "a", step(8, 0.1, 10, 0.0, 0.0), *mine, sync(8, norm=1.0))
    worker(tmp_path, "b", step(16, 0.1, 10, 0.0, 0.0), took_part(16, 3, joined=["b"]))
    screen = io.StringIO()
    watch(tmp_path, Console(file=screen, width=160), once=True)
    text = screen.getvalue()
    assert "2 workers" in text
    assert (
        "there at step 16: a (weight 1.25), b (weight 0.75); since the start 1 joined, 0 lost, 0 left; 1 syncs dropped" in text
    )
    page = run_page.page(runs.read(tmp_path))
    assert "Who took part" in page
    found = run_page._workers(runs.read(tmp_path)[0])["data"]
    assert [(trace["name"], trace["y"]) for trace in found] == [("a", [1.0, 1.25]), ("b", [None, 0.75]), ("dropped", [0])]
