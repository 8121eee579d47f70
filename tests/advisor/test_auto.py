"""`auto()` on live ranks: it chooses, alike on all of them, and what comes after is what a swap by hand would give."""

import copy
import io
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.advisor import auto
from laconic.comm.group import CommunicationError
from laconic.cost.step_timer import SKIPPED
from laconic.ranks.presence import UnevenError
from laconic.run.attach import attach as attach_run
from laconic.run.run import Run, engine_of
from tests.islands import adam, loss, sharded, tokens
from tests.live import last_ranks, ranks
from tests.models import everything, everywhere_equal, same_bits, vectors, weights

TIMED = 2
CHOSEN_AFTER = SKIPPED + TIMED
# Over so slow a link, whatever this machine is busy with, DDP reaches no share that is worth having.
SLOW = f"auto(share=0.9, link='100kbit', steps={TIMED}, seconds=0.2)"
SAME = f"auto(risk='same', steps={TIMED}, seconds=0.2)"
END = CHOSEN_AFTER + 6


def built(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3))]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(16, 3)), **options)
    torch.manual_seed(100 + dist.get_rank())  # of the dropout
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scaler: torch.amp.GradScaler | None = None) -> None:
    value = model(vectors(dist.get_rank(), number)).square().mean()
    if scaler is None:
        value.backward()
        optimizer.step()
    else:
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        step(model, optimizer, number)


@contextmanager
def printed() -> Iterator[io.StringIO]:
    """What goes to stderr in here."""
    with redirect_stderr(io.StringIO()) as lines:
        yield lines


# The choice


def choosing(rank: int) -> tuple[str, dict[str, Any], str]:
    random.seed(7)
    model, optimizer = built()
    with printed() as lines, laconic.attach(model, optimizer, SLOW) as run:
        trained(model, optimizer, range(CHOSEN_AFTER - 1))
        assert (str(run.strategy), run.advice()) == (SLOW, None)
        counted = run.stats().wire_bytes
        trained(model, optimizer, range(CHOSEN_AFTER - 1, CHOSEN_AFTER))
        assert run.stats().wire_bytes == counted * CHOSEN_AFTER // (CHOSEN_AFTER - 1), "the probe is not counted"
        found = run.advice()
        assert found is not None
        advice, text = found.as_dict(), str(run.strategy)
        assert engine_of(run).strategy.advised is None
        trained(model, optimizer, range(CHOSEN_AFTER, END))
    assert everywhere_equal(weights(model))

    by_hand, other = built()
    with laconic.attach(by_hand, other, "ddp()") as run:
        trained(by_hand, other, range(CHOSEN_AFTER))
        run.swap(text)
        trained(by_hand, other, range(CHOSEN_AFTER, END))
    assert same_bits(weights(model), weights(by_hand)), "the same bits, and the same random numbers"
    assert random.random() == random.Random(7).random()
    assert len(model._forward_hooks) == len(by_hand._forward_hooks), "nothing is timed any more"
    return text, advice, lines.getvalue()


def test_all_ranks_go_over_to_one_choice_as_if_somebody_had_swapped() -> None:
    (text, advice, said), (other, same_advice, silence) = ranks(2, choosing)
    assert text == other != "ddp()"
    assert advice == same_advice
    assert laconic.strategy(advice["choice"]) == laconic.strategy(text)
    assert laconic.strategy(text).averaging is None, "by default, nothing that changes the training"
    assert advice["risk"] == "delay"
    assert not [row["strategy"] for row in advice["rows"] if "Momentum" in row["strategy"]], "this loop might clip gradients"
    first, second = said.splitlines()
    assert first.startswith(f"laconic: {SLOW} has timed "), "a pause is said before it begins"
    assert second == f"laconic: {SLOW} goes on by {advice['choice']} after step {CHOSEN_AFTER}. {advice['reason']}"
    assert silence == ""


def staying(rank: int) -> tuple[str, str]:
    model, optimizer = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    made = 0
    with printed() as lines, laconic.attach(model, optimizer, SAME, scaler=scaler, uneven="stop") as run:
        for number in range(END - rank):  # the second rank runs out of batches first
            step(model, optimizer, number, scaler)
            made += 1
    assert made == END - 1
    assert everywhere_equal(weights(model))
    return str(run.strategy), lines.getvalue()


def test_same_arithmetic_is_ddp_with_a_scaler_and_loaders_of_unequal_length() -> None:
    (text, said), (other, silence) = ranks(2, staying)
    assert text == other == "ddp()"
    assert f"{SAME} goes on by ddp() after step {CHOSEN_AFTER}" in said
    assert silence == ""


