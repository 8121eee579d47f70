"""A resumed run is the same run, to the bit, for every strategy."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.report import meter_records as runs
from laconic.run.run import engine_of
from tests.live import last_ranks, ranks
from tests.models import build, chain, difference, everything, same_bits, vectors, weights

STEPS = 10
# Each reducer and each recipe at least once; the whole matrix is in the soak.
REDUCERS = [
    "Exact()", "Cast('bf16')", "Quantized(8)", "ErrorFeedback(Quantized(4))", "ErrorFeedback(PowerSGD(2))",
    "ErrorFeedback(TopK(0.05))", "ErrorFeedback(Sign())", "ErrorFeedback(RandomK(0.1))",
    "ErrorFeedback(AlternatingPowerSGD(2))", "Quantized(4, block=16, rounding='stochastic')", "Float8()",
    "ErrorFeedback(BatchedPowerSGD(1))", "ErrorFeedback(Ternary())", "Momentum(ErrorFeedback(Sign()))",
    "ErrorFeedback(TopK(0.05, values='2bit'))",
]  # fmt: skip
RECIPES = [
    "ddp(reducer={})", "diloco(4, reducer={})", "streaming_diloco(4, fragments=2, delay=2, reducer={})",
    "slowmo(5, reducer={})", "local_sgd(3, reducer={})", "post_local_sgd(warmup=2, period=3)",
    "hierarchical_sgd({{2: 2, 4: 'world'}})", "local_sgd(period=QSR(base=2, alpha=0.1), moments='average')",
    "sparseloco(4)", "powersgd(rank=2, warmup=3)", "silent()", "local_adam(3, warmup=2, refresh=4)", "onebit_adam(warmup=3)",
]  # fmt: skip


THREE = ["ddp(reducer=ErrorFeedback(PowerSGD(2)))", "post_local_sgd(warmup=2, period=3)"]


def chosen() -> list[str]:
    """Every reducer once, in turn in the recipes that take one; and every other recipe."""
    takers = [recipe for recipe in RECIPES if "={}" in recipe]
    pairs = [takers[place % len(takers)].format(reducer) for place, reducer in enumerate(REDUCERS)]
    return pairs + [recipe.format() for recipe in RECIPES if recipe not in takers]


def matrix() -> list[str]:
    every = [recipe.format(reducer) for recipe in RECIPES for reducer in REDUCERS]
    return sorted(set(every) - set(chosen()))


def started(text: str, scaled: bool) -> tuple[Any, Any, Any]:
    model = build(chain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.5))  # a second moment that is worth sharing soon
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) if scaled else None
    return model, optimizer, laconic.attach(model, optimizer, text, scaler=scaler)


def step_once(model: Any, optimizer: Any, run: Any, rank: int, step: int) -> None:
    noise = torch.randn(3) * random.random()  # a step may draw random numbers, of torch's and of Python's
    loss = model(vectors(rank, step)).square().mean() + (model(vectors(rank, step)).mean(0) * noise).sum()
    scaler = engine_of(run).scaler
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss * (float("inf") if (rank, step) == (1, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def straight(rank: int, text: str, folder: str, saves: list[int], scaled: bool) -> dict[str, Any]:
    """Train to the end, with checkpoints on the way, which must change nothing."""
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    model, optimizer, run = started(text, scaled)
    saved = {}
    for step in range(STEPS):
        if step in saves:
            saved[step] = everything(model, [optimizer], run)
            laconic.checkpoint.save(folder, run=run, keep=None, extra={"step": step, "rank": rank})
        step_once(model, optimizer, run, rank, step)
    found = everything(model, [optimizer], run)
    run.sync()
    run.detach()
    return {"saved": saved, "end": found, "after a sync": weights(model)}


def resumed(rank: int, text: str, folder: str, at: int, scaled: bool) -> dict[str, Any]:
    torch.manual_seed(55)
    random.seed(55)
    model, optimizer, run = started(text, scaled)
    loaded = laconic.checkpoint.load(Path(folder) / f"step-{at:08d}", run=run)
    assert (loaded.step, loaded.extra) == (at, {"step": at, "rank": rank})
    saved = {at: everything(model, [optimizer], run)}
    for step in range(at, STEPS):
        step_once(model, optimizer, run, rank, step)
    found = everything(model, [optimizer], run)
    run.sync()
    run.detach()
    return {"saved": saved, "end": found, "after a sync": weights(model)}


def check(world: int, text: str, folder: Path, saves: list[int], scaled: bool = False) -> None:
    wanted = ranks(world, straight, text, str(folder), saves, scaled)
    for at in saves:
        found = ranks(world, resumed, text, str(folder), at, scaled)
        for rank in range(world):
            expected = {**wanted[rank], "saved": {at: wanted[rank]["saved"][at]}}
            unlike = difference(found[rank], expected, f"{text}, resumed at {at}, rank {rank}: ")
            assert unlike is None, unlike


@pytest.mark.parametrize("text", chosen())
def test_resume(text: str, tmp_path: Path) -> None:
    check(2, text, tmp_path, [5])


def test_resume_with_a_grad_scaler(tmp_path: Path) -> None:
    """It has skipped a step before the checkpoint, and is about to grow: in mid-count."""
    check(2, "ddp(reducer=ErrorFeedback(TopK(0.05)))", tmp_path, [5], scaled=True)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("powersgd(rank=2, warmup=3)", 2),  # the warm-up isn't over
        ("streaming_diloco(4, fragments=2, delay=2)", 7),  # a fragment is outstanding
    ],
)
def test_resume_on_four_ranks(text: str, at: int, tmp_path: Path) -> None:
    check(4, text, tmp_path, [at])


@pytest.mark.parametrize("text", ["ddp()", *(pytest.param(text, marks=pytest.mark.soak) for text in THREE)])
def test_resume_on_three_ranks_at_any_step(text: str, tmp_path: Path) -> None:
    """At three ranks the order of summation counts: DDP's buckets must be those of before from the first step on."""
    check(3, text, tmp_path, [0, 1, 2, 6])


