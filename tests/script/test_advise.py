"""`laconic run --advise`: a script's first steps are timed, what was found is written, and the script ends there."""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from laconic.cli import app
from laconic.cli.run import _options_of
from laconic.script import __main__ as script
from laconic.script import launch
from laconic.script.measuring import STEPS, Measuring
from tests.live import ranks

BEGIN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model[0].bias.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
made = []
def step(model=model, optimizer=optimizer):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    made.append(1)
"""
DDP = "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)\n"
LOOP = "for _ in range(100): step(model)\n"
SAVE = "open('saved', 'w').write('the script went on')\n"
SCRIPTS = {
    "a gradient loop": BEGIN + LOOP + SAVE,
    "a DDP": BEGIN + DDP + LOOP + SAVE,
    "a closure": BEGIN
    + """
def closure():
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    return loss
for _ in range(100): optimizer.step(closure)
"""
    + SAVE,
    "a GradScaler": BEGIN
    + """
scaler = torch.amp.GradScaler("cpu")
for _ in range(100):
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    + SAVE,
    "another optimizer, too": BEGIN
    + """
other = nn.Linear(4, 2)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(100):
    step(model)
    step(other, second)
"""
    + SAVE,
    "one that catches everything": BEGIN
    + f"""
caught = 0
for _ in range({STEPS} + 10):
    try: step(model)
    except BaseException as error: caught += 1
assert caught > 1
"""
    + SAVE,
    "few steps": BEGIN + "for _ in range(6): step(model)\n" + SAVE,
    "no step": BEGIN + SAVE,
    "too few": BEGIN + "step(model)\n" + SAVE,
    "a failure": BEGIN + "for _ in range(6): step(model)\n1 / 0\n",
    "an exit": BEGIN + "for _ in range(6): step(model)\nsys.exit(3)\n",
}

SCRIPTS_THAT_STEP = list(SCRIPTS)[:6]


def timed(rank: int, folder: str) -> dict[str, Any]:
    """Of each script: the exit code, whether it went on, what is written, and what is printed."""
    found: dict[str, Any] = {}
    before, leave, here = (sys.argv, list(sys.path)), script._leave, os.getcwd()
    watchers: list[Measuring] = []
    installed = script._installed

    def kept() -> Any:
        watchers.append(installed())  # type: ignore[arg-type]
        return watchers[-1]

    for name, text in SCRIPTS.items():
        place = Path(folder, name)
        place.mkdir()
        Path(place, "train.py").write_text(text)
        os.environ[script.MEASURED] = str(place / "measured.json")
        codes: list[int] = []
        script._leave = codes.append  # type: ignore[assignment]  # the process goes on
        script._installed = kept
        os.chdir(place)
        try:
            with redirect_stderr(io.StringIO()) as lines:
                script.main(["train.py"])
                watchers[-1].finish()  # as at the end of the process
        finally:
            watchers[-1].stop()
            os.chdir(here)
            script._leave, script._installed = leave, installed
            sys.argv, sys.path = before[0], list(before[1])
            del os.environ[script.MEASURED]
        file = place / "measured.json"
        written = json.loads(file.read_text()) if file.exists() else None
        left = sorted(path.name for path in place.iterdir() if path.name not in ("train.py", "measured.json"))
        found[name] = (codes, left, written, lines.getvalue())
    assert dist.is_initialized(), "which was there before the scripts"
    return found


def test_scripts_are_timed_and_end_where_that_is_done(tmp_path: Path) -> None:
    (found,) = ranks(1, timed, str(tmp_path))
    shapes = {"0.weight": [8, 4], "2.weight": [2, 8], "2.bias": [2]}
    line = f"laconic: {STEPS} steps are timed: the script ends here, with exit code 0\n"
    for name in SCRIPTS_THAT_STEP:
        codes, left, written, said = found[name]
        went_on = ["saved"] if name == "one that catches everything" else []
        assert (codes, left, said) == ([0], went_on, line), name
        assert (written["version"], written["parameters"], written["dtype"]) == (1, shapes, "float32"), name
        forward, backward, optimizer = written["compute"]
        if name == "a closure":  # only the whole is known there
            assert (backward, optimizer) == (pytest.approx(2 * forward), 0)
        else:
            assert min(forward, backward, optimizer) > 0, name
    codes, left, written, said = found["few steps"]
    assert (codes, left, said) == ([0], ["saved"], ""), "it ended by itself"
    assert written["parameters"] == shapes
    for name in ("no step", "too few"):
        assert found[name] == ([0], ["saved"], None, ""), name
    assert found["an exit"] == ([3], [], None, "")
    codes, left, written, said = found["a failure"]
    assert (codes, left, written) == ([1], [], None)
    assert "ZeroDivisionError" in said