def metered(rank: int, folder: str) -> None:
    model, optimizer = built()
    with printed(), laconic.attach(model, optimizer, SAME) as run:
        laconic.Meter(run, folder)
        trained(model, optimizer, range(CHOSEN_AFTER + 2))


def test_the_meter_has_the_swap_where_it_was(tmp_path: Path) -> None:
    ranks(2, metered, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    rows = [row for row in lines if row["kind"] == "swap"]
    assert [(row["step"], row["strategy"]) for row in rows] == [(CHOSEN_AFTER, "ddp()")]


# Checkpoints


def resuming(rank: int, folder: str) -> str:
    """Uninterrupted; then from each way to keep the state after the choice."""
    model, optimizer = built()
    saved_at = CHOSEN_AFTER + 2
    with printed(), laconic.attach(model, optimizer, SLOW) as run:
        trained(model, optimizer, range(saved_at))
        chosen = str(run.strategy)
        assert run.state_dict()["strategy"] == chosen
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))
        laconic.checkpoint.save(folder, run=run)
        generator = torch.get_rng_state()
        trained(model, optimizer, range(saved_at, END))
        wanted = everything(model, [optimizer], run)

    def goes_on(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert (str(run.strategy), run.step, run.advice()) == (chosen, saved_at, None)
        torch.set_rng_state(generator)
        trained(model, optimizer, range(saved_at, END))
        assert same_bits(weights(model), list(wanted["model"].values()))
        assert run.state_dict()["advised_by"] == SLOW

    with printed() as lines:
        again, other = built()
        with laconic.attach(again, other, SLOW) as run:
            again.load_state_dict(state[0])
            other.load_state_dict(state[1])
            run.load_state_dict(state[2])
            goes_on(run, again, other)
        said = lines.getvalue()
        again, other = built()
        with laconic.attach(again, other, SLOW) as run:
            laconic.checkpoint.load(folder, run=run)
            goes_on(run, again, other)
        again, other = built()
        with laconic.attach(again, other, chosen) as run:  # the choice by its name is the same run
            laconic.checkpoint.load(folder, run=run)
    return said


def test_a_new_job_goes_on_by_the_choice_to_the_bit_and_probes_nothing(tmp_path: Path) -> None:
    said, silence = ranks(2, resuming, str(tmp_path))
    assert said.startswith(f"laconic: {SLOW} goes on by ")
    assert said.endswith(f", which the state of step {CHOSEN_AFTER + 2} has; nothing is probed\n")
    assert (said.count("\n"), silence) == (1, "")


def before_the_choice(rank: int) -> None:
    model, optimizer = built()
    with printed(), laconic.attach(model, optimizer, SAME) as run:
        trained(model, optimizer, range(2))
        early = copy.deepcopy(run.state_dict())
        trained(model, optimizer, range(2, CHOSEN_AFTER))
        assert str(run.strategy) == "ddp()"
        run.load_state_dict(early)  # rolled back, in mid-run
        assert (str(run.strategy), run.step, run.advice()) == (SAME, 2, None)
    with printed(), warnings.catch_warnings():
        model, optimizer = built()
        with laconic.attach(model, optimizer, SAME) as run:
            run.load_state_dict(early)
            trained(model, optimizer, range(2, 1 + CHOSEN_AFTER))
            assert str(run.strategy) == SAME, "steps are timed from where the state was loaded"
            trained(model, optimizer, range(1 + CHOSEN_AFTER, 4 + CHOSEN_AFTER))
            assert (str(run.strategy), run.advice() is None) == ("ddp()", False)
        for attached, state in ((SLOW, early), (SAME, {**early, "strategy": "bf16()", "advised_by": "auto()"})):
            model, optimizer = built()
            with laconic.attach(model, optimizer, attached) as run:
                with pytest.raises(ValueError, match="the state is of the strategy"):
                    run.load_state_dict(state)
                warnings.simplefilter("ignore")
                run.load_state_dict(state, strict=False)
                assert str(run.strategy) == attached, "another wish: chosen anew"


def test_a_state_from_before_the_choice_is_chosen_for_and_one_by_other_words_is_refused() -> None:
    ranks(2, before_the_choice)


# What may come between


def swapped_by_hand(rank: int) -> str:
    model, optimizer = built()
    with printed() as lines, laconic.attach(model, optimizer, SAME) as run:
        hooks = len(model._forward_hooks)
        trained(model, optimizer, range(2))
        run.swap("bf16()")
        trained(model, optimizer, range(2, CHOSEN_AFTER + 3))
        assert (str(run.strategy), run.advice()) == ("bf16()", None)
        assert len(model._forward_hooks) == hooks - 1, "nothing is timed any more"
        said = lines.getvalue()
        run.swap(SAME)
        trained(model, optimizer, range(CHOSEN_AFTER + 3, 2 * CHOSEN_AFTER + 4))
        assert (str(run.strategy), run.advice() is None) == ("ddp()", False)
    model, optimizer = built()
    with laconic.attach(model, optimizer, "bf16()") as run:
        assert run.advice() is None
        with pytest.raises(ValueError, match=r"auto\(\) chooses at the start of a run; attach it"):
            run.swap("auto()")
    return said


def test_a_swap_by_hand_ends_the_search_and_a_swap_back_begins_it_anew() -> None:
    assert ranks(2, swapped_by_hand) == ["", ""]


def ending_early(rank: int) -> str:
    model, optimizer = built()
    with printed() as lines, laconic.attach(model, optimizer, SAME):
        trained(model, optimizer, range(3))
    return lines.getvalue()


def test_a_run_that_ends_before_the_choice_says_so() -> None:
    said, silence = ranks(2, ending_early)
    assert said == (
        f"laconic: {SAME} ended before it had chosen: it needs {CHOSEN_AFTER} steps in a row and had 3, as ddp(); "
        "with auto(steps=...), give fewer\n"
    )
    assert silence == ""


def failing(rank: int, who: int) -> list[str]:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the disk is on fire")

    with patch.object(auto, "candidates", broken) if rank == who else nullcontext():
        model, optimizer = built()
        with printed() as lines, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with laconic.attach(model, optimizer, SLOW) as run:
                trained(model, optimizer, range(END))
                assert (str(run.strategy), run.advice()) == (SLOW, None)
                run.swap(SLOW)  # a new search, which fails as well
                trained(model, optimizer, range(END, END + CHOSEN_AFTER + 1))
    assert lines.getvalue().count("has timed") == (2 if rank == 0 else 0)
    assert everywhere_equal(weights(model))
    return [str(warning.message) for warning in warned]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_to_advise_leaves_all_on_ddp_with_one_warning(who: int) -> None:
    warned, silence = ranks(2, failing, who)
    assert warned == [f"{SLOW} has chosen nothing, and the run goes on as ddp(): rank {who}: OSError: the disk is on fire"] * 2
    assert silence == []


def failing_in_the_probe(rank: int) -> str:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    model, optimizer = built()
    with (
        patch.object(auto, "measure", broken) if rank == 1 else nullcontext(),
        printed(),
        pytest.raises(CommunicationError if rank == 1 else UnevenError) as caught,
        laconic.attach(model, optimizer, SLOW),
    ):
        trained(model, optimizer, range(END))
    return str(caught.value)


def test_a_rank_that_fails_in_the_probe_ends_all_and_is_named() -> None:
    peer, own = last_ranks(2, failing_in_the_probe)
    assert "the probe failed here: MemoryError: no room" in own
    assert "rank 1 failed in step 6 with CommunicationError" in peer
    assert "the probe failed here: MemoryError: no room" in peer


def refused(rank: int) -> None:
    model, optimizer = built()
    with pytest.raises(ValueError, match=r"auto\(\) leaves the choice to the advisor, and laconic.run knows none"):
        attach_run(model, optimizer, "auto()")
    with pytest.raises(ValueError, match=r"a link is a rate with its unit.* got '100'"):
        laconic.attach(model, optimizer, "auto(link='100')")
    with pytest.raises(ValueError, match="which needs a DistributedDataParallel"):
        laconic.attach(model.module, optimizer, "auto()")
    with laconic.attach(model, optimizer, "ddp()"):
        step(model, optimizer, 0)  # nothing is left of the refusals


def test_what_is_refused_is_refused_on_all_ranks() -> None:
    ranks(2, refused)


def alone(rank: int) -> str:
    model, optimizer = built()
    with printed() as lines, laconic.attach(model, optimizer, SAME) as run:
        trained(model, optimizer, range(END))
        assert (str(run.strategy), run.advice()) == (SAME, None)
    return lines.getvalue()


def test_one_replica_has_nothing_to_choose() -> None:
    (said,) = ranks(1, alone)
    assert said == f"laconic: {SAME} has one replica here, and nobody to communicate with: it trains as ddp()\n"


def on_islands(rank: int) -> tuple[str, str]:
    model, optimizer, mesh = sharded(2, adam)
    with printed() as lines, laconic.attach(model, optimizer, SLOW, mesh=mesh) as run:
        for number in range(END):
            value: Any = loss(model, tokens(rank, number))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        laconic.check_replicas(run)
        assert run.advice() is not None
    return str(run.strategy), lines.getvalue()


@pytest.mark.soak
def test_islands_of_a_sharded_model_choose_alike() -> None:
    found = ranks(4, on_islands)
    assert len({text for text, _ in found}) == 1
    assert found[0][0] != SLOW
    assert [said.count("goes on by") for _, said in found] == [1, 0, 0, 0]
