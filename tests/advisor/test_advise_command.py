"""`laconic advise`, as a person calls it."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from laconic.advisor.curves import WORKERS
from laconic.cli import app
from laconic.cli.advise import _is_script
from laconic.cost.measured import Fit, Probe, Worker

NUMBERS = ["--params", "124m", "--step-ms", "90"]
LINK = ["--workers", "8", "--link", "1gbit"]


def laconic(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["advise", *arguments])


def answer(*arguments: str) -> dict[str, Any]:
    done = laconic(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_numbers_alone_need_no_torch(tmp_path: Path) -> None:
    code = "import sys; from laconic.cli import app; "
    command = ["advise", *NUMBERS, *LINK, "--out", str(tmp_path)]
    code += f"app({command!r}, standalone_mode=False); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Is the network the problem? Yes: over 1gbit, ddp() reaches" in done.stdout
    assert (tmp_path / "advice.html").exists()


def test_the_answer_in_json() -> None:
    found = answer(*NUMBERS, *LINK)
    assert (found["version"], found["workers"], found["link"], found["risk"]) == (1, 8, "1gbit", "local")
    assert found["choice"] in [row["strategy"] for row in found["rows"]]
    assert found["choice"] in found["reason"]
    rows = {row["strategy"]: row for row in found["rows"]}
    plain, eight = rows["ddp()"], rows["int8()"]
    assert plain["wire_bytes_per_step"] == pytest.approx(2 * 7 / 8 * 4 * 1.24e8, rel=0.001)
    assert eight["wire_bytes_per_step"] == pytest.approx(plain["wire_bytes_per_step"] * 1.0078 / 4, rel=0.001)
    for row in found["rows"]:
        parts = row["compute_seconds"] + row["work_seconds"] + row["waiting_seconds"]
        assert row["step_seconds"] == pytest.approx(parts)
        assert row["share"] == pytest.approx(row["compute_seconds"] / row["step_seconds"])
        assert row["wire_bytes_per_day"] == pytest.approx(row["wire_bytes_per_step"] * 86400 / row["step_seconds"])
    assert any("hidden size 896, 9 layers" in line for line in found["assumptions"])
    assert any("Nothing was measured on a GPU" in line for line in found["assumptions"])


def test_a_fast_link_is_no_problem_and_a_slower_one_never_better() -> None:
    long = ["--params", "124m", "--step-ms", "900", "--workers", "8"]
    found = {link: answer(*long, "--link", link) for link in ("1gbit", "10gbit", "800gbit")}
    assert found["800gbit"]["choice"] == "ddp()"
    assert "No: over 800gbit" in found["800gbit"]["verdict"]
    shares = [one["rows"][0]["share"] for one in found.values()]
    assert shares == sorted(shares)


def test_money_and_budgets() -> None:
    found = answer(*NUMBERS, *LINK, "--price-per-gb", "0.09")
    nodes = answer(*NUMBERS, "--nodes", "4x4", "--link", "10gbit", "--price-per-gb", "0.09")["rows"][0]
    assert nodes["cost_per_day"] == pytest.approx(0.09 * 4 * nodes["wire_bytes_per_day"] / 1e9), (
        "of 4 cables, not of 16 workers"
    )
    for row in found["rows"]:
        assert row["cost_per_day"] == pytest.approx(row["wire_bytes_per_day"] / 1e9 * 0.09 * 8)
    cost = next(row["cost_per_day"] for row in found["rows"] if row["strategy"] == found["choice"])
    less = answer(*NUMBERS, *LINK, "--price-per-gb", "0.09", "--budget", f"{cost * 0.7:.2f}usd")
    (row,) = [row for row in less["rows"] if row["strategy"] == less["choice"]]
    assert row["cost_per_day"] <= cost * 0.7
    assert less["rows"][0]["refused"] == "over the budget"


def test_memory_keeps_strategies_out() -> None:
    found = answer(*NUMBERS, *LINK, "--memory", "2.1gb")
    assert {row["refused"] for row in found["rows"] if row["extra_memory_bytes"] > 2e8} == {"its extra memory does not fit"}
    assert "does not fit" in laconic(*NUMBERS, *LINK, "--memory", "1.9gb").stderr


def test_nodes_share_a_cable_and_average_gradients_inside() -> None:
    found = answer(*NUMBERS, "--nodes", "4x4", "--link", "10gbit")
    assert (found["workers"], found["per_node"]) == (16, 4)
    (local,) = [row for row in found["rows"] if row["strategy"] == "post_local_sgd(warmup=100, period=16)"]
    whole = found["rows"][0]["wire_bytes_per_step"]
    assert local["wire_bytes_per_step"] * 16 == pytest.approx(whole, rel=0.01), "gradients stay within the node"


def test_an_answer_within_a_risk() -> None:
    found = answer(*NUMBERS, *LINK, "--risk", "rounding")
    assert found["choice"] == "int8()"
    assert found["reached"] is False
    assert {row["refused"] for row in found["rows"]} == {"", "beyond --risk rounding"}


def test_more_strategies_by_name() -> None:
    found = answer("--params", "1m", "--step-ms", "5", *LINK, "-s", "topk(ratio=0.05)")
    (row,) = [row for row in found["rows"] if row["strategy"] == "topk(ratio=0.05)"]
    assert row["risk"] == "delay"
    assert 0 < row["wire_bytes_per_step"] < found["rows"][0]["wire_bytes_per_step"] / 8


def test_a_page_with_curves(tmp_path: Path) -> None:
    done = laconic(*NUMBERS, *LINK, "--out", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "new/advice.json").read_text())
    strategies = [row["strategy"] for row in data["rows"]]
    assert list(data["by_bandwidth"]) == list(data["by_workers"]) == strategies
    for row in data["rows"]:
        points = dict(data["by_bandwidth"][row["strategy"]])
        assert (min(points), max(points)) == (10**7, 4 * 10**11)
        assert points[10**9] == pytest.approx(row["share"], abs=0.02), "the curve goes through the table's number"
        workers = dict(data["by_workers"][row["strategy"]])
        assert list(workers) == list(WORKERS)
        assert workers[8] == pytest.approx(row["share"], abs=0.02)
    plain = dict(data["by_workers"]["ddp()"])
    assert plain[2] > plain[8] > plain[1024], "2(N-1)/N, and a longer ring"
    assert data["choice"].partition("(")[0] in (tmp_path / "new/advice.html").read_text()


def test_a_task_is_timed_and_its_bytes_are_exact() -> None:
    found = answer("digits", "--workers", "2", "--link", "10mbit")
    assert "151,498 parameters" in found["model"]
    plain = found["rows"][0]
    assert plain["wire_bytes_per_step"] == 4 * 151_498, "2(N-1)/N is 1"
    assert 0 < plain["compute_seconds"] < 1
    assert any("outer_momentum=0.2" in row["strategy"] for row in found["rows"]), "the task's optimizer is SGD"
    assert any("timed in 20 steps" in line for line in found["assumptions"])


SCRIPT = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("it went on")
"""