def test_the_launcher_starts_one_process_without_a_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def torchrun(options: Any) -> int:
        given.append((options, os.environ["LACONIC_ADVISE"], "LACONIC_STRATEGY" in os.environ))
        return 5

    monkeypatch.setattr(launch, "_torchrun", torchrun)
    monkeypatch.setenv("LACONIC_STRATEGY", "int8()")
    monkeypatch.setenv("LACONIC_ADVISE", "")
    assert launch.measure([__file__, "--epochs", "3"], tmp_path / "found.json") == 5
    ((options, file, strategy),) = given
    assert (options.module, options.training_script) == (True, "laconic.script")
    assert options.training_script_args == [__file__, "--epochs", "3"]
    assert (options.nproc_per_node, options.standalone) == ("1", True)
    assert (file, strategy) == (str(tmp_path / "found.json"), False)
    with pytest.raises(ValueError, match=r"there is no script nowhere\.py"):
        launch.measure(["nowhere.py"], tmp_path / "found.json")


@pytest.mark.parametrize(
    ("strategy", "risk", "wanted"),
    [
        ("auto", None, "auto()"),
        ("auto()", "local", "auto(risk='local')"),
        ("auto(steps=4, link='1gbit')", "rounding", "auto(risk='rounding', link='1gbit', steps=4)"),
        ("int8()", None, "int8()"),
    ],
)
def test_the_risk_of_the_command_line_goes_into_the_strategy(strategy: str, risk: str | None, wanted: str) -> None:
    assert launch._text(strategy, risk) == wanted


@pytest.mark.parametrize(
    ("strategy", "risk", "wanted"),
    [
        ("int8()", "local", r"--risk is what auto\(\) may choose, and the strategy is int8\(\)"),
        ("auto(risk='same')", "local", r"--risk local and auto\(risk='same'\) both give a risk; give one of them"),
        ("auto", "high", "risk must be one of same, rounding, delay, local, from mild to strong, got 'high'"),
        ("auto(link='1')", None, "a link is a rate with its unit"),
    ],
)
def test_a_risk_or_a_link_that_cannot_be_used_is_known_before_anything_starts(
    strategy: str, risk: str | None, wanted: str
) -> None:
    with pytest.raises(ValueError, match=wanted):
        launch._text(strategy, risk)


OPTIONS = [
    (["--workers", "16", "--link=1gbit", "--json", "train.py", "--workers", "3"], 4),
    (["train.py", "--link", "1gbit"], 0),
    (["-s", "int4()", "-m", "package.train"], 2),
    (["--nproc-per-node", "2", "train.py"], 0),
]


@pytest.mark.parametrize(("arguments", "own"), OPTIONS)
def test_the_options_of_advise_end_where_the_script_begins(arguments: list[str], own: int) -> None:
    assert _options_of("advise", arguments) == (arguments[:own], arguments[own:])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "which script?"),
        (["train.py"], "for how many workers, and over which network?"),
        (["--workers", "4", "train.py"], "for how many workers, and over which network?"),
        (["--workers", "4", "--link", "100", "train.py"], "a link is a rate with its unit"),
        (["--workers", "4", "--link", "1gbit", "--nproc-per-node", "2", "train.py"], "has no option --nproc-per-node"),
        (["--workers", "4", "--link", "1gbit", "nowhere.py"], "there is no script nowhere.py"),
    ],
)
def test_what_cannot_be_advised_on_is_refused_before_the_script_runs(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        app(["run", "--advise", *(arguments or ["--json"])])
    assert end.value.code == 1
    assert wanted in capsys.readouterr().err
