"""Syncs that are skipped by all ranks alike, and replicas that are not what they should be."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.local import fragments
from laconic.local.outliers import ENOUGH
from tests.live import ranks
from tests.models import build, chain, everywhere_equal, same_bits, vectors, weights


def started(text: str, **options: Any) -> tuple[Any, Any, Any]:
    model = build(chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, laconic.attach(model, optimizer, text, **options)


def step_once(model: Any, optimizer: Any, rank: int, step: int) -> None:
    model(vectors(rank, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def out_of_line(rank: int, text: str, ends: int, delay: int, value: float) -> None:
    """After ten syncs of two steps, rank 1's replica jumps."""
    model, optimizer, run = started(text)
    for step in range(40):
        if step == 25 and rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(value)
        if step + 1 == ends + delay:
            anchors = {name: anchor.clone() for name, anchor in run.state_dict()["local"]["deltas"]["anchors"].items()}
            with pytest.warns(UserWarning, match=rf"the sync of step {ends} is skipped: (replicas came|the parameters)"):
                step_once(model, optimizer, rank, step)
            assert run.stats().skipped == 1
            now = run.state_dict()["local"]["deltas"]["anchors"]
            assert same_bits(list(anchors.values()), list(now.values())), "the anchor has not moved"
            assert same_bits([p.detach() for p in model.parameters()], list(now.values())), "and all are back there"
            assert everywhere_equal(weights(model))
        else:
            step_once(model, optimizer, rank, step)
    assert run.stats().skipped == 1
    assert all(bool(tensor.isfinite().all()) for tensor in weights(model))
    run.sync()
    run.detach()


@pytest.mark.parametrize("value", [100.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("text", "ends", "delay"),
    [
        ("diloco(2, outlier=6.0)", 26, 0),
        ("diloco(2, reducer=ErrorFeedback(Quantized(4)), outlier=6.0)", 26, 0),
        ("streaming_diloco(2, fragments=1, delay=1, outlier=6.0)", 27, 1),
    ],
)
def test_a_sync_out_of_line_is_skipped(text: str, ends: int, delay: int, value: float) -> None:
    ranks(2, out_of_line, text, ends, delay, value)


def resumed_before_a_jump(rank: int) -> None:
    """A resumed run remembers how large the syncs before were: the first one after the resume can be out of line."""
    model, optimizer, run = started("diloco(1, outlier=6.0)")
    for step in range(ENOUGH):
        step_once(model, optimizer, rank, step)
    run.load_state_dict(copy.deepcopy(run.state_dict()))
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).add_(100.0)
    with pytest.warns(UserWarning, match=rf"the sync of step {ENOUGH + 1} is skipped: replicas came"):
        step_once(model, optimizer, rank, ENOUGH)
    run.load_state_dict(copy.deepcopy(run.state_dict()))
    assert run.stats().skipped == 1, "a sync that was skipped before a resume counts once"
    run.detach()


def test_a_resumed_run_knows_what_was_in_line() -> None:
    ranks(2, resumed_before_a_jump)


def off_by_default(rank: int) -> None:
    model, optimizer, run = started("diloco(2)")
    for step in range(30):
        if step == 25 and rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(100.0)
        step_once(model, optimizer, rank, step)
    assert run.stats().skipped == 0
    run.detach()


def test_by_default_only_what_is_not_finite_is_skipped() -> None:
    ranks(2, off_by_default)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="outlier must be above 0"):
        laconic.diloco(2, outlier=-1.0)


