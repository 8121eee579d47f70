"""What `laconic.auto` does with unusual scripts: several optimizers, checkpoints of other ranks, every kind of end."""

import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from laconic.run.run import engine_of
from laconic.script import auto
from laconic.script.auto_run import AutoRun
from tests.live import ranks
from tests.models import difference, same_bits, weights
from tests.script.test_auto import build, installed, step


def watcher() -> auto.Auto:
    assert auto._auto is not None
    return auto._auto


def new(lines: io.StringIO) -> str:
    """What was printed since the last call."""
    text = lines.getvalue()
    lines.seek(0)
    lines.truncate()
    return text


def changing_optimizers(rank: int) -> None:
    with installed("local_sgd(2)") as lines:
        assert auto.install("ddp()") is watcher(), "the first one stays"
        model, optimizer = build()
        with torch.no_grad():
            model(torch.ones(1, 6))
        assert watcher().runs == [], "an evaluation before training attaches nothing"
        for number in range(8):
            if number == 4:
                optimizer = Adam(model.parameters(), lr=2e-3)
            step(model, optimizer, number)
        (run,) = watcher().runs
        assert (run.stats().steps, run.stats().syncs) == (8, 4)
        assert optimizer.state_dict()["laconic"]["step"] == 8
        if rank == 0:
            said = new(lines)
            assert "0.5 of ddp()'s bytes once it is warm" in said
            assert said.count("another optimizer over the model, Adam; its steps count") == said.count("\n") - 1 == 1
        watcher().finish()


def test_an_optimizer_that_comes_later_counts_and_carries_the_state() -> None:
    ranks(2, changing_optimizers)


def several_optimizers(rank: int) -> None:
    with installed("diloco(2)") as lines:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
        early = SGD(net[0].parameters(), lr=0.1)
        model = DistributedDataParallel(module=net)
        late, _other = AdamW(net[1].parameters(), lr=0.1), SGD(nn.Linear(2, 2).parameters(), lr=0.1)

        def steps(start: int) -> str:
            for number in range(start, start + 2):
                late.zero_grad()
                step(model, early, number)  # its backward is that of both
                late.step()
            return new(lines)

        assert ("(163 parameters) and SGD, AdamW, 1 rank" in steps(0)) == (rank == 0)
        states = copy.deepcopy([early.state_dict(), late.state_dict()])
        assert ["laconic" in state for state in states] == [True, False], "one of them has it"
        for optimizer, state in zip((early, late), states, strict=True):
            optimizer.load_state_dict(state)
        assert steps(2) == "", "all is there"
        for optimizer, state in zip((early, late), states, strict=True):
            optimizer.load_state_dict({key: value for key, value in state.items() if key != "laconic"})
        assert steps(4).count("has nothing of diloco(period=2)") == 1
        assert steps(6) == "", "once"
        early.load_state_dict({**states[0], "laconic": None})
        assert "has nothing of diloco(period=2)" in steps(8), "what a run in training loads must have something of it"
        assert [run.step for run in watcher().runs] == [10]
        watcher().finish()


def test_of_several_optimizers_one_carries_the_state_and_losing_it_is_said_once() -> None:
    ranks(1, several_optimizers)


def two_over_the_same(rank: int, loaded: bool) -> None:
    with installed("diloco(4)"):
        model, optimizer = build()
        if loaded:
            for number in range(2):
                step(model, optimizer, number)
            state = optimizer.state_dict()
            watcher().finish()
            model, optimizer = build()
            optimizer.load_state_dict(state)
        model(torch.ones(1, 6))
        other = copy.copy(model)  # built before the first one ran, so no constructor has ended that run
        watcher()._models[other] = AutoRun(other)
        with pytest.raises(
            RuntimeError, match=r"no optimizer made a step between them: diloco\(period=4\) can be attached to one"
        ):
            other(torch.ones(1, 6))
        watcher().fail(RuntimeError())


