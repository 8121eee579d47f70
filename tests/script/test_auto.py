"""What `laconic.auto` does, on live ranks; tests/script/test_scripts.py has whole scripts."""

import atexit
import copy
import io
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import laconic
from laconic import UnevenError
from laconic.run.run import engine_of
from laconic.script import auto
from tests.live import last_ranks, ranks
from tests.models import difference, same_bits, weights

PATCHED = [
    (DistributedDataParallel, "__init__"), (Optimizer, "__init__"), (torch.amp.GradScaler, "__init__"),
    (nn.Module, "load_state_dict"),
    (dist, "destroy_process_group"), (dist.distributed_c10d, "destroy_process_group"), (sys, "exit"), (sys, "excepthook"),
]  # fmt: skip


@contextmanager
def installed(text: str) -> Iterator[io.StringIO]:
    """As in a script under `laconic run`; yields what it prints on stderr. At the end it is taken out of the process again."""
    before = [getattr(place, name) for place, name in PATCHED]
    auto.install(text)
    try:
        with redirect_stderr(io.StringIO()) as lines:
            yield lines
    finally:
        auto._auto = None
        atexit.unregister(auto._at_exit)
        for (place, name), value in zip(PATCHED, before, strict=True):
            setattr(place, name, value)


def build() -> tuple[DistributedDataParallel, Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    return model, AdamW(model.parameters(), lr=2e-3)


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    loss: Any = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loading_alone(rank: int, text: str, which: int) -> str:
    with installed(text):
        model, optimizer = build()
        for number in range(3):
            step(model, optimizer, number)
        if rank == which:
            optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(UnevenError) as failure:
            for number in range(3, 12):
                step(model, optimizer, number)
        assert auto._auto is not None
        auto._auto.fail(failure.value)
        return str(failure.value)


@pytest.mark.parametrize(("text", "which"), [("int8()", 0), pytest.param("diloco(4)", 1, marks=pytest.mark.soak)])
def test_a_load_in_mid_run_on_some_ranks_is_an_error_on_all_that_names_them(text: str, which: int) -> None:
    for sentence in last_ranks(3, loading_alone, text, which):
        others = ", ".join(f"rank {rank}" for rank in range(3) if rank != which)
        assert f"after step 3 rank {which} loaded an optimizer's state, {others} did not" in sentence
        assert "load it on all ranks, or on none" in sentence


def rolling_back(rank: int, text: str) -> None:
    """Twice, to one checkpoint: nothing of the steps in between is left."""

    def train(detours: tuple[int, ...]) -> tuple[list[Tensor], dict[str, Any]]:
        model, optimizer = build()
        for number in range(14):
            step(model, optimizer, number)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if "delay" in text:
            assert saved[1]["laconic"]["local"]["deltas"]["outstanding"], "an exchange is outstanding"
        for steps in detours:
            for number in range(50, 50 + steps):
                step(model, optimizer, number)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for number in range(14, 25):
            step(model, optimizer, number)
        last: dict[str, Any] = copy.deepcopy(optimizer.state_dict()["laconic"])
        del last["counts"]  # seconds are never alike, and what was outstanding is sent again
        assert auto._auto is not None
        auto._auto.finish()
        return weights(model), last

    with installed(text):
        straight, state = train(())
        back, another = train((5, 3))
    assert same_bits(straight, back)
    assert difference(another, state) is None


@pytest.mark.parametrize("text", ["streaming_diloco(period=6, fragments=2, delay=3, warmup=2)", "powersgd(rank=1, warmup=2)"])
def test_a_script_that_rolls_back_in_mid_run_goes_on_as_if_it_had_not_gone_further(text: str) -> None:
    ranks(2, rolling_back, text)


def what_it_says(rank: int) -> list[str]:
    """Lines after a wrapper that loads its optimizer's own state, a state without ours, and the first rank's on all."""
    said = []
    with installed("powersgd(rank=1, warmup=0)") as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as many scripts do
        model, optimizer = build()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # what AcceleratedOptimizer does when it is built
        step(model, optimizer, 0)
        said.append(lines.getvalue())
        ours = optimizer.state_dict()
        optimizer.load_state_dict({key: value for key, value in ours.items() if key != "laconic"})
        step(model, optimizer, 1)
        said.append(lines.getvalue())
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states)
        optimizer.load_state_dict(states[0])
        step(model, optimizer, 2)
        said.append(lines.getvalue())
        assert auto._auto is not None
        auto._auto.finish()
    assert "RANK" not in os.environ
    return [text[len(before) :] for before, text in zip(["", *said], said, strict=False)]


def alone(rank: int) -> str:
    with installed("int8()") as lines:
        model = DistributedDataParallel(nn.Linear(6, 3))
        step(model, AdamW(model.parameters()), 0)
        return lines.getvalue()


def test_one_rank_alone_is_told_that_nothing_is_sent() -> None:
    (said,) = ranks(1, alone)
    assert said == "laconic: int8() is attached to Linear (21 parameters) and AdamW, 1 rank, which is alone: nothing is sent\n"


def test_losses_are_lines_of_the_first_rank_and_a_fresh_state_is_none() -> None:
    (attached, bare, one_for_all), silence = ranks(2, what_it_says)
    assert silence == ["", "", ""], "RANK is not set here: it is the process group that knows"
    assert attached.startswith(
        "laconic: powersgd(rank=1, warmup=0) is attached to Sequential (163 parameters) and AdamW, 2 ranks"
    )
    assert attached.count("\n") == 1
    assert "the optimizer's state that was loaded has nothing of powersgd(rank=1, warmup=0)" in bare
    assert "laconic: all ranks loaded the state of rank 0" in one_for_all