def too_large_for_the_wire(rank: int, text: str, delay: int) -> None:
    """Deltas that are finite here and not in 16 bits, in two of many buckets: these go back, the others go on.

    All the way back: neither `blend` nor `carry` keeps anything of such parameters.
    """
    fragments.BUCKET_BYTES = 1100
    try:
        model, optimizer, run = started(text)
    finally:
        fragments.BUCKET_BYTES = 25 << 20
    before = weights(model)
    step_once(model, optimizer, rank, 0)
    with pytest.warns(UserWarning, match="a mean delta is not finite although each rank's was") as told:
        for step in range(1, 2 + delay):
            with torch.no_grad():  # a jump; and, with a delay, what a replica learns while the deltas are outstanding
                for place in (0, 4):
                    list(model.parameters())[place].add_(1e5 if step == 1 else 1.0)
            step_once(model, optimizer, rank, step)
    assert len([one for one in told if "mean delta" in str(one.message)]) == 1
    assert run.stats().skipped == 1, "one sync"
    same = [torch.equal(now, then) for now, then in zip(weights(model), before, strict=True)]
    assert same[0]
    assert same[4]
    assert not all(same)
    assert everywhere_equal(weights(model)) == (delay == 0)
    run.sync()
    run.detach()


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("diloco(2, reducer=Cast('fp16'))", 0),
        ("streaming_diloco(3, fragments=1, delay=1, blend=0.5, carry=True, reducer=Cast('fp16'))", 1),
    ],
)
def test_deltas_too_large_for_the_wire_go_back(text: str, delay: int) -> None:
    ranks(2, too_large_for_the_wire, text, delay)


# Replicas


def spoilt(rank: int, text: str, where: str, odd: int) -> None:
    model, optimizer, run = started(text)
    for step in range(4):
        step_once(model, optimizer, rank, step)
    laconic.check_replicas(run)
    name, parameter = list(model.module.named_parameters())[3]
    if where == "parameter":
        target: Tensor = parameter.detach()
    elif where == "anchor":
        target = run.state_dict()["local"]["deltas"]["anchors"][name]
    else:
        target = next(iter(run.state_dict()["local"]["deltas"]["outer"][name].values()))
    if rank == odd:
        target.view(-1)[2] += 1e-6 * target.view(-1)[2].abs() + 1e-7
    with pytest.raises(
        laconic.ReplicaError, match=rf"after 4 steps, .*{name} is not the same on rank {odd} as on rank {1 - odd}"
    ):
        laconic.check_replicas(run)
    run.detach()


@pytest.mark.parametrize(
    ("text", "where", "odd"),
    [("ddp()", "parameter", 0), ("diloco(2)", "parameter", 1), ("diloco(3)", "anchor", 0), ("diloco(3)", "outer", 1)],
)
def test_replicas_that_differ_are_named(text: str, where: str, odd: int) -> None:
    """The one that is alone with what it has, whichever it is."""
    ranks(3, spoilt, text, where, odd)


def drifting(rank: int) -> None:
    """Between two syncs parameters may differ; anchors may not."""
    model, optimizer, run = started("diloco(4)")
    for step in range(6):
        step_once(model, optimizer, rank, step)
        laconic.check_replicas(run)
    run.sync()
    run.detach()


def test_replicas_that_may_differ_are_let_be() -> None:
    ranks(2, drifting)


def watched(rank: int, text: str, every: int) -> None:
    model, optimizer, run = started(text, check_every=every)
    if rank == 1:
        anchors = run.state_dict()["local"]["deltas"]["anchors"].values() if "diloco" in text else model.parameters()
        with torch.no_grad():
            next(iter(anchors)).add_(1e-3)
    with pytest.raises(laconic.ReplicaError, match=r"after 4 steps"):
        for step in range(20):
            step_once(model, optimizer, rank, step)
    run.detach()


@pytest.mark.parametrize(("text", "every"), [("bf16()", 4), ("diloco(2)", 2)])
def test_a_run_can_look_by_itself(text: str, every: int) -> None:
    """Every so many steps, or, where steps are taken apart, every so many syncs."""
    ranks(2, watched, text, every)


def wrong(rank: int) -> None:
    model = build(chain)
    with pytest.raises(ValueError, match="check_every must be a number of syncs, or 0 for never, got -1"):
        laconic.attach(model, torch.optim.SGD(model.parameters(), lr=1), "ddp()", check_every=-1)


def test_a_wrong_number_is_refused() -> None:
    ranks(1, wrong)
