"""Scripts of Lightning, Accelerate and Transformers that know nothing of laconic: by `laconic run`, and by their launchers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.script.test_scripts import SCRIPTS, Launch, final, launch, torchrun

__all__ = ["launch"]  # a fixture
NAMES = ["lightning_fit", "accelerate_loop", "transformers_fit"]
ATTACHED = "laconic: int8() is attached to"


def by_launcher(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """With the strategy in the environment, and nothing of `laconic run`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LACONIC_STRATEGY": "int8()"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=150)


def equal(found: list[dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(one[name], found[0][name]) for one in found for name in one)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_ddp_is_the_frameworks_own_to_the_bit(name: str, tmp_path: Path, launch: Launch) -> None:
    folders = [tmp_path / "plain", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
    done = by_launcher(torchrun(SCRIPTS / f"{name}.py", str(folders[0]))[1:])
    assert done.returncode == 0, done.stderr
    ours = launch("ddp()", SCRIPTS / f"{name}.py", str(folders[1]))
    assert ours.returncode == 0, ours.stderr
    assert "laconic: ddp() is attached to" in ours.stderr
    plain, mine = (final(folder) for folder in folders)
    assert len(plain) == len(mine) == 2
    assert equal([*plain, *mine])


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy", ["int8()", "post_local_sgd(warmup=4, period=6)", "diloco(6)", "streaming_diloco(6, fragments=2, delay=2)"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_trains_the_script(name: str, strategy: str, tmp_path: Path, launch: Launch) -> None:
    if name == "transformers_fit" and strategy.startswith("post_local_sgd"):
        strategy = "post_local_sgd(warmup=4, period=6, subgroup='none')"  # its DDP communicates with all ranks
    done = launch(strategy, SCRIPTS / f"{name}.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = final(tmp_path)
    assert len(found) == 2
    assert equal(found)


@pytest.mark.soak
def test_accelerate_launch(tmp_path: Path) -> None:
    # On a machine without a GPU, `accelerate launch` starts several processes only if it is told that there are GPUs.
    how = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
    done = by_launcher([*how, "-m", "laconic.script", str(SCRIPTS / "accelerate_loop.py"), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert ATTACHED in done.stderr
    found = final(tmp_path)
    assert len(found) == 2
    assert equal(found)


@pytest.mark.soak
@pytest.mark.parametrize("own", ["ddp", "ddp_spawn"])
def test_processes_that_lightning_starts_itself(own: str, tmp_path: Path) -> None:
    done = by_launcher([str(SCRIPTS / "lightning_fit.py"), str(tmp_path), own, "auto"])
    assert done.returncode == 0, done.stderr
    assert ATTACHED in done.stderr
    if own == "ddp":
        assert equal(final(tmp_path))


def test_the_module_for_other_launchers_says_what_it_needs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LACONIC_STRATEGY"}
    command = [sys.executable, "-m", "laconic.script", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("python -m laconic.script runs a script by the strategy that LACONIC_STRATEGY names")