def scaler_for_each_fit(rank: int) -> None:
    with installed("ddp()"):
        model, optimizer = build()
        watcher, scalers = auto._auto, []
        assert watcher is not None
        for fit in range(2):
            scalers.append(torch.amp.GradScaler("cpu", init_scale=8.0))  # the former one is still there
            model = DistributedDataParallel(model.module)
            step(model, optimizer, fit)
            assert watcher.run is not None
            assert engine_of(watcher.run).scaler is scalers[-1]
        watcher.finish()


def test_every_fit_may_have_a_scaler_of_its_own() -> None:
    ranks(2, scaler_for_each_fit)


def by_hand_as_well(rank: int) -> str:
    with installed("int8()") as lines:
        model, optimizer = build()
        with laconic.attach(model, optimizer, "diloco(2)") as run:
            for number in range(4):
                step(model, optimizer, number)
        assert run.stats().syncs == 2
        assert auto._auto is not None
        auto._auto.explain_idleness()  # it has been explained
        return lines.getvalue()


def test_a_ddp_that_the_script_attaches_by_itself_is_left_alone() -> None:
    said, silence = ranks(2, by_hand_as_well)
    assert said.count("laconic: int8() is not attached to this Sequential: its AdamW is attached to another run already") == 1
    assert (said.count("\n"), silence) == (1, "")


def restoring(rank: int, text: str, again: bool) -> bool:
    """Whether the best weights so far, loaded after the last step, are untouched by the end of the run."""
    with installed(text):
        model, optimizer = build()
        for number in range(10):
            step(model, optimizer, number)
        best = [copy.deepcopy(model.module.state_dict())]
        dist.broadcast_object_list(best)
        for number in range(10, 14):
            step(model, optimizer, number)
        model.module.load_state_dict(best[0])
        if again:
            model = DistributedDataParallel(model.module)
        assert auto._auto is not None
        auto._auto.finish()
        return same_bits(weights(model), list(best[0].values()))


@pytest.mark.parametrize("again", [False, True], ids=["the end", "another fit"])
def test_weights_that_the_script_restores_at_the_end_are_touched_by_nothing_outstanding(again: bool) -> None:
    assert ranks(2, restoring, "streaming_diloco(period=6, fragments=2, delay=3, warmup=2)", again) == [True, True]


def restoring_alone(rank: int) -> str:
    """The first rank loads weights after the last step, for an evaluation of its own."""
    with installed("diloco(4)") as lines:
        model, optimizer = build()
        for number in range(6):
            step(model, optimizer, number)
        before = copy.deepcopy(model.module.state_dict())
        if rank == 0:
            model.module.load_state_dict(before)
        assert auto._auto is not None
        auto._auto.finish()
        assert same_bits(weights(model), list(before.values()))
        return lines.getvalue()


def test_weights_that_one_rank_restores_leave_replicas_apart_and_a_line_says_so() -> None:
    first, second = ranks(2, restoring_alone)
    assert "only some ranks loaded weights after the last step: replicas are not made equal" in first
    assert not second


class Wrapper(Optimizer):
    """Passes everything on, its state too, as frameworks' optimizers do."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.state = optimizer, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def wrapped_late(rank: int) -> None:
    with installed("ddp()") as lines:
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer = Wrapper(optimizer)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert auto._auto is not None
        (one,) = auto._auto._live
        assert one.run is not None
        assert one.run.step == 4, "each step counts once"
        assert "another optimizer" not in lines.getvalue()
        one.run.detach()


def test_a_wrapper_around_an_optimizer_that_is_counted_counts_nothing_more() -> None:
    ranks(1, wrapped_late)


def reloading_between_fits(rank: int, text: str, before: bool) -> str:
    """A wrapper loads its optimizer's own state, as AcceleratedOptimizer does, before or after the second DDP is built."""

    def fits(auto_run: bool) -> list[Tensor]:
        model, optimizer = build()
        for _ in range(2):
            with nullcontext() if auto_run else laconic.attach(model, optimizer, text):
                for number in range(13):
                    step(model, optimizer, number)
            if before:
                optimizer.load_state_dict(optimizer.state_dict())
            model = DistributedDataParallel(module=model.module)
            if not before:
                optimizer.load_state_dict(optimizer.state_dict())
        return weights(model)

    with installed(text) as lines:
        ours = fits(True)
        assert auto._auto is not None
        auto._auto.finish()
    assert same_bits(ours, fits(False))
    return lines.getvalue()


@pytest.mark.parametrize("before", [True, False], ids=["before the DDP", "after it"])
def test_a_wrapper_that_reloads_its_optimizer_between_fits_loses_and_repeats_nothing(before: bool) -> None:
    said, _ = ranks(2, reloading_between_fits, "streaming_diloco(period=6, fragments=2, delay=3, warmup=2)", before)
    assert said.count("is attached to") == said.count("of what ddp() sends in as many") == 2
    assert said.count("\n") == 4


def folds(rank: int) -> None:
    """Fresh model, optimizer and GradScaler in each; a module that is saved whole needs nothing of laconic."""
    with installed("diloco(2)"):
        for _ in range(3):
            model, optimizer = build()
            scaler = torch.amp.GradScaler("cpu")
            for _step in range(4):
                scaler.scale(model(torch.ones(2, 6)).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert auto._auto is not None
        runs = auto._auto.runs
        assert [run.step for run in runs] == [4, 4, 4]
        assert len({id(engine_of(run).scaler) for run in runs}) == 3
        assert b"laconic" not in pickle.dumps(model.module)
        auto._auto.finish()


def test_folds_with_a_scaler_each_and_modules_that_are_pickled_whole() -> None:
    ranks(2, folds)
