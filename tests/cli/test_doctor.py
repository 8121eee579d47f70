"""`laconic doctor`: what it finds here, and where torch is missing, broken or unable to communicate."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import laconic
from laconic.cli import torch_check
from laconic.cli.doctor import lines, show
from laconic.cli.machine import Findings, Missing, Package, _missing, needed_packages

TORCH = {
    "version": "2.13.0",
    "build": "CPU only",
    "debug": False,
    "cpu_capability": "AVX2",
    "threads": 2,
    "accelerator": None,
    "distributed": True,
    "backends": {"gloo": True, "nccl": False},
}
KERNELS = {"compiler": "/usr/bin/g++", "fused": "auto", "refused": None, "folder": "/x", "known": 9, "cached": 3, "failed": 0}
WORKING = dict.fromkeys(("all_reduce", "all_gather", "all_to_all", "broadcast"))
PACKAGES = [Package("torch", ">=2.13", None, "2.13.0"), Package("torchft", ">=0.2", "elastic", None)]
MACHINE = {"system": "Linux", "cores": 2, "usable_cores": 2, "OMP_NUM_THREADS": None}
PYTHON = {"version": "3.11.4", "executable": "/usr/bin/python", "laconic": "/x/laconic"}
FOUND = Findings(PYTHON, MACHINE, PACKAGES, TORCH, KERNELS, {**WORKING}, None, None)


def said(found: Findings) -> str:
    screen = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(found, screen)
    screen.file.close()
    return screen.export_text()


def test_what_works_and_what_is_missing_with_its_command() -> None:
    found = replace(FOUND, missing=_missing(FOUND))
    assert found.broken is None
    assert [one.command for one in found.missing] == ["pip install 'torchft>=0.2'"]
    text = said(found)
    for words in (
        "laconic works here",
        "gloo yes, nccl no",
        "all_to_all",
        "3 of 9 cached",
        "torchft (not installed), for the extra `elastic`",
    ):
        assert words in text
    assert json.loads(json.dumps(found.as_dict()))["version"] == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"torch": {"error": "torch can't be imported: ImportError: no libtorch"}}, "no libtorch"),
        ({"packages": [replace(PACKAGES[0], version="2.12.1+cpu")]}, "laconic needs torch>=2.13, and 2.12.1+cpu is too old"),
        ({"torch": {**TORCH, "distributed": False}}, "without torch.distributed"),
        ({"collectives": {**WORKING, "all_to_all": "RuntimeError: refused"}}, "all_to_all fails on gloo"),
    ],
)
def test_where_laconic_cannot_work(changed: dict[str, Any], why: str) -> None:
    found = replace(FOUND, **changed)
    assert why in (found.broken or "")
    assert "laconic can't work here" in said(found)


def test_a_failing_gloo_is_no_end_where_there_is_another_backend() -> None:
    backends = {"gloo": True, "nccl": True}
    found = replace(FOUND, torch={**TORCH, "backends": backends}, collectives={**WORKING, "all_to_all": "refused"})
    assert found.broken is None
    assert "all_to_all fails: refused" in dict(lines(found))["on gloo"]


def test_without_a_compiler_the_command_for_one_is_given() -> None:
    found = replace(FOUND, kernels={**KERNELS, "compiler": None}, packages=PACKAGES[:1])
    (lacking,) = [one for one in _missing(found) if one.what == "a C++ compiler"]
    assert isinstance(lacking, Missing)
    assert "no C++ compiler" in dict(lines(found))["kernels"]


def test_one_thread_and_a_kernel_without_delays() -> None:
    refused = "limited links can't be had here: this kernel has no delays (netem): (2, 'No such file or directory')"
    found = dict(lines(replace(FOUND, delays=refused, torch={**TORCH, "threads": 1})))
    assert found["limited links"].endswith("tbf); delays: not possible, this kernel has no netem")
    assert "AVX2, 1 thread; " in found["torch"]
    assert "AVX2, 2 threads; " in dict(lines(FOUND))["torch"]
    other = dict(lines(replace(FOUND, delays="limited links can't be had here: not permitted")))
    assert other["limited links"].endswith("delays: limited links can't be had here: not permitted")


def test_the_packages_are_those_of_laconic_s_own_metadata() -> None:
    found = {one.name: one for one in needed_packages()}
    assert found["torch"].version is not None
    assert torch.__version__.startswith(found["torch"].version)
    assert (found["torch"].extra, found["torch"].problem) == (None, None)
    assert found["typer"].extra == "lab"
    assert "pytest" not in found


def test_what_torch_says_of_itself_here() -> None:
    found, kernels = torch_check.facts(), torch_check.kernels()
    assert found["version"] == torch.__version__
    assert found["backends"]["gloo"] is True
    assert kernels["known"] > 5
    assert 0 <= kernels["cached"] <= kernels["known"]


def test_collectives_are_tried_for_real(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch_check.collectives(0, 1, str(tmp_path / "store"))
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {answer["collective"] for answer in answers} > WORKING.keys()
    assert all(answer["problem"] is None for answer in answers)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('libtorch_cpu.so: cannot open shared object file')", "libtorch_cpu.so: cannot open"),
        ("import os; os.abort()", "exit code -6"),
    ],
)
def test_a_broken_torch_is_named_and_nothing_else_fails(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "laconic.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert why in found["broken"]
    assert found["laconic"] == laconic.__version__
    assert found["collectives"] == {}


@pytest.mark.soak
def test_this_machine() -> None:
    command = [sys.executable, "-m", "laconic.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] is None
    assert found["collectives"].items() >= WORKING.items()
