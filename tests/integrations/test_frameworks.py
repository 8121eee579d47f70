"""What every framework must do alike."""

from pathlib import Path

import pytest
import torch

import laconic
from tests.integrations.frameworks import FRAMEWORKS, Net, Outcome, Plan, fit, mean_loss
from tests.live import ranks

STRATEGIES = [
    "int8()", "powersgd(rank=2, warmup=5)", "post_local_sgd(warmup=10, period=8)", "diloco(8, warmup=10)",
    "streaming_diloco(8, fragments=2, delay=2, warmup=9)",
]  # fmt: skip
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def same(left: Outcome, right: Outcome) -> bool:
    return all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)


@every_framework
def test_ddp_is_the_frameworks_own_to_the_bit(framework: str, tmp_path: Path) -> None:
    plain = ranks(2, fit, framework, tmp_path / "plain", Plan(None))
    ours = ranks(2, fit, framework, tmp_path / "ours", Plan("ddp()"))
    for mine, theirs in zip(ours, plain, strict=True):
        assert same(mine, theirs)
        assert mine.losses == theirs.losses
        assert mine.stats.steps == 60


@every_framework
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_trains(framework: str, strategy: str, tmp_path: Path) -> None:
    options = {}
    if framework == "transformers" and "post_local_sgd" in strategy:  # refused with the Trainer's default: see its own tests
        options["ddp_find_unused_parameters"] = False
    first, second = ranks(2, fit, framework, tmp_path, Plan(strategy, options=options))
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights if name != "seen")
    assert sum(first.losses[-5:]) < 0.7 * sum(first.losses[:5])
    assert first.stats.steps == 60
    predicted = laconic.predict(strategy, Net(), world_size=2, buckets=first.layout, step=0, steps=60)
    assert first.at_last_step.wire_bytes == predicted.wire_bytes
    assert first.at_last_step.collectives == predicted.collectives


@every_framework
@pytest.mark.parametrize("strategy", ["ddp(reducer=ErrorFeedback(Quantized(4)))", "streaming_diloco(8, fragments=2, delay=3)"])
def test_a_resumed_training_is_the_same_training(framework: str, strategy: str, tmp_path: Path) -> None:
    whole = ranks(2, fit, framework, tmp_path / "whole", Plan(strategy, steps=40))
    for step in (21,):  # in the middle of a period, with an exchange outstanding
        folder = tmp_path / str(step)
        ranks(2, fit, framework, folder, Plan(strategy, steps=40, save_at=step, stop_at=step + 4))
        resumed = ranks(2, fit, framework, folder, Plan(strategy, steps=40, save_at=step, resume=True))
        for mine, other in zip(resumed, whole, strict=True):
            assert same(mine, other)
            assert not mine.warned
            assert mine.stats.steps == 40


@every_framework
def test_validation_is_of_the_mean_and_changes_nothing(framework: str, tmp_path: Path) -> None:
    # Without dropout: a framework's validation draws from the generators, with laconic and without.
    plan = Plan("diloco(8)", steps=14, validate_at=11, dropout=0.0)
    outcomes = ranks(2, fit, framework, tmp_path / "with", plan)
    without = ranks(2, fit, framework, tmp_path / "without", Plan("diloco(8)", steps=14, dropout=0.0))
    apart = ranks(2, fit, framework, tmp_path / "apart", Plan("diloco(8)", steps=14, stop_at=11, dropout=0.0))
    mean = {name: torch.stack([one.weights[name] for one in apart]).mean(0) for name in apart[0].weights}
    assert not torch.equal(apart[0].weights["body.0.weight"], apart[1].weights["body.0.weight"])
    expected = evaluated(mean)
    found = sum(one.validated[0] for one in outcomes) / 2
    assert found == pytest.approx(expected, rel=1e-5)
    for one in apart:
        assert evaluated(one.weights) != pytest.approx(expected, rel=1e-5)
    for mine, other in zip(outcomes, without, strict=True):
        assert same(mine, other)


@every_framework
@pytest.mark.parametrize("strategy", ["int8()", "diloco(4)"])
def test_accumulation_is_one_step(framework: str, strategy: str, tmp_path: Path) -> None:
    one, four = (ranks(2, fit, framework, tmp_path / str(n), Plan(strategy, steps=12, accumulate=n))[0] for n in (1, 4))
    for key in ("steps", "syncs", "exchanges", "wire_bytes", "collectives"):
        assert getattr(one.at_last_step, key) == getattr(four.at_last_step, key), key


def evaluated(weights: dict[str, torch.Tensor]) -> float:
    """The loss of these weights on all held-out samples."""
    net = Net()
    net.load_state_dict(weights)
    return mean_loss(net.eval(), 0, 1)
