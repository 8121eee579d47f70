"""`laconic run -s auto`: a script that knows nothing of laconic chooses, and goes on from its own checkpoints."""

import copy
import re
import sys
from pathlib import Path

import pytest
from torch import Tensor

from laconic.cost.step_timer import SKIPPED
from laconic.script import auto
from tests.lab.test_link import needs_link
from tests.live import ranks
from tests.models import same_bits, weights
from tests.script.test_auto import build, installed, step
from tests.script.test_scripts import run

CHOSEN_AFTER = SKIPPED + 2
SLOW = "auto(share=0.9, link='100kbit', steps=2, seconds=0.2)"
END = CHOSEN_AFTER + 6


def resumed(rank: int) -> tuple[list[str], list[str]]:
    """The strategies of an uninterrupted script and of one that resumes, and what the latter says."""
    at = CHOSEN_AFTER + 2

    def finished() -> str:
        assert auto._auto is not None
        assert auto._auto.run is not None
        strategy = str(auto._auto.run.strategy)
        auto._auto.finish()
        return strategy

    with installed(SLOW) as lines:
        model, optimizer = build()
        for number in range(at):
            step(model, optimizer, number)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for number in range(at, END):
            step(model, optimizer, number)
        wanted: list[Tensor] = weights(model)
        chosen, said = [finished()], [lines.getvalue()]
    with installed(SLOW) as lines:
        model, optimizer = build()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for number in range(at, END):
            step(model, optimizer, number)
        assert same_bits(weights(model), wanted)
        chosen.append(finished())
        said.append(lines.getvalue())
    return chosen, said


def test_a_script_goes_on_by_its_choice_from_its_own_checkpoint() -> None:
    ((straight, resumed_by), (first, second)), (others, silence) = ranks(2, resumed)
    assert straight == resumed_by == others[0] == others[1]
    assert straight not in ("ddp()", SLOW)
    attached = f"laconic: {SLOW} is attached to Sequential (163 parameters) and AdamW, 2 ranks: it trains as ddp() until it has"
    assert first.startswith(attached)
    assert f"laconic: {SLOW} goes on by {straight} after step {CHOSEN_AFTER}. " in first
    assert second.startswith(attached)
    assert f"goes on by {straight}, which the state of step {CHOSEN_AFTER + 2} has; nothing is probed\n" in second
    assert (first.count("\n"), second.count("\n"), silence) == (4, 3, ["", ""])


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(512, 512), nn.ReLU())]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(64, 512)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.soak
@needs_link
def test_a_slow_link_and_none_are_chosen_for_differently(tmp_path: Path) -> None:
    Path(tmp_path, "train.py").write_text(SCRIPT)
    chosen = {}
    for link in ("none", "100mbit"):
        command = [sys.executable, "-m", "laconic.cli", "run", "-s", "auto(share=0.6)", "--link", link, "--nproc-per-node=2"]
        done = run([*command, str(tmp_path / "train.py")])
        assert done.returncode == 0, done.stderr
        found = re.findall(r"laconic: auto\(share=0\.6\) goes on by (.*) after step 13\. ", done.stdout + done.stderr)
        assert len(found) == 1, done.stdout + done.stderr
        chosen[link] = found[0]
    assert chosen["none"] != chosen["100mbit"] != "ddp()", chosen


@pytest.mark.soak
def test_a_script_is_timed_and_advised(tmp_path: Path) -> None:
    Path(tmp_path, "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "laconic.cli", "run", "--advise", "--workers", "16", "--link", "1gbit"]
    done = run([*command, "--json", str(tmp_path / "train.py")])
    assert done.returncode == 0, done.stderr
    assert "laconic: 10 steps are timed: the script ends here, with exit code 0" in done.stderr
    assert '"choice"' in done.stdout
