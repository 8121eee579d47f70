"""The examples of the frameworks run, and what they resume from a checkpoint in mid-period is the same training."""

import re
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, finished

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
EXAMPLES = {
    "lightning_trainer": ([sys.executable], ["--resume", "epoch=0"]),  # the Trainer starts its processes itself
    "accelerate_loop": (TORCHRUN, ["--resume"]),
    "transformers_trainer": (TORCHRUN, ["--resume", "checkpoint-33"]),
}


def held_out_loss(command: list[str]) -> str:
    done = finished(command)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"held-out loss (\d\.\d{6})", done.stdout)
    return str(found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    start, _ = EXAMPLES[name]
    assert held_out_loss([*start, str(ROOT / f"examples/{name}.py"), str(tmp_path)]) < "3.8"


@pytest.mark.soak
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_resumes_to_the_same_loss(name: str, tmp_path: Path) -> None:
    start, resume = EXAMPLES[name]
    command = [*start, str(ROOT / f"examples/{name}.py"), str(tmp_path)]
    assert held_out_loss(command) == held_out_loss([*command, *resume])