@pytest.mark.parametrize("loaded", [False, True])
def test_two_ddps_over_one_module_in_one_step_are_refused(loaded: bool) -> None:
    ranks(1, two_over_the_same, loaded)


def scalers(rank: int) -> None:
    with installed("ddp()"):
        model, optimizer = build()
        _off, on = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=8.0)
        step(model, optimizer, 0)
        assert engine_of(watcher().runs[0]).scaler is on
        watcher().finish()
        model, optimizer = build()
        both = [torch.amp.GradScaler("cpu") for _ in range(2)]
        with pytest.raises(
            RuntimeError, match=f"the script builds {len(both)} GradScalers, and which one is meant is not clear"
        ):
            step(model, optimizer, 0)


def test_a_scaler_that_is_off_is_none_and_two_that_are_on_are_one_too_many() -> None:
    ranks(1, scalers)


def saved(text: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer of a script that trains so many steps and saves."""
    with installed(text):
        model, optimizer = build()
        for number in range(steps):
            step(model, optimizer, number)
        found = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        watcher().finish()
    return found


def resuming(rank: int) -> list[str]:
    """Lines and errors of a script that loads, at its start, what it should not."""
    model_state, state = saved("diloco(4)", 6)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, state)

    def resume(loaded: dict[str, Any] | None, text: str = "diloco(4)") -> str:
        with installed(text) as lines:
            model, optimizer = build()
            model.load_state_dict(model_state)
            if loaded is not None:
                optimizer.load_state_dict(copy.deepcopy(loaded))
            if loaded is not None and "laconic" in loaded:
                kept = optimizer.state_dict()["laconic"]
                assert difference(kept, loaded["laconic"]) is None, "saved again before the first step, it is still there"
            try:
                step(model, optimizer, 6)
            except RuntimeError as error:
                watcher().fail(error)
                return str(error)
            (run,) = watcher().runs
            assert run.step == (7 if loaded and "laconic" in loaded else 1)
            watcher().finish()
            return lines.getvalue()

    wide = {**state, "laconic": {**state["laconic"], "world": 3}}
    return [
        resume(state),
        resume(state, "diloco(8)"),
        resume(wide),
        resume(state if rank == 1 else None),
        resume(everyone[1 - rank]),
        resume({key: value for key, value in state.items() if key != "laconic"}),
    ]


def test_a_checkpoint_that_is_of_other_ranks_or_another_strategy_is_named() -> None:
    first, second = ranks(2, resuming)
    assert [text.count("\n") for text in first[:3]] == [2, 3, 3]
    assert "laconic: diloco(period=4): 7 steps, this rank sent " in first[0]
    assert "the checkpoint is of diloco(period=4); going on by diloco(period=8)" in first[1]
    assert "the checkpoint is of 3 ranks, here are 2: what the others had not sent yet is lost" in first[2]
    assert second[:3] == ["", "", ""]
    for sentences in (first, second):
        assert sentences[3] == "only rank 1 loaded an optimizer with laconic's state; load it on all ranks"
        assert ("has nothing of diloco(period=4) (saved without laconic" in sentences[5]) == (sentences is first)
        assert sentences[4] == "ranks loaded the states of ranks 1, 0: all must load their own, or all the same one"


def resuming_two(rank: int) -> None:
    """Two models with an optimizer each: what one of them has loaded is not the other's."""
    with installed("diloco(4)"):
        pairs = [build(), build()]
        for place, (model, optimizer) in enumerate(pairs):
            for number in range(3 + place):
                step(model, optimizer, number)
        states = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pairs]
        watcher().finish()
    with installed("diloco(4)"):
        pairs = [build(), build()]
        for (_, optimizer), state in zip(pairs, states, strict=True):
            optimizer.load_state_dict(state)
        for model, optimizer in pairs:
            step(model, optimizer, 5)
        assert [run.step for run in watcher().runs] == [4, 5]
        watcher().finish()