@pytest.mark.soak
@pytest.mark.parametrize(("text", "world"), [(text, 2) for text in [*chosen(), *matrix()]] + [(text, 4) for text in chosen()])
def test_resume_of_everything(text: str, world: int, tmp_path: Path) -> None:
    check(world, text, tmp_path, [1, 5, 7])


def finalized_by_hand(rank: int) -> None:
    """A DDP whose backward the user's loop finalizes: the replay of the bucket order must not leave one open."""

    def built() -> tuple[Any, Any, Any]:
        model, optimizer, run = started("ddp()", scaled=False)
        model.require_manual_backward_finalization = True
        return model, optimizer, run

    def trained(model: Any, optimizer: Any, steps: range) -> list[Tensor]:
        for step in steps:
            model(vectors(rank, step)).square().mean().backward()
            model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    model, optimizer, run = built()
    trained(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))
    wanted = trained(model, optimizer, range(3, 6))
    run.detach()
    model, optimizer, run = built()
    for part, state in zip((model, optimizer, run), saved, strict=True):
        part.load_state_dict(state)
    assert same_bits(trained(model, optimizer, range(3, 6)), wanted)
    run.detach()


@pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "require_manual_backward_finalization"),
    reason=f"torch {torch.__version__} has no DistributedDataParallel.require_manual_backward_finalization (new in 2.15)",
)
def test_resume_where_backward_is_finalized_by_hand() -> None:
    ranks(3, finalized_by_hand)


def go(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        model(vectors(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def counted(rank: int, strategy: str, folder: str) -> None:
    """Steps and bytes are of one scope: of the whole run, also after a resume and after going back."""
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def half_of(run: laconic.Run, first: int) -> None:
        go(model, optimizer, rank, range(first, first + 3))
        with run.consensus():  # bytes beside the training's, where replicas differ
            pass
        go(model, optimizer, rank, range(first + 3, first + 4))

    with laconic.attach(model, optimizer, strategy) as run:
        half_of(run, 0)
        half, state = run.stats(), copy.deepcopy(run.state_dict())
        half_of(run, 4)
        whole = run.stats()
        run.detach()
    assert 2 * half.background_bytes == whole.background_bytes
    assert bool(half.background_bytes) == ("diloco" in strategy)
    assert whole.counted_steps == whole.steps == 8
    kept = copy.deepcopy(state)
    new = laconic.attach(model, optimizer, strategy)
    new.load_state_dict(state)
    assert counts(new) == counts_of(half)
    assert (new.stats().wait_seconds, new.stats().work_seconds) == (half.wait_seconds, half.work_seconds)
    laconic.Meter(new, folder)
    half_of(new, 4)
    assert counts(new) == counts_of(whole)
    assert new.stats().wire_bytes_per_step == whole.wire_bytes / 8 > 0
    new.load_state_dict(state)  # back again, as a script may that has found its loss to be no number
    assert difference(state, kept) is None, "training wrote into what had been loaded"
    assert difference(new.state_dict(), kept) is None, "something of the steps in between is left"
    assert counts(new) == counts_of(half)
    half_of(new, 4)
    assert counts(new) == counts_of(whole)
    del state["counts"]  # one of before there were any
    new.load_state_dict(state)
    assert (new.stats().steps, new.stats().counted_steps, new.stats().wire_bytes_per_step) == (4, 0, 0.0)
    half_of(new, 4)
    late = new.stats()
    assert (late.steps, late.counted_steps) == (8, 4)
    assert late.wire_bytes == whole.wire_bytes - half.wire_bytes
    assert late.wire_bytes_per_step == late.wire_bytes / 4
    assert new.state_dict()["counts"]["steps"] == 4
    new.detach()


def counts_of(stats: laconic.Stats) -> dict[str, Any]:
    return {key: value for key, value in vars(stats).items() if not key.endswith("_seconds")}


def counts(run: laconic.Run) -> dict[str, Any]:
    return counts_of(run.stats())


@pytest.mark.parametrize(
    "strategy", ["powersgd(rank=1, warmup=2)", "powersgd(rank=1, warmup=6)", "diloco(2, reducer=Quantized(8))"]
)
def test_stats_go_on_after_a_resume(strategy: str, tmp_path: Path) -> None:
    ranks(2, counted, strategy, str(tmp_path))
    for record in runs.read(tmp_path):
        assert [row["step"] for row in record.steps] == [5, 6, 7, 8] * 3
        one, two, three = (record.steps[first : first + 4] for first in (0, 4, 8))
        sent = [[row["wire_bytes"] for row in part] for part in (one, two, three)]
        assert sent[0] == sent[1] == sent[2], "of each step its own, whatever was loaded before it"
        assert all(row["wait_seconds"] >= 0 and row["work_seconds"] >= 0 for row in record.steps)


def other_steps(rank: int, uneven: str) -> None:
    """The ranks load states of another strategy, taken after different numbers of steps."""
    model, states = build(chain), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, "topk(warmup=0)") as run:
        for step in range(3):
            step_once(model, optimizer, run, rank, step)
            states.append(run.state_dict())
    new = laconic.attach(model, optimizer, "int8()", uneven=uneven)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rank 1 has step 3, rank 0 has step 2"):
        new.load_state_dict(states[1 + rank], strict=False)
    new.detach()


@pytest.mark.parametrize("uneven", ["error", "stop"])
def test_states_of_different_steps_are_refused_on_all_ranks(uneven: str) -> None:
    last_ranks(2, other_steps, uneven)