@pytest.mark.soak
def test_a_script_is_run_until_it_is_timed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "laconic.cli", "advise", "train.py", *LINK, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "the script, 4,160 parameters" in found["model"]
    assert "run as a script" in done.stderr


def measured(**changes: object) -> str:
    data = {"version": 1, "compute": [0.1, 0.2, 0.01], "parameters": {"a.weight": [64, 32], "b": [64]}, "dtype": "float32"}
    return json.dumps({**data, **changes})


def test_what_was_measured_of_a_script(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(measured())
    found = answer("--measured", str(file), "--workers", "2", "--link", "10mbit")
    assert found["rows"][0]["wire_bytes_per_step"] == 4 * (64 * 32 + 64)
    assert found["rows"][0]["compute_seconds"] == pytest.approx(0.31)
    assert any("local_adam" in row["strategy"] for row in found["rows"])
    file.write_text(measured(optimizer="sgd"))
    found = answer("--measured", str(file), "--workers", "2", "--link", "10mbit")
    assert not any("local_adam" in row["strategy"] for row in found["rows"]), "the script's optimizer is SGD"
    file.write_text(measured(dtype="bfloat16"))
    assert answer("--measured", str(file), "--workers", "2", "--link", "10mbit")["rows"][0]["wire_bytes_per_step"] == 4224


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "can't be read"),
        ("[]", "has version None"),
        (measured(version=2), "has version 2, and this laconic reads version 1"),
        (measured(compute=[1, 2]), "must be the seconds of forward, backward and optimizer"),
        (measured(compute=[0, 0, 0]), "must be the seconds"),
        (measured(compute=[-1, 2, 3]), "must be the seconds"),
        (measured(parameters={"a": "wide"}), "must be shapes by name"),
        (measured(parameters={"a": [2], "a.b": [2]}), "no model has a parameter of the name 'a.b'"),
        (measured(parameters={"training": [2]}), "no model has a parameter of the name 'training'"),
        (measured(parameters={}), "needs parameters"),
        (measured(dtype="float33"), "must be one of torch's"),
    ],
)
def test_a_file_that_is_none(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(text)
    done = laconic("--measured", str(file), *LINK)
    assert done.exit_code == 1
    assert error in done.stderr


PROBE = Probe(
    world=4,
    per_node=2,
    device="cpu",
    backend="gloo",
    seconds=3.0,
    asked_seconds=3.0,
    wire_bytes=10**8,
    workers=[Worker(rank, f"host{rank // 2}", rank // 2) for rank in range(4)],
    samples=[],
    left_out=[],
    fits=[
        Fit(kind, ranks, 1, 1e-4, 1e-9, (1e-4, 1e-4), (1e-9, 1e-9), 0.01, 0.02)
        for kind in ("AllReduce", "AllGather", "AllToAll")
        for ranks in (2, 4)
    ],
    bits_per_second=10**8,
    delay_seconds=0.0,
    link_note="large messages agree on 100 Mbit/s",
    slow=[],
    slow_down=0.1,
    slow_downs={},
)


def test_a_probe_is_the_network(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text(PROBE.text())
    found = answer(*NUMBERS, "--probe", str(file))
    assert (found["workers"], found["per_node"], found["link"]) == (4, 2, "100mbit")
    assert any("large messages agree" in line for line in found["assumptions"])
    done = laconic(*NUMBERS, "--probe", str(file), "--workers", "16")
    assert done.exit_code == 1
    assert "the probe measured 4 workers, and 16 are asked for" in done.stderr
    done = laconic(*NUMBERS, "--probe", str(file), "--nodes", "1x4")
    assert done.exit_code == 1
    file.write_text(replace(PROBE, per_node=1).text())
    done = laconic(*NUMBERS, "--probe", str(file), "--nodes", "2x2")
    assert "--nodes 2x2 has 2 workers in a node, and the probe found 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([*NUMBERS, "--workers", "8"], "which network? Give --link, such as 1gbit:20ms, or --probe"),
        ([*NUMBERS, *LINK, "--probe", "p.json"], "both are given"),
        ([*NUMBERS, "--workers", "8", "--link", "10"], "a link is a rate with its unit"),
        ([*NUMBERS, "--workers", "8", "--link", "-1gbit"], "a link is a rate with its unit"),
        ([*NUMBERS, "--workers", "1", "--link", "1gbit"], "with one worker there is nothing to communicate"),
        ([*NUMBERS, "--workers", "-2", "--link", "1gbit"], "--workers must be from 2"),
        ([*NUMBERS, "--link", "1gbit"], "how many workers?"),
        ([*NUMBERS, "--nodes", "4", "--link", "1gbit"], "--nodes is written as"),
        ([*NUMBERS, "--nodes", "0x4", "--link", "1gbit"], "--nodes is written as"),
        ([*NUMBERS, "--nodes", "1x4", "--link", "1gbit"], "is one node"),
        ([*NUMBERS, "--nodes", "2x4", "--workers", "4", "--link", "1gbit"], "are 8 workers, and --workers says 4"),
        (["--params", "1.3b", *LINK], "Give --step-ms beside --params"),
        (["--params", "1.3b", "--step-ms", "0", *LINK], "--step-ms must be a number above 0"),
        (["--params", "1.3b", "--step-ms", "nan", *LINK], "--step-ms must be a number above 0"),
        (["--params", "lots", "--step-ms", "9", *LINK], "a number of parameters is written as"),
        ([*NUMBERS, "--config", "gpt2", *LINK], "--config and --params are given"),
        ([*LINK], "which model?"),
        (["digits", "--step-ms", "9", *LINK], "steps are timed"),
        ([*NUMBERS, *LINK, "--share", "95"], "--share must be above 0 and at most 1"),
        ([*NUMBERS, *LINK, "--risk", "high"], "a risk is one of same, rounding, delay, local"),
        ([*NUMBERS, *LINK, "--optimizer", "lion"], "--optimizer is adam (and AdamW) or sgd"),
        ([*NUMBERS, *LINK, "--budget", "20usd"], "give --price-per-gb"),
        ([*NUMBERS, *LINK, "--budget", "20"], "--budget is data a day and cable"),
        ([*NUMBERS, *LINK, "--budget", "1kb"], "no strategy may be chosen"),
        ([*NUMBERS, *LINK, "--price-per-gb", "-1"], "--price-per-gb must be a number above 0"),
        ([*NUMBERS, *LINK, "--memory", "24"], "--memory is a size with its unit"),
        ([*NUMBERS, *LINK, "--memory-gb-per-second", "0"], "--memory-gb-per-second must be a number above 0"),
        (["--config", "no-such-model", "--step-ms", "9", *LINK], "transformers has no model type 'no-such-model'"),
        (["nothere.py", *LINK], "there is no file nothere.py"),
        (["digit", *LINK], "did you mean digits?"),
    ],
)
def test_bad_input_gets_a_line(arguments: list[str], error: str) -> None:
    done = laconic(*arguments)
    assert done.exit_code == 1
    assert error in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_of_transformers(tmp_path: Path) -> None:
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(small))
    found = answer("--config", str(tmp_path), "--step-ms", "30", *LINK)
    numbers = 1000 * 64 + 1024 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert f"{numbers:,} parameters" in found["model"]
    (tmp_path / "config.json").write_text("{}")
    done = laconic("--config", str(tmp_path / "config.json"), "--step-ms", "30", *LINK)
    assert done.exit_code == 1
    assert "is no config of a model that transformers knows" in done.stderr


def test_the_answers_in_the_docs_are_the_tools() -> None:
    """Where this fails: python docs/network_examples.py"""
    examples = runpy.run_path(str(Path(__file__).parents[2] / "docs/network_examples.py"))
    page = examples["PAGE"].read_text()
    assert page.count("$ laconic advise") == 7
    assert examples["answered"](page) == page


def test_the_tables_in_the_docs_are_the_advisors() -> None:
    """Where this fails: python docs/choosing_tables.py"""
    tables = runpy.run_path(str(Path(__file__).parents[2] / "docs/choosing_tables.py"))
    page = tables["PAGE"].read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == {*tables["CASES"], "links"}
    assert tables["answered"](page) == page


def test_a_table_in_the_docs_says_what_its_command_says() -> None:
    tables = runpy.run_path(str(Path(__file__).parents[2] / "docs/choosing_tables.py"))
    case = tables["CASES"]["sgd"]
    shown = tables["case_table"](case)
    cells = {name: found for name, *found in ([cell.strip() for cell in line.split("|")[1:-1]] for line in shown[:10])}
    for place, risk in enumerate(("same", "rounding", "delay", "local")):
        found = answer(*shlex.split(case.command)[2:], "--risk", risk)
        (row,) = [row for row in found["rows"] if row["strategy"] == found["choice"]]
        assert cells["you allow"][place] == f"`--risk {risk}`"
        assert cells["the choice"][place] == f"`{found['choice']}`"
        assert cells["rate"][place] == f"{int(100 * row['share'])} %"
        assert cells["its loss, where measured"][place] == row["loss"]
        assert float(cells["of which for the strategy"][place]) == pytest.approx(row["extra_memory_bytes"] / 1e9, abs=0.051)
    assert found["reason"] in " ".join("\n".join(shown[11:]).replace("\n> ", " ").split())


def test_what_never_averages_or_chooses_itself_is_no_choice() -> None:
    found = answer(*NUMBERS, *LINK, "-s", "silent()")
    (silent,) = [row for row in found["rows"] if row["strategy"] == "silent()"]
    assert silent["refused"] == "it never averages"
    assert found["choice"] != "silent()"
    assert "leaves the choice to the advisor" in laconic(*NUMBERS, *LINK, "-s", "auto()").stderr


def test_a_file_that_lacks_some_of_a_task_s_functions_is_a_script(tmp_path: Path) -> None:
    task, script = tmp_path / "task.py", tmp_path / "script.py"
    task.write_text("from here import model, optimizer\ndef batches(rank, world, seed): ...\ndef loss(model, batch): ...\n")
    script.write_text("def loss(x): ...\nprint('trains')\n")
    assert [_is_script(str(path)) for path in (task, script, tmp_path / "none.py")] == [False, True, False]


ONE_HOST = replace(
    PROBE,
    world=2,
    per_node=2,
    workers=[Worker(rank, "here", 0) for rank in range(2)],
    fits=[fit for fit in PROBE.fits if fit.ranks == 2],
    bits_per_second=None,
    link_note="all ranks are on one host: no link was measured, only this machine's own speed",
)


def test_a_probe_of_one_host_says_nothing_of_a_link(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    file.write_text(ONE_HOST.text())
    found = answer("--params", "350m", "--step-ms", "420", "--probe", str(file))
    assert found["verdict"].startswith(
        "This probe measured no link between hosts, so this answer is about this host alone: on it, ddp()"
    )
    again = "laconic probe --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first-node:29400"
    assert found["verdict"].endswith(again)
    assert (
        again.replace("--nproc-per-node 2", "--nproc-per-node 4")
        in Path(__file__).parents[2].joinpath("docs/probe.md").read_text()
    )
    assert {row["refused"] for row in found["rows"]} == {""}, "local strategies average, if within a host"
    assert found["rows"][0]["wire_bytes_per_step"] == pytest.approx(4 * 350e6, rel=0.01), "2(N-1)/N of 4 bytes a parameter"
    shown = laconic("--params", "1m", "--step-ms", "4", "--probe", str(file), "-s", "silent()").stdout
    assert "2 workers on one host" in shown
    assert "1 nodes" not in shown
    assert "bytes: what a worker sends within this host in a step" in " ".join(shown.split())
    assert "it never averages" in " ".join(shown.replace("│", " ").split()), "silent() does not"
    file.write_text(replace(PROBE, bits_per_second=None, link_note="processors were busy").text())
    assert (
        "over the network of the probe, which found no link's rate, ddp()" in answer(*NUMBERS, "--probe", str(file))["verdict"]
    )
    file.write_text(ONE_HOST.text())
    assert "this probe was on one host alone" in laconic(*NUMBERS, "--probe", str(file), "--budget", "1gb").stderr


def test_the_answer_ends_with_the_next_command() -> None:
    shown = laconic(*NUMBERS, *LINK).stdout
    choice = answer(*NUMBERS, *LINK)["choice"]
    assert shown.rstrip().endswith(f'\nlaconic compare mine.py \\\n  -s "{choice}" --link 1gbit')
    assert answer(*NUMBERS, *LINK)["next_command"] == f'laconic compare mine.py -s "{choice}" --link 1gbit'
    assert "on one machine, without communication" in " ".join(shown.split())
    quiet = laconic(*NUMBERS, "--workers", "8", "--link", "800gbit").stdout
    assert quiet.rstrip().endswith("next: nothing to change, ddp() is plain DDP")