def test_each_of_two_models_goes_on_from_its_own_state() -> None:
    ranks(2, resuming_two)


def by_exit(error: BaseException | None) -> None:
    watcher().end(error)


def by_hook(error: BaseException | None) -> None:
    if error is None:
        auto._at_exit()
    else:
        sys.excepthook(type(error), error, None)


def by_a_hook_of_its_own(error: BaseException | None) -> None:
    """A script's excepthook that doesn't call ours: Python leaves the error in sys.last_value."""
    if error is not None:
        sys.last_value = error
    auto._at_exit()
    if error is not None:
        del sys.last_value


def by_status(error: BaseException | None) -> None:
    with pytest.raises(SystemExit):
        sys.exit(7 if error else 0)
    auto._at_exit()


def by_cleaning_up(error: BaseException | None) -> None:
    """As a script with a `finally` does."""
    try:
        if error is not None:
            raise error
    except BaseException:
        dist.destroy_process_group(dist.group.WORLD)
    else:
        dist.distributed_c10d.destroy_process_group(dist.group.WORLD)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the test's own end destroys one, too


def ending(rank: int, end: Callable[[BaseException | None], None], error: BaseException | None) -> bool:
    """Whether the end has made replicas equal, in the middle of a period."""
    with installed("diloco(4)"):
        model, optimizer = build()
        for number in range(6):
            step(model, optimizer, number)
        before = [tensor.clone() for tensor in weights(model)]
        end(error)
        assert watcher().runs == []
        return not same_bits(weights(model), before)


@pytest.mark.parametrize("end", [by_exit, by_hook, by_a_hook_of_its_own, by_status, by_cleaning_up])
@pytest.mark.parametrize("error", [None, KeyError("gone")], ids=["well", "badly"])
def test_replicas_are_made_equal_by_a_good_end_and_by_no_other(
    end: Callable[[BaseException | None], None], error: BaseException | None
) -> None:
    assert ranks(2, ending, end, error) == [error is None] * 2


@pytest.mark.parametrize("code", [0, None, 3])
def test_an_exit_is_a_good_end_if_its_code_says_so(code: int | None) -> None:
    assert ranks(2, ending, by_exit, SystemExit(code)) == [not code] * 2


def groups_that_end(rank: int) -> None:
    with installed("diloco(4)"):
        one, first = build()
        group, unused, last = (dist.new_group([0, 1]) for _ in range(3))
        net = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
        two = DistributedDataParallel(net, process_group=group)
        second: Optimizer = SGD(two.parameters(), lr=0.1)
        three = DistributedDataParallel(copy.deepcopy(net), process_group=last)
        third: Optimizer = SGD(three.parameters(), lr=0.1)
        for number in range(6):
            step(one, first, number)
            step(two, second, number)
            step(three, third, number)
        runs = watcher().runs
        dist.destroy_process_group(unused)
        assert watcher().runs == runs
        dist.destroy_process_group(group)
        assert watcher().runs == [runs[0], runs[2]], "of that group alone"
        assert "laconic" in first.state_dict()
        dist.destroy_process_group(dist.group.WORLD)  # and all others with it
        assert watcher().runs == []
        assert "laconic" not in first.state_dict(), "it is too late: to load this must be said to be a loss"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_runs_of_a_group_end_with_it() -> None:
    ranks(2, groups_that_end)


def idle(rank: int) -> list[str]:
    said = []
    for made in (0, 1):
        with installed("int8()") as lines:
            if made:
                DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2))
            watcher().explain_idleness()
            said.append(lines.getvalue())
    return said


def test_why_nothing_was_attached_is_said() -> None:
    nothing, no_optimizer = ranks(1, idle)[0]
    assert "never built a DistributedDataParallel, so int8() was not attached to anything" in nothing
    assert "no optimizer over the DistributedDataParallel's parameters was there when it ran" in no_optimizer
