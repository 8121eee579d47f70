"""results.json: whole or not at all, and read again."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laconic.cost.link import Link
from laconic.lab.compare import Comparison, begin, compare, resumed, settle_seconds, stopped
from laconic.lab.workers import _explained
from laconic.report import comparison_records as records
from laconic.report import page
from laconic.report.live_comparison import Board
from tests.report.made import result


def test_a_disk_that_fills_up_keeps_the_record_before(tmp_path: Path) -> None:
    results = result(("ddp()", 1.0, 100, 1000))
    results.write(tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\nfrom pathlib import Path\n"
        f"from laconic.report.comparison_records import read; folder = Path({str(tmp_path)!r}); read(folder).write(folder)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stderr
    assert (tmp_path / "results.json").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_a_record_is_written_whole_and_read_again(tmp_path: Path) -> None:
    results = result(("ddp()", 1.0, 100, 1000))
    results.task = "a [ 1,  2 ] of \n spaces"
    results.write(tmp_path)
    assert "[5, 0.5, 1, 3.0]" in (tmp_path / "results.json").read_text()
    assert records.read(tmp_path) == results
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    for text, pattern in [("{", "damaged"), ('{"version": 9}', "not of version 1"), ('{"version": 1, "runs": []}', "damaged")]:
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match=pattern):
            records.read(tmp_path)
    with pytest.raises(ValueError, match=r"has no results.json"):
        records.read(tmp_path / "nowhere")


def test_what_is_no_number_is_null_in_every_file(tmp_path: Path) -> None:
    results = result(("ddp()", 1.0, 100, 1000), ("a()", float("nan"), 50, float("inf")))
    results.write(tmp_path)
    data = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert data["runs"][1]["val_loss"] is None
    assert data["runs"][1]["curve"][-1][3] is None
    back = records.read(tmp_path)
    assert back.runs[1].val_loss is None
    charts = re.findall(r'<script type="application/json">(.*?)</script>', page.page(back))
    assert len([json.loads(chart, parse_constant=pytest.fail) for chart in charts]) == 4


def test_older_records_said_nan(tmp_path: Path) -> None:
    results = result(("ddp()", 1.0, 100, 1000))
    results.write(tmp_path)
    text = (tmp_path / "results.json").read_text().replace('"val_loss": 1.0', '"val_loss": NaN')
    (tmp_path / "results.json").write_text(text)
    assert records.read(tmp_path).runs[0].val_loss is None


def test_damage_is_said_with_the_files_name(tmp_path: Path) -> None:
    results = result(("ddp()", 1.0, 100, 1000))
    results.runs[0].wire_bytes_per_step = {}
    results.write(tmp_path)
    with pytest.raises(ValueError, match=r"results.json is damaged: .*ddp\(\) lacks counted, kernel, predicted"):
        records.read(tmp_path)
    (tmp_path / "results.json").write_bytes(b'{"version": 1, "task": "\xff"}')
    with pytest.raises(ValueError, match=r"results.json is damaged: .*utf-8"):
        records.read(tmp_path)


def test_a_former_comparison_is_kept_under_a_number(tmp_path: Path) -> None:
    assert records.set_aside(tmp_path) == []
    for number in (1, 2):
        results = result(("ddp()", float(number), 100, 1000))
        results.write(tmp_path)
        page.write(results, tmp_path)
        assert records.set_aside(tmp_path) == [f"results-{number}.json", f"report-{number}.html"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "report-1.html", "report-2.html", "results-1.json", "results-2.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "results-1.json").read_text())["runs"][0]["val_loss"] == 1.0
    (tmp_path / "report-3.html").write_text("a page of the user's own")
    results.write(tmp_path)
    page.write(results, tmp_path)
    assert records.set_aside(tmp_path) == ["results-4.json", "report-4.html"], "nothing is overwritten"


def test_a_page_of_fewer_runs_does_not_stay_beside_the_record(tmp_path: Path) -> None:
    results = result(("ddp()", 1.0, 100, 1000))
    page.write(results, tmp_path)
    results.write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_looking_for_room_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("n/a/b", "there/a", "there"):
        records.check_room(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out must be a folder, and .*file is a file"):
        records.check_room(tmp_path / "file")


def test_a_record_of_an_older_laconic_is_read(tmp_path: Path) -> None:
    result(("ddp()", 1.0, 100, 1000)).write(tmp_path)
    data = json.loads((tmp_path / "results.json").read_text())
    del data["fingerprint"]
    (tmp_path / "results.json").write_text(json.dumps(data))
    assert records.read(tmp_path).fingerprint is None


def test_a_task_that_has_changed_is_not_resumed(tmp_path: Path) -> None:
    task = tmp_path / "mine.py"
    task.write_text("x = 1")
    comparison = Comparison(str(task), ["ddp()"], 2, steps=10)
    first = begin(comparison)
    first.runs = result(("ddp()", 1.0, 100, 1000)).runs
    first.write(tmp_path)
    again = begin(comparison)
    resumed(again, comparison, tmp_path)
    assert again.runs == first.runs
    other_words = Comparison(str(task), ["ddp(warmup=0)"], 2, steps=10)
    resumed(again, other_words, tmp_path)
    assert [run.strategy for run in again.runs] == ["ddp(warmup=0)"], "the same, as it is written today"
    task.write_text("x = 2")
    with pytest.raises(ValueError, match=r"mine.py is not what it was when .* was made \(sha256:.*leave --resume away"):
        resumed(begin(comparison), comparison, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": 3}, "digits, 3 workers, link none, 10 steps"),
        ({"steps": 20}, "digits, 2 workers, link none, 20 steps"),
        ({"task": "bytes-gpt:1m"}, "bytes-gpt:1m, 2 workers"),
        ({"seconds": 2.0}, "digits, 2 workers, link none, 2 seconds"),
        ({"warm": 7}, "digits, 2 workers, link none, 10 steps, 7 warm steps"),
    ],
)
def test_another_comparison_is_not_resumed(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"task": "digits", "strategies": ["ddp()"], "workers": 2, "steps": 10}
    first = begin(Comparison(**asked))
    first.runs = result(("ddp()", 1.0, 100, 1000)).runs
    first.write(tmp_path)
    other = Comparison(**{**asked, **change})
    with pytest.raises(ValueError, match="is of digits, 2 workers, link none, 10 steps, and asked is " + said):
        resumed(begin(other), other, tmp_path)


def test_what_is_there_is_not_run_again_and_only_a_new_comparison_moves_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Comparison("digits", ["ddp()", "a()"], 2, steps=10, seeds=(0, 1))
    assert list(asked.jobs()) == [("ddp()", 0), ("a()", 0), ("a()", 1), ("ddp()", 1)], "seed by seed, another one first"
    jobs: list[tuple[str, int]] = []

    def train(todo: list[tuple[str, int]], *_: object) -> Iterator[records.Record]:
        jobs.extend(todo)
        for name, seed in todo:
            yield replace(result((name, 1.0, 100, 1000)).runs[0], seed=seed)

    monkeypatch.setattr("laconic.lab.compare.train", train)
    former = result(("old()", 1.0, 100, 1000))
    former.write(tmp_path)
    board = Board(Console(file=io.StringIO()), asked.strategies, "10 steps", 2)
    results = begin(asked)
    compare(asked, results, tmp_path, board)
    assert jobs == list(asked.jobs())
    assert json.loads((tmp_path / "results-1.json").read_text())["runs"][0]["strategy"] == "old()"
    assert records.read(tmp_path).runs == results.runs
    jobs.clear()
    again = replace(results, runs=results.runs[:3])
    compare(asked, again, tmp_path, board)
    assert jobs == [("ddp()", 1)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results-1.json", "results.json"]
    assert len(records.read(tmp_path).runs) == 4


def test_of_workers_that_failed_the_one_is_shown_that_failed_by_itself() -> None:
    lost = {"rank": "0", "text": "CommunicationError: peer", "trace": "lost"}
    own = {"rank": "1", "text": "KeyError: 'x'", "trace": "its own"}
    assert _explained("a()", [lost, own], [], 1) == "a(): worker 1 failed:\nits own"
    assert _explained("a()", [lost], [], 1) == "a(): worker 0 failed:\nlost"
    killed = ["worker 2 was killed by SIGKILL\n"]
    assert _explained("a()", [lost], killed, 1) == "a(): worker 2 was killed by SIGKILL"
    assert "its own" in _explained("a()", [own], killed, 1)
    assert _explained("a()", [], ["some\n", "words\n"], 3) == "a(): a worker died (exit code 3); the last it said:\nsome\nwords"
    assert _explained("a()", [], [], 3) == "a(): a worker died (exit code 3) and said nothing"


def test_only_what_leaves_exchanges_outstanding_waits_for_a_silent_cable() -> None:
    slow = Link(10**6, 0.25)
    assert [settle_seconds(text, slow) for text in ("ddp()", "diloco(8)")] == [0, 0]
    assert settle_seconds("streaming_diloco(8, fragments=2, delay=2)", slow) == pytest.approx(0.6)


def test_what_an_interruption_leaves_is_said_as_it_is() -> None:
    assert stopped(result(), Path("out")) == "stopped before anything was finished"
    assert "what is finished is in out, and --resume goes on" in stopped(result(("ddp()", 1.0, 1, 1)), Path("out"))
