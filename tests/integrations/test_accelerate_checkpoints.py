"""`save_state` and `load_state`: the averaged model, each rank's own part, and what is missing or damaged."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.integrations.accelerate_scripts import (
    OUTSTANDING,
    Plain,
    Progress,
    Result,
    Script,
    attach,
    mean,
    prepared,
    run_script,
    same,
    sgd,
    started,
    step,
    weights_of,
)
from tests.integrations.frameworks import WIDTH, Net, optimizer_of
from tests.live import last_ranks, ranks


@pytest.mark.parametrize(
    "script", [Script(OUTSTANDING), Script(OUTSTANDING, automatic=True, safe=False)], ids=["named", "automatic"]
)
def test_a_script_resumes_to_the_same_bits_in_mid_epoch(script: Script, tmp_path: Path) -> None:
    whole = ranks(2, run_script, tmp_path / "whole", script)
    stopped = ranks(2, run_script, tmp_path, replace(script, save_at=(2, 13, 21), stop_at=24))
    resumed = ranks(2, run_script, tmp_path, replace(script, resume=True))
    if script.automatic:  # total_limit: the oldest one is gone, with the ranks' own parts
        assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    folder = tmp_path / "checkpoints/checkpoint_2" if script.automatic else tmp_path / "saved"
    assert [one.name[:13] for one in (folder / "laconic").iterdir()] == ["step-00000021"]
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine.weights, other.weights)
        assert torch.equal(mine.moments, other.moments)
        assert mine.rates == other.rates[42:]
        assert mine.stats.steps == 30
        assert mine.stats.collectives > other.stats.collectives  # an exchange was outstanding, and is sent again
        assert not mine.said
    assert not same(stopped[0].saved[21], stopped[1].saved[21])
    file = load_file(folder / "model.safetensors") if script.safe else torch.load(folder / "pytorch_model.bin")
    assert same(file, mean([one.saved[21] for one in stopped]))


def test_training_goes_on_bit_for_bit_after_a_save(tmp_path: Path) -> None:
    script = Script(OUTSTANDING, epochs=1)
    without = ranks(2, run_script, tmp_path, script)
    saved = ranks(2, run_script, tmp_path, replace(script, save_at=(3, 5, 6)))
    for mine, other in zip(saved, without, strict=True):
        assert same(mine.weights, other.weights)
        assert torch.equal(mine.moments, other.moments)
        assert mine.stats.wire_bytes == other.stats.wire_bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    """A script that was stopped after a save in mid-period."""
    folder = tmp_path_factory.mktemp("script")
    return folder, ranks(2, run_script, folder, Script(OUTSTANDING, save_at=(13,), stop_at=14))


def loaded(rank: int, folder: Path, strategy: str = OUTSTANDING) -> tuple[dict[str, Tensor], Any, list[str], str]:
    """The weights after `load_state`, steps, warnings and the error."""
    problem, weights, stepped = "", {}, 0
    with started(rank) as (accelerator, said):
        net = Net(dropout=0.0)
        halves = [[*net.body[0].parameters()], [p for layer in list(net.body)[1:] for p in layer.parameters()]]
        first, second = torch.optim.AdamW(halves[0], lr=3e-3), torch.optim.SGD(halves[1], lr=0.05, momentum=0.9)
        model, first, second = accelerator.prepare(net, first, second)
        accelerator.register_for_checkpointing(Progress())
        run = attach(accelerator, model, [first, second], strategy)
        try:
            accelerator.load_state(str(folder / "saved"))
            weights, stepped = weights_of(model), run.step
            for number in range(4):
                step(accelerator, model, _Both(first, second), rank, number)
            run.__exit__(None, None, None)
        except Exception as error:
            problem = str(error)
            run.detach()
    return weights, stepped, said, problem


class _Both:
    def __init__(self, *optimizers: Any) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for one in self._optimizers:
            one.step()

    def zero_grad(self) -> None:
        for one in self._optimizers:
            one.zero_grad()


def test_without_the_ranks_own_parts_replicas_are_equal_and_one_rank_warns(saved: Any, tmp_path: Path) -> None:
    folder, results = saved
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "saved/laconic")
    first, second = ranks(2, loaded, tmp_path)
    expected = mean([one.saved[13] for one in results])
    assert same(first[0], expected)
    assert same(second[0], expected)
    assert len(first[2]) == 1
    assert "without its ranks' own parts" in first[2][0]
    assert not second[2]
    assert not first[3] + second[3]


def test_a_torn_part_is_an_error_on_all_ranks(saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    part = next((tmp_path / "saved/laconic").glob("*/rank-00001-of-00002.pt"))
    part.write_bytes(part.read_bytes()[:3000])
    first, second = ranks(2, loaded, tmp_path)
    assert "rank 1" in first[3]
    assert "can't be read" in first[3]
    assert "can't be read" in second[3]


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_goes_on_from_the_mean(world: int, saved: Any) -> None:
    folder, results = saved
    expected = mean([one.saved[13] for one in results])
    for weights, stepped, said, problem in ranks(world, loaded, folder):
        assert same(weights, expected)
        assert stepped == 13
        assert not said
        assert not problem


def test_a_checkpoint_of_another_strategy_is_taken_over(saved: Any) -> None:
    first, second = ranks(2, loaded, saved[0], "int8()")
    assert first[1] == second[1] == 13
    assert "the run goes on by int8()" in first[2][0]
    assert same({**first[0], "seen": second[0]["seen"]}, second[0])  # int8() averages gradients: replicas are made equal
    assert not first[3] + second[3]


def saved_by(rank: int, folder: Path, consensus: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    with started(rank) as (accelerator, _):
        model, optimizer = prepared(accelerator, Plain(), sgd)
        with attach(accelerator, model, optimizer, "diloco(4)", consensus=consensus) as run:
            for number in range(6):
                step(accelerator, model, optimizer, rank, number)
                if number == 3:
                    anchor = weights_of(model)  # a sync has just been made
            own = weights_of(model)
            accelerator.save_state(str(folder))
            with run.consensus(), pytest.raises(RuntimeError) as found:
                accelerator.save_state(str(folder / "inside"))
    return anchor, own, str(found.value)


@pytest.mark.parametrize("consensus", ["anchor", "local"])
def test_another_model_than_the_mean_can_be_saved(consensus: str, tmp_path: Path) -> None:
    (anchor, own, problem), (_, other, _) = ranks(2, saved_by, tmp_path, consensus)
    assert not same(own, other)
    assert same(load_file(tmp_path / "model.safetensors"), anchor if consensus == "anchor" else own)
    assert "can't be called inside consensus()" in problem


class Tied(nn.Module):
    """Two names for one weight, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.body[1].weight = self.body[0].weight

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(x).sum(-1) - labels).square().mean()}


