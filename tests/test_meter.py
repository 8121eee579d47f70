"""The meter: what it writes is what happened, and nothing happens because of it."""

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import laconic
from laconic.cli import app
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.dryrun import simulate
from laconic.comm.inspection import Inspector
from laconic.cost.link import Link
from laconic.lab.link import start
from laconic.meter import JsonLines
from laconic.report import meter_records as runs
from laconic.report import run_page
from laconic.report.live_run import _cells, watch
from laconic.report.terminal import human
from tests.lab.test_link import needs_link
from tests.live import ranks
from tests.models import build, chain, same_bits, vectors, weights

STEPS = 12


def train(rank: int, text: str, folder: str | None, alike: bool = False, tensorboard: bool = False) -> tuple[Any, list[Tensor]]:
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(model, optimizer, text) as run:
        if folder is not None:
            laconic.Meter(run, folder, every=1, tensorboard=tensorboard)
        for step in range(STEPS):
            model(vectors(0 if alike else rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = run.stats()
    return vars(stats), weights(model)


SETTINGS = [
    "ddp()",
    "int8()",
    "powersgd(rank=1, warmup=2)",
    "diloco(4)",
    "streaming_diloco(4, fragments=2, delay=1)",
    "local_sgd(3)",
]


@pytest.mark.parametrize("text", SETTINGS)
def test_rows_add_up_to_the_ledger_and_change_no_bit(text: str, tmp_path: Path) -> None:
    metered = ranks(2, train, text, str(tmp_path))
    plain = ranks(2, train, text, None)
    for (stats, found), (_, wanted), record in zip(metered, plain, runs.read(tmp_path), strict=True):
        assert same_bits(found, wanted)
        assert [row["step"] for row in record.steps] == list(range(1, STEPS + 1))
        for key in ("payload_bytes", "wire_bytes", "collectives"):
            assert sum(row[key] for row in record.steps) == stats[key], key
        for key in ("wait_seconds", "work_seconds"):
            assert sum(row[key] for row in record.steps) == pytest.approx(stats[key]), key
        assert record.end is not None
        _check_layers(text, record)
        _check_syncs(text, record)


def _check_layers(text: str, record: runs.RankRecord) -> None:
    if text == "local_sgd(3)":  # parameters are averaged as they are
        assert record.layers == []
        return
    layers = {
        name: layer for row in record.layers for name, layer in row["layers"].items()
    }  # a fragment a row, where it streams
    assert len(layers) == 26
    errors = {name: layer["error"] for name, layer in layers.items()}
    if text in ("ddp()", "diloco(4)"):
        assert set(errors.values()) == {0.0}
    elif text.startswith("powersgd"):
        assert 0.1 < errors["0.weight"] < 1, "rank 1 of 16"
        assert layers["0.weight"]["residual"] > 0
        assert layers["0.weight"]["wire_bytes"] < 16 * 16 * 4
    else:
        assert 0 < errors["0.weight"] < 0.02, "8 bits"


def _check_syncs(text: str, record: runs.RankRecord) -> None:
    if "diloco" in text:
        assert len(record.syncs) >= 3
        for sync in record.syncs:
            assert -1 <= sync["cosine"] <= 1
            assert sync["norm"] > 0
            assert sync["drift"] > 0 or "streaming" in text, "of a mean in 8 bits it may come out as none"
    elif text == "local_sgd(3)":
        assert [sync["step"] for sync in record.syncs] == [3, 6, 9, 12]
        assert all(sync["drift"] > 0 and sync["cosine"] is None for sync in record.syncs)
    else:
        assert record.syncs == []


def looked_at(rank: int, folder: str, text: str, every: int, swap: str | None) -> list[tuple[int, int, Any]]:
    """Of each look: its step, how many layers it has, and the wire bytes of one."""
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(model, optimizer, text) as run:
        laconic.Meter(run, folder, every=every)
        for step in range(STEPS):
            if swap is not None and step == STEPS // 2:
                run.swap(swap)
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = [json.loads(line) for line in (Path(folder) / f"rank-{rank}.jsonl").read_text().splitlines()]
    looks = [(row["step"], row["layers"]) for row in rows if row["kind"] == "layers"]
    return [(step, len(layers), layers.get("0.weight", {}).get("wire_bytes")) for step, layers in looks]


def test_a_look_ends_when_every_layer_was_seen_once(tmp_path: Path) -> None:
    assert [look[:2] for look in ranks(2, looked_at, str(tmp_path), "diloco(2)", 6, None)[0]] == [(2, 26), (8, 26)]
    streams = ranks(2, looked_at, str(tmp_path), "streaming_diloco(4, fragments=2, delay=1)", 100, None)[0]
    assert sum(count for _, count, _ in streams) == 26, "each fragment once"


def test_bytes_of_a_layer_are_those_of_the_strategy_after_a_swap(tmp_path: Path) -> None:
    looks = ranks(2, looked_at, str(tmp_path), "ddp()", 6, "bf16()")[0]
    assert [(step, sent) for step, _, sent in looks] == [(1, 16 * 16 * 4), (7, 16 * 16 * 2)]


def test_a_run_that_begins_anew_keeps_the_former(tmp_path: Path) -> None:
    for _ in range(2):
        ranks(1, train, "ddp()", str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.jsonl", "rank-0.jsonl.old"]
    assert len(runs.read(tmp_path)[0].steps) == STEPS


@pytest.mark.parametrize("text", ["diloco(4)", "local_sgd(4)"])
def test_ranks_that_do_the_same_have_no_drift(text: str, tmp_path: Path) -> None:
    ranks(2, train, text, str(tmp_path), alike=True)
    for record in runs.read(tmp_path):
        for sync in record.syncs:
            assert sync["drift"] == pytest.approx(0, abs=1e-6)
            assert sync["cosine"] is None or sync["cosine"] == pytest.approx(1, abs=1e-6)


def metered(rank: int, folder: str, every: int, texts: list[str]) -> None:
    """Twelve steps, shared out among the strategies."""
    model = build(lambda: chain(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(model, optimizer, texts[0]) as run:
        laconic.Meter(run, folder, every=every)
        for step in range(STEPS):
            if step and step % (STEPS // len(texts)) == 0:
                run.swap(texts[step // (STEPS // len(texts))])
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("text", "every", "wanted"),
    [
        ("int8()", 5, [1, 6, 11]),  # the exchanges that follow steps 0, 5 and 10
        ("int8()", 0, []),
        ("diloco(2)", 5, [2, 6, 12]),  # the first sync after each
        ("streaming_diloco(4, fragments=2, delay=0)", 6, [2, 4, 8, 10]),  # each fragment once
    ],
)
def test_layers_are_looked_at_as_seldom_as_was_asked(text: str, every: int, wanted: list[int], tmp_path: Path) -> None:
    ranks(1, metered, str(tmp_path), every, [text])
    assert [row["step"] for row in runs.read(tmp_path)[0].layers] == wanted


def failing(rank: int, folder: str) -> dict[str, Any]:
    """A step, an error of the user's own, and on from there."""
    model = build(lambda: chain(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def go(run: laconic.Run) -> None:
        laconic.Meter(run, folder)
        model(vectors(rank, run.step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(KeyError), laconic.attach(model, optimizer, "diloco(4)") as run:
        go(run)
        state, stats = run.state_dict(), run.stats()
        raise KeyError("own")
    (record,) = runs.read(Path(folder))
    assert record.end is not None
    assert {"kind": "end", "time": record.end["time"], "failure": "KeyError: 'own'", **vars(stats)} == record.end
    with laconic.attach(model, optimizer, "diloco(4)") as run:
        run.load_state_dict(state)
        go(run)
    return record.start


def test_how_a_run_began_and_why_it_ended(tmp_path: Path) -> None:
    (start,) = ranks(1, failing, str(tmp_path))
    numbers = 2 * 17 * 16 + 17 * 3
    wanted = {"kind": "start", "version": 1, "strategy": "diloco(period=4)", "cycle": 4, "rank": 0, "world": 1, "step": 0}
    assert start | wanted | {"parameters": numbers, "torch": torch.__version__} == start
    (record,) = runs.read(tmp_path)
    assert ([row["step"] for row in record.steps], record.starts) == ([1, 2], 2), "what goes on goes on in the same file"
    assert record.end is not None
    assert record.end["failure"] is None


def test_a_swap_is_in_the_records(tmp_path: Path) -> None:
    texts = ["ddp()", "local_sgd(3)", "int8()"]
    ranks(2, metered, str(tmp_path), 1, texts)
    record = runs.read(tmp_path)[0]
    assert (record.strategy, record.cycle) == ("ddp(), then local_sgd(period=3), then int8()", 1)
    assert record.strategy in run_page.page([record])
    first, last = record.layers[0]["layers"]["0.weight"], record.layers[-1]["layers"]["0.weight"]
    assert first["wire_bytes"] == 16 * 16 * 4
    assert last["wire_bytes"] < 16 * 16 * 4, "of the strategy that it is of"
    rows = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [(row["step"], row["strategy"], row["cycle"]) for row in rows if row["kind"] == "swap"] == [
        (4, "local_sgd(period=3)", 3),
        (8, "int8()", 1),
    ]


def test_recent_steps_are_those_of_the_strategy_of_now(tmp_path: Path) -> None:
    swap = {"kind": "swap", "step": 3, "time": 0.0, "strategy": "local_sgd(4)", "cycle": 4}
    more = [{**STEP, "step": n, "wire_bytes": n} for n in range(4, 11)]
    lines = [start_row(0, 1), *({**STEP, "wire_bytes": 1000} for _ in range(3)), swap]
    for made, wanted in ((2, 4.5), (4, 5.5), (7, 8.5)):  # since the swap: all, a period, the last whole period
        written = [*lines, *more[:made]]
        (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
        (record,) = runs.read(tmp_path)
        assert record.mean("wire_bytes", record.recent(50)) == wanted


def drifted_by_hand(rank: int, folder: str) -> float:
    """How far this rank is from the mean before the sync."""
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with laconic.attach(model, optimizer, "local_sgd(4)") as run:
        laconic.Meter(run, folder)
        for step in range(3):
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(vectors(rank, 3)).square().mean().backward()
        after = [p.detach() - 0.05 * p.grad for p in model.parameters()]  # type: ignore[operator]
        optimizer.step()
        mean = [p.detach().clone() for p in model.parameters()]
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in zip(after, mean, strict=True)))


def test_drift_is_the_distance_from_the_mean(tmp_path: Path) -> None:
    wanted = ranks(2, drifted_by_hand, str(tmp_path))
    for distance, record in zip(wanted, runs.read(tmp_path), strict=True):
        assert record.syncs[0]["drift"] == pytest.approx(distance, rel=1e-4)


def losses(scale: float) -> list[float]:
    """What each of three exchanges loses, as a share, of gradients of a loss that is scaled."""
    slot: Slot = {}
    found, inspector = [], Inspector()
    inspector.looking = True
    for step in range(3):
        gradient = scale * torch.randn(40, generator=torch.Generator().manual_seed(step))
        bucket = Bucket(gradient, [gradient], ["weight"], [slot], 0, 1, step, step, torch.tensor(scale))
        simulate([inspector.inspect(laconic.ErrorFeedback(laconic.TopK(0.1)).reduce, bucket)])[0].finish()
        found.append(inspector.layers["weight"].error)
    return found


def test_what_is_lost_does_not_depend_on_the_loss_scale() -> None:
    assert losses(2.0**10) == losses(1.0)


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(2, train, "streaming_diloco(4, fragments=2, delay=1)", str(tmp_path), tensorboard=True)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    tags = set(reader.Tags()["scalars"])
    assert {"laconic/wire_bytes", "laconic/wait_seconds", "laconic/sync/cosine", "laconic/error/0.weight"} <= tags
    record = runs.read(tmp_path)[0]
    assert [event.value for event in reader.Scalars("laconic/wire_bytes")] == [row["wire_bytes"] for row in record.steps]


def row(**parts: Any) -> str:
    return (
        json.dumps({"payload_bytes": 1, "wire_bytes": 10, "collectives": 1, "wait_seconds": 0.1, "work_seconds": 0.0, **parts})
        + "\n"
    )


START = {"kind": "start", "version": 1, "time": 0.0, "strategy": "<b>int8()</b>", "rank": 0, "world": 1, "step": 0}
START |= {"parameters": 1000, "torch": "2", "host": "here"}


def start_row(rank: int, world: int) -> dict[str, Any]:
    return {**START, "rank": rank, "world": world}


STEP = {"kind": "step", "step": 1, "time": 0.0, "seconds": 0.1, "wire_bytes": 8, "wait_seconds": 0.0, "work_seconds": 0.0}


def test_half_a_line_of_a_killed_run_and_old_ranks_do_no_harm(tmp_path: Path) -> None:
    for rank in range(4):  # four ranks, of which the first is killed in the middle of a line
        sink = JsonLines(tmp_path / f"rank-{rank}.jsonl", anew=True)
        sink.write(start_row(rank, 4))
        sink.write(STEP)
        sink.close()
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"kind": "layers", "step": 1, "lay')
    sink = JsonLines(tmp_path / "rank-0.jsonl", anew=False)
    sink.write(start_row(0, 4))
    sink.write(STEP)
    sink.close()
    records = runs.read(tmp_path)
    assert [len(record.steps) for record in records] == [2, 1, 1, 1]
    for rank in range(2):  # then two
        sink = JsonLines(tmp_path / f"rank-{rank}.jsonl", anew=True)
        sink.write(start_row(rank, 2))
        sink.close()
    assert len(runs.read(tmp_path)) == 2
    for world in (3, 1):  # which goes on with three, and then with one
        for rank in range(world):
            sink = JsonLines(tmp_path / f"rank-{rank}.jsonl", anew=False)
            sink.write(start_row(rank, world))
            sink.close()
        assert [record.rank for record in runs.read(tmp_path)] == list(range(world))


def test_what_is_not_finite_is_null_and_shown(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "rank-0.jsonl", anew=True)
    layers = {"a": {"error": math.nan, "residual": math.inf}, "b": {"error": 0.5, "residual": 1.0}}
    for row in (start_row(0, 1), STEP, {"kind": "layers", "step": 1, "layers": layers}):
        sink.write(row)
    sink.write({"kind": "end", "failure": "ValueError: no"})
    sink.close()
    text = (tmp_path / "rank-0.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    records = runs.read(tmp_path)
    assert runs.worst(records[0], 2) == [("a", None), ("b", 0.5)]
    console = Console(record=True, width=120, file=io.StringIO())
    watch(tmp_path, console, once=True)
    shown = console.export_text()
    assert "a (not finite), b 50.00%" in shown
    assert "failed" in shown
    assert "ValueError: no" in run_page.page(records)


def test_means_are_over_all_steps_or_the_last_ones() -> None:
    record = runs.RankRecord(START, steps=[{"a": 1.0, "b": None}, {"a": 2.0, "b": 2.0}, {"a": 6.0, "b": 4.0}])
    assert [record.mean("a"), record.mean("a", 2), record.mean("a", 9)] == [3, 4, 3]
    assert [record.mean("b"), record.mean("b", 2)] == [None, 3]


def test_a_run_is_watched_while_it_goes_on_and_after_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    file.write_text(json.dumps(START) + "\n" + row(kind="step", step=1, time=0.0, seconds=0.5) + '{"kind": "st')
    shown = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"])
    assert shown.exit_code == 0, shown.output
    assert "silent for" in shown.output
    assert "2.0" in shown.output, "steps a second"
    with file.open("a") as more:
        more.write('ep", "step": 2, "time": 0, "seconds": 0.5, "wire_bytes": 10, "wait_seconds": null, "work_seconds": 0}\n')
        more.write(json.dumps({"kind": "end", "time": 0.0}) + "\n")
    console = Console(record=True, width=120)
    watch(tmp_path, console)  # comes back, because it has ended
    shown_at_the_end = console.export_text()
    assert "ended" in shown_at_the_end
    assert "bytes/step: what a rank put on the cable" in " ".join(shown_at_the_end.split()), "its columns are explained"
    assert "last sync:" not in shown_at_the_end, "and no more than there is"
    text = run_page.write(tmp_path).read_text()
    assert "&lt;b&gt;int8()&lt;/b&gt;" in text
    assert "<b>int8()" not in text
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0


def test_a_folder_that_is_not_there_is_waited_for_in_words(tmp_path: Path) -> None:
    folder, out = tmp_path / "not/there", io.StringIO()
    watcher = threading.Thread(target=watch, args=(folder, Console(file=out, width=300)), daemon=True)
    watcher.start()
    for _ in range(1000):
        if "waiting" in out.getvalue():
            break
        time.sleep(0.01)
    said = out.getvalue()
    assert f"{folder} does not exist yet; waiting 60 s for a run to write there: laconic run --record {folder}" in said
    folder.mkdir(parents=True)
    lines = [start_row(0, 1), STEP, {"kind": "end", "time": 0.0}]
    (tmp_path / "whole").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "whole").rename(folder / "rank-0.jsonl")
    watcher.join(timeout=60)
    assert "ended" in out.getvalue()


def recorded(folder: Path, steps: int, period: int, *, ended: bool, known: bool = True) -> None:
    """A run that sends 340,000 bytes at the end of each period."""
    lines: list[dict[str, Any]] = [start_row(0, 1) | ({"cycle": period} if known else {})]
    lines += [{**STEP, "step": n, "wire_bytes": 0 if n % period else 340_000} for n in range(1, steps + 1)]
    lines += [{"kind": "end", "time": 0.0}] if ended else []
    (folder / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("steps", [60, 64, 100, 7, 16])
def test_watch_and_report_show_the_same_bytes_a_step(steps: int, tmp_path: Path) -> None:
    for ended, known in ((True, True), (True, False), (False, True)):
        recorded(tmp_path, steps, 16, ended=ended, known=known)
        (record,) = runs.read(tmp_path)
        shown = _cells(record)[3]
        if ended:
            assert shown in run_page.page([record])
            assert shown == human(steps // 16 * 340_000 / steps)
        else:
            assert shown == (human(340_000 / 16) if steps >= 16 else human(0)), "whole periods while it goes on"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{\n", "line 1 is damaged"),
        ('{"kind": "step"}\n', "doesn't begin with a start"),
        ('{"kind": "start", "version": 9}\n', "version 9"),
    ],
)
def test_records_that_are_damaged_or_foreign(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text(text)
    for command in (["watch", "--once"], ["report"]):
        done = CliRunner().invoke(app, [*command, str(tmp_path)])
        assert done.exit_code == 1
        assert sentence in " ".join(done.output.split())
    assert CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")]).exit_code == 1


ON_A_CABLE = """
import os, sys, torch, torch.distributed as dist, laconic
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from laconic.lab.link import sent_bytes
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with laconic.attach(model, optimizer, "int8()") as run:
    laconic.Meter(run, sys.argv[1])
    dist.barrier()
    before = sent_bytes()
    for _ in range(20):
        model(torch.randn(8, 256)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    os.write(1, f"kernel {dist.get_rank()} {sent_bytes() - before}\\n".encode())  # in one piece
"""


@pytest.mark.soak
@needs_link
def test_rows_add_up_to_what_the_kernel_counted(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", ON_A_CABLE, str(tmp_path)], 2, Link(1_000_000_000), os.environ)
    output, _ = process.communicate(timeout=100)
    kernel = {int(line.split()[1]): int(line.split()[2]) for line in output.splitlines() if line.startswith("kernel")}
    for record in runs.read(tmp_path):
        assert sum(row["wire_bytes"] for row in record.steps) == pytest.approx(kernel[record.rank], rel=0.05), output


@pytest.mark.soak
def test_laconic_run_records(tmp_path: Path) -> None:
    script = Path(__file__).with_name("script") / "scripts/plain.py"
    command = [
        sys.executable,
        "-m",
        "laconic.cli",
        "run",
        "-s",
        "int8()",
        "--record",
        str(tmp_path / "run"),
        "--nproc-per-node=2",
    ]
    done = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    records = runs.read(tmp_path / "run")
    assert [len(record.steps) for record in records] == [24, 24]
    assert all(record.end for record in records)
