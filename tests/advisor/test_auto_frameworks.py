"""`auto()` inside of frameworks' loops: it chooses there, and their own checkpoints go on by the choice."""

from pathlib import Path

import pytest
import torch

from tests.integrations.frameworks import FRAMEWORKS, Plan, fit
from tests.live import ranks

SLOW = "auto(share=0.9, link='100kbit', steps=2, seconds=0.2)"  # chosen after 5 steps


@pytest.mark.soak
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_goes_on_by_the_choice_from_its_own_checkpoint(framework: str, tmp_path: Path) -> None:
    whole = ranks(2, fit, framework, tmp_path / "whole", Plan(SLOW, steps=20))
    ranks(2, fit, framework, tmp_path / "cut", Plan(SLOW, steps=20, save_at=9, stop_at=12))
    resumed = ranks(2, fit, framework, tmp_path / "cut", Plan(SLOW, steps=20, save_at=9, resume=True))
    plain = ranks(2, fit, framework, tmp_path / "plain", Plan("ddp()", steps=20))
    for mine, other, without in zip(resumed, whole, plain, strict=True):
        assert all(torch.equal(mine.weights[name], other.weights[name]) for name in other.weights)
        assert mine.stats.steps == other.stats.steps == 20
        assert mine.stats.wire_bytes == other.stats.wire_bytes < 0.6 * without.stats.wire_bytes, "something was chosen"
        assert not mine.warned