class Annotated(Tied):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def save_and_load(rank: int, folder: Path, kind: type[nn.Module], safe: bool) -> None:
    with started(rank) as (accelerator, _):
        torch.manual_seed(5)
        model, optimizer = prepared(accelerator, kind(), sgd)
        with attach(accelerator, model, optimizer, "diloco(8)"):
            for number in range(3):
                step(accelerator, model, optimizer, rank, number)
            before = weights_of(model)
            accelerator.save_state(str(folder), safe_serialization=safe)
            step(accelerator, model, optimizer, rank, 3)
            accelerator.load_state(str(folder))
            assert same(before, weights_of(model))


@pytest.mark.parametrize(("kind", "safe"), [(Tied, True), (Tied, False), (Annotated, False)])
def test_tied_weights_and_extra_states_are_saved(kind: type[nn.Module], safe: bool, tmp_path: Path) -> None:
    ranks(2, save_and_load, tmp_path, kind, safe)


def with_own_hooks(rank: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As diffusers' scripts: hooks that write and read the model in their own way, and leave nothing to Accelerate."""
    with started(rank) as (accelerator, _):
        model, optimizer = prepared(accelerator, Net(), sgd)

        def write(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                torch.save(models[0].state_dict(), Path(output_dir, "own.pt"))
            weights.pop()

        def read(models: list[Any], input_dir: str) -> None:
            models.pop().load_state_dict(torch.load(Path(input_dir, "own.pt")))

        accelerator.register_save_state_pre_hook(write)
        accelerator.register_load_state_pre_hook(read)
        with attach(accelerator, model, optimizer, "diloco(8)"):
            for number in range(3):
                step(accelerator, model, optimizer, rank, number)
            before = weights_of(model)
            accelerator.save_state(str(folder))
            step(accelerator, model, optimizer, rank, 3)
            accelerator.load_state(str(folder))
            return before, weights_of(model)


def test_hooks_of_the_users_own_see_the_mean(tmp_path: Path) -> None:
    results = ranks(2, with_own_hooks, tmp_path)
    assert same(torch.load(tmp_path / "own.pt"), mean([before for before, _ in results]))
    for before, after in results:
        assert same(before, after)


class Mortal(Progress):
    """The process ends in the middle of a save, when Accelerate has written the model."""

    doomed = False

    def state_dict(self) -> dict[str, int]:
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


def saved_twice(rank: int, folder: Path, resume: bool) -> tuple[dict[str, Tensor], list[str]]:
    with started(rank) as (accelerator, said):
        model, optimizer = prepared(accelerator, Net(dropout=0.0))
        progress = Mortal()
        accelerator.register_for_checkpointing(progress)
        with attach(accelerator, model, optimizer, "diloco(8)"):
            if resume:
                accelerator.load_state(str(folder))
                return weights_of(model), said
            for number in range(5):
                step(accelerator, model, optimizer, rank, number)
                if number == 2:
                    accelerator.save_state(str(folder))
            progress.doomed = True
            accelerator.save_state(str(folder))
    raise AssertionError("it lives")


def test_parts_of_an_earlier_save_never_go_with_a_later_model(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(2, saved_twice, tmp_path, False)
    (first, said), (second, quiet) = last_ranks(2, saved_twice, tmp_path, True)
    assert same(first, second)
    assert same(first, load_file(tmp_path / "model.safetensors"))
    assert float(first["seen"]) == 5
    assert len(said) == 1
    assert not quiet


def two_models(rank: int, folder: Path, first_to_end: int) -> tuple[list[bool], list[str], bool]:
    with started(rank) as (accelerator, said):
        nets = [Net(), Net()]
        models = accelerator.prepare(*nets)
        optimizers = [accelerator.prepare(optimizer_of(one)) for one in models]
        runs = [attach(accelerator, models[0], optimizers[0], "diloco(8)")]
        runs.append(attach(accelerator, models[1], optimizers[1], "local_sgd(5)"))

        def train(first: int) -> None:
            for place in range(2):
                for number in range(first, first + 3):
                    step(accelerator, models[place], optimizers[place], rank, number + 50 * place)

        train(0)
        before = [weights_of(one) for one in models]
        accelerator.save_state(str(folder))
        train(10)
        accelerator.load_state(str(folder))
        restored = [same(weights_of(one), mine) for one, mine in zip(models, before, strict=True)]
        last = 1 - first_to_end
        runs[first_to_end].__exit__(None, None, None)
        accelerator.load_state(str(folder))  # of the other one alone
        restored.append(same(weights_of(models[last]), before[last]))
        runs[last].__exit__(None, None, None)
        accelerator.load_state(str(folder))  # as without laconic: the model of all ranks
        common = load_file(folder / "model.safetensors")
        restored.append(same(weights_of(models[0]), common))
        left = {"save_state", "load_state"} & vars(accelerator).keys() if first_to_end == 1 else set()
    return restored, said, not left


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_models_of_one_accelerator_each_with_a_run(first_to_end: int, tmp_path: Path) -> None:
    for restored, said, clean in ranks(2, two_models, tmp_path, first_to_end):
        assert restored == [True] * 4
        assert not said
        assert clean


def test_killed_by_the_operating_system_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    script = Script(OUTSTANDING)
    whole = ranks(2, run_script, tmp_path / "whole", script)
    with pytest.raises(AssertionError, match="the process died"):
        last_ranks(2, run_script, tmp_path, replace(script, save_at=(5, 13), stop_at=15, kill=True))
    resumed = ranks(2, run_script, tmp_path, replace(script, resume=True))
    for mine, other in zip(resumed, whole, strict=True):
        assert same(mine.weights, other.weights)
        assert torch.equal(mine.moments, other.moments)
        assert mine.stats.steps == 30
        assert not mine.said
