"""Accelerate: what its users do, and what they do wrong."""

import inspect
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from laconic import Run
from laconic.integrations.training import IdleRun
from tests.integrations.frameworks import BATCH, WIDTH, Net, as_torchrun_starts, batch, optimizer_of, sample
from tests.live import last_ranks, ranks

OUTSTANDING = "streaming_diloco(8, fragments=2, delay=3)"


@contextmanager
def started(rank: int, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """An Accelerator in the process group that a rank has, and what laconic warns of."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with as_torchrun_starts(rank, dist.get_world_size()) as said:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        yield Accelerator(cpu=True, **options), said


def attach(*args: Any, **options: Any) -> Any:
    from laconic.integrations.accelerate import attach

    return attach(*args, **options)


def prepared(accelerator: Any, net: nn.Module, optimizer: Callable[[nn.Module], Any] = optimizer_of) -> tuple[Any, Any]:
    model, optimizer = accelerator.prepare(net, optimizer(net))
    return model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any, rank: int, number: int, scale: float = 1.0) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(scale * model(**batch(rank, number))["loss"])
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: Any) -> dict[str, Tensor]:
    state = getattr(model, "module", model).state_dict()
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def mean(of: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in of]).mean(0) for name in of[0]}


def sgd(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1)


# A whole script


@dataclass(frozen=True)
class Script:
    """A training with all that `prepare` takes; which may be saved, killed and resumed."""

    strategy: str | None
    epochs: int = 3
    accumulate: int = 2
    save_at: tuple[int, ...] = ()  # steps
    stop_at: int | None = None
    kill: bool = False  # by the operating system
    automatic: bool = False  # Accelerate names the checkpoints
    safe: bool = True
    resume: bool = False

    @property
    def samples(self) -> int:
        return 2 * BATCH * 20  # an epoch of 20 batches a rank of two, or ten steps


@dataclass
class Result:
    weights: dict[str, Tensor]
    moments: Tensor
    rates: list[float]
    saved: dict[int, dict[str, Tensor]]  # this rank's own weights when it saved
    stats: Any
    said: list[str]


class Progress:
    """What a user registers for checkpointing."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def run_script(rank: int, folder: Path, script: Script) -> Result:
    from accelerate import skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    options = {
        "project_config": ProjectConfiguration(str(folder), automatic_checkpoint_naming=script.automatic, total_limit=2),
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    }
    with started(rank, gradient_accumulation_steps=script.accumulate, **options) as (accelerator, said):
        net, progress = Net(dropout=0.0), Progress()
        halves = [[*net.body[0].parameters()], [p for layer in list(net.body)[1:] for p in layer.parameters()]]
        data: Any = [sample(number) for number in range(script.samples)]
        loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
        first, second = torch.optim.AdamW(halves[0], lr=3e-3), torch.optim.SGD(halves[1], lr=0.05, momentum=0.9)
        decay = torch.optim.lr_scheduler.LambdaLR(first, lambda n: 0.99**n)
        model, first, second, loader, decay = accelerator.prepare(net, first, second, loader, decay)
        accelerator.register_for_checkpointing(progress)
        run: Any = attach(accelerator, model, [first, second], script.strategy) if script.strategy else nullcontext()
        rates: list[float] = []
        saved: dict[int, dict[str, Tensor]] = {}
        steps = 0
        with run:
            if script.resume:
                accelerator.load_state(None if script.automatic else str(folder / "saved"))
            for epoch in range(progress.batches // len(loader), script.epochs):
                loader.set_epoch(epoch)
                begun = progress.batches - epoch * len(loader)
                for inputs in skip_first_batches(loader, begun) if begun else loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(**inputs)["loss"])
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        for optimizer in (first, second):
                            optimizer.step()
                            optimizer.zero_grad()
                        decay.step()
                    progress.batches += 1
                    rates.append(first.param_groups[0]["lr"])
                    if progress.batches % script.accumulate:
                        continue
                    steps = progress.batches // script.accumulate
                    if steps in script.save_at and not script.resume:
                        saved[steps] = weights_of(model)
                        where = None if script.automatic else str(folder / "saved")
                        accelerator.save_state(where, safe_serialization=script.safe)
                    if steps == script.stop_at:
                        if script.kill:
                            os.kill(os.getpid(), signal.SIGKILL)
                        run.detach()
                        break
                if steps == script.stop_at:
                    break
        memory = [value.flatten() for one in (first, second) for state in one.state.values() for value in state.values()]
        stats = run.stats() if script.strategy else None
    return Result(weights_of(model), torch.cat([value.float() for value in memory]), rates, saved, stats, said)


def test_a_script_with_all_that_prepare_takes_is_the_same_under_ddp(tmp_path: Path) -> None:
    plain = ranks(2, run_script, tmp_path, Script(None))
    ours = ranks(2, run_script, tmp_path, Script("ddp()"))
    for mine, theirs in zip(ours, plain, strict=True):
        assert same(mine.weights, theirs.weights)
        assert torch.equal(mine.moments, theirs.moments)
        assert mine.rates == theirs.rates
        assert mine.rates[-1] < mine.rates[0]
        assert mine.stats.steps == 30  # of 60 batches, two optimizers each
        assert not mine.said


def test_a_script_with_all_that_prepare_takes_trains_apart(tmp_path: Path) -> None:
    first, second = ranks(2, run_script, tmp_path, Script("diloco(4)"))
    assert same({**first.weights, "seen": second.weights["seen"]}, second.weights)
    assert (first.stats.steps, first.stats.syncs, first.stats.exchanges) == (30, 7, 0)


# save_state and load_state


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


# A GradScaler


def scaled(rank: int, strategy: str) -> tuple[list[bool], Any, dict[str, Tensor]]:
    with started(rank) as (accelerator, _):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # Accelerate makes none on a CPU
        model, optimizer = prepared(accelerator, Net(dropout=0.0), sgd)
        skipped: list[bool] = []
        with attach(accelerator, model, optimizer, strategy) as run:
            for number in range(10):
                overflow = rank == 1 and number == 2
                step(accelerator, model, optimizer, rank, number, float("inf") if overflow else 1.0)
                skipped.append(accelerator.optimizer_step_was_skipped)
            stats = run.stats()
    return skipped, stats, weights_of(model)


@pytest.mark.parametrize(("strategy", "who"), [("int8()", [2, 2]), ("local_sgd(4)", [None, 2])])
def test_steps_that_a_scaler_skips_are_counted_on_all_ranks(strategy: str, who: list[int | None]) -> None:
    results = ranks(2, scaled, strategy)
    for (skipped, stats, weights), number in zip(results, who, strict=True):
        assert [place for place, one in enumerate(skipped) if one] == ([] if number is None else [number])
        assert stats.steps == 10
        assert all(torch.isfinite(value).all() for value in weights.values())
    assert results[0][1].syncs == results[1][1].syncs == (2 if strategy == "local_sgd(4)" else 0)
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2] if name != "seen")


# What is refused


def refused(rank: int, case: str) -> str:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType

    from laconic.integrations.accelerate import LocalSGD

    options: dict[str, Any] = {}
    if case == "hook":
        options["kwargs_handlers"] = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    with started(rank, **options) as (accelerator, _):
        net = Net()
        bare = optimizer_of(net)
        model, optimizer = accelerator.prepare(net, bare)
        one = rank == 1
        before = net if case == "before prepare" or (case == "before prepare on one rank" and one) else model
        if case in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):  # none of them runs on a CPU: only the state says so
            accelerator.state.distributed_type = DistributedType[case]
        strategy: Any = "diloco(8)"
        if case == "typo" or (case == "typo on one rank" and one):
            strategy = "dilocco(8)"
        if case == "another on one rank" and one:
            strategy = "diloco(9)"
        consensus = {"consensus": "median", "no anchor": "anchor"}.get(case, "mean")
        with pytest.raises((ValueError, TypeError)) as found:
            if case == "twice":
                with attach(accelerator, model, optimizer, strategy):
                    attach(accelerator, model, optimizer, strategy)
            elif case == "LocalSGD without an optimizer":
                accelerator._optimizers.clear()
                LocalSGD(accelerator, model, 8).__enter__()
            elif case == "LocalSGD typo on one rank":
                LocalSGD(accelerator, model, 8, strategy="dilocco(8)" if one else None).__enter__()
            elif case == "LocalSGD of no steps":
                LocalSGD(accelerator, model, 0)
            elif case == "optimizer on one rank":
                attach(accelerator, model, nn.Linear(1, 1) if one else optimizer, strategy)
            elif case == "another model's optimizer":
                attach(accelerator, model, accelerator.prepare(sgd(Net())), strategy)
            else:
                attach(accelerator, before, optimizer, "int8()" if case == "no anchor" else strategy, consensus=consensus)
        assert not {"save_state", "load_state"} & vars(accelerator).keys()
        dist.barrier()  # nobody is left behind in a collective
        return str(found.value)


REFUSED = {
    "before prepare": ["this Net has no DistributedDataParallel around it: write model, optimizer = accelerator.prepare("] * 2,
    "before prepare on one rank": ["rank 1: ValueError: diloco(period=8) needs the model that", "this Net has no Distributed"],
    "FSDP": ["under Accelerate with FSDP"] * 2,
    "DEEPSPEED": ["under Accelerate with DEEPSPEED"] * 2,
    "MEGATRON_LM": ["under Accelerate with MEGATRON_LM"] * 2,
    "typo": ["dilocco"] * 2,
    "typo on one rank": ["rank 1: ", "dilocco"],
    "another on one rank": ["rank 1 has strategy diloco(period=9), rank 0 has strategy diloco(period=8)"] * 2,
    "twice": ["is attached to a run already"] * 2,
    "hook": ["communication hook"] * 2,
    "consensus": ["consensus must be 'mean', 'anchor' or 'local', got 'median'"] * 2,
    "no anchor": ["consensus='anchor' is the outer optimizer's model, and int8() has none"] * 2,
    "optimizer on one rank": ["rank 1: TypeError", "optimizer must be a torch.optim.Optimizer"],
    "another model's optimizer": ["steps none of the model's parameters"] * 2,
    "LocalSGD without an optimizer": ["found no prepared optimizer over this model"] * 2,
    "LocalSGD typo on one rank": ["rank 1: ", "dilocco"],
    "LocalSGD of no steps": ["period must be at least 1"] * 2,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_on_all_ranks(case: str) -> None:
    for sentence, wanted in zip(ranks(2, refused, case), REFUSED[case], strict=True):
        assert wanted in sentence


# LocalSGD


class Plain(nn.Module):
    """Without buffers, as Accelerate's LocalSGD knows none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.body(x).squeeze(-1) - labels).square().mean()}


def by_local_sgd(rank: int, ours: bool, accumulate: int, calls: str, net: type[nn.Module] = Plain) -> tuple[Any, Any]:
    from accelerate.local_sgd import LocalSGD as Theirs

    from laconic.integrations.accelerate import LocalSGD as Ours

    kind: Any = Ours if ours else Theirs
    weights: list[dict[str, Tensor]] = []
    with started(rank, gradient_accumulation_steps=accumulate) as (accelerator, said):
        model, optimizer = prepared(accelerator, net(), sgd)
        given: dict[str, Any] = {
            "accelerator": accelerator,
            "model": model,
            "local_sgd_steps": 5,
            "enabled": calls != "disabled",
        }
        for block in range(2):  # epochs: each has its own
            with kind(*given.values()) if calls == "positional" else kind(**given) as local_sgd:
                for number in range(12 * accumulate):
                    step(accelerator, model, optimizer, rank, 100 * block + number)
                    if accelerator.sync_gradients:
                        local_sgd.step()
                    weights.append(weights_of(model))
                assert local_sgd.num_steps == 12
            weights.append(weights_of(model))
    return weights, said


@pytest.mark.parametrize(("accumulate", "calls"), [(1, "positional"), (3, "by name"), (1, "disabled")])
def test_local_sgd_is_accelerates_own_to_the_bit(accumulate: int, calls: str) -> None:
    # Two ranks: (x + y) / 2 and x / 2 + y / 2 are the same float.
    theirs = ranks(2, by_local_sgd, False, accumulate, calls)
    ours = ranks(2, by_local_sgd, True, accumulate, calls)
    for (mine, said), (other, _) in zip(ours, theirs, strict=True):
        assert len(mine) == 2 * (12 * accumulate + 1)
        assert all(same(left, right) for left, right in zip(mine, other, strict=True))
        assert not said
    apart = [not same(left, right) for left, right in zip(ours[0][0], ours[1][0], strict=True)]
    assert any(apart) == (calls != "disabled")
    assert not apart[-1]


def test_local_sgd_of_three_ranks_is_accelerates_own_but_for_rounding() -> None:
    theirs, ours = (ranks(3, by_local_sgd, own, 1, "by name") for own in (False, True))
    for (mine, _), (other, _) in zip(ours, theirs, strict=True):
        for left, right in zip(mine, other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_local_sgd_takes_accelerates_arguments() -> None:
    from accelerate.local_sgd import LocalSGD as Theirs

    from laconic.integrations.accelerate import LocalSGD as Ours

    wanted = inspect.signature(Theirs).parameters
    mine = inspect.signature(Ours).parameters
    assert list(mine)[: len(wanted)] == list(wanted)
    assert all(mine[name].kind == one.kind and mine[name].default == one.default for name, one in wanted.items())


def averaged(rank: int, options: dict[str, Any]) -> tuple[Any, ...]:
    from laconic.integrations.accelerate import LocalSGD

    with started(rank) as (accelerator, _):
        other = prepared(accelerator, Plain(), sgd)  # of another model: not this run's
        model, optimizer = prepared(accelerator, Net(dropout=0.0))
        with LocalSGD(accelerator, model, 4, **options) as local_sgd:
            for number in range(8):
                if rank:
                    model.module.seen.add_(1)  # a buffer that differs
                step(accelerator, model, optimizer, rank, number, 1.0 + rank)
                local_sgd.step()
            run = local_sgd.run
            stats, strategy = run.stats(), str(run.strategy)
            moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
            weights = weights_of(model)
        assert optimizer is not other[1]
    return stats, strategy, moments, weights


def test_local_sgd_averages_moments_and_buffers_too() -> None:
    (stats, strategy, moments, weights), second = ranks(2, averaged, {})
    assert strategy == "local_sgd(period=4, moments='average')"
    assert (stats.steps, stats.syncs) == (8, 2)
    assert all(torch.equal(mine, other) for mine, other in zip(moments, second[2], strict=True))
    assert same(weights, second[3])
    assert float(weights["seen"]) == 8 + 4  # the mean of both, twice


def test_local_sgd_by_another_strategy() -> None:
    (stats, strategy, _, _), _ = ranks(2, averaged, {"strategy": "diloco(8)"})
    assert strategy == "diloco(period=8)"
    assert (stats.steps, stats.syncs) == (8, 1)


# Other options of an Accelerator


def trained(rank: int, strategy: str | None, options: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    from accelerate.utils import GradientAccumulationPlugin

    accumulate = options.pop("accumulate", 1)
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(accumulate, sync_each_batch=options.pop("each", False))
    with started(rank, **options) as (accelerator, _):
        net = Net(dropout=0.0)  # accelerator.unwrap_model takes the DDP out of a compiled model for good
        model, optimizer = prepared(accelerator, net, sgd)
        run: Any = attach(accelerator, model, optimizer, strategy) if strategy else nullcontext()
        with run:
            for number in range(8):
                step(accelerator, model, optimizer, rank, number)
        stats = run.stats() if strategy else None
    return stats, weights_of(net)


@pytest.mark.parametrize("options", [{"mixed_precision": "bf16"}, {"accumulate": 2, "each": True}], ids=str)
def test_other_options_are_as_without_laconic(options: dict[str, Any]) -> None:
    plain, ours = (ranks(2, trained, strategy, options) for strategy in (None, "ddp()"))
    assert all(same(mine[1], theirs[1]) for mine, theirs in zip(ours, plain, strict=True))
    (stats, first), (_, second) = ranks(2, trained, "diloco(2)", options)
    assert stats.syncs == 4 // options.get("accumulate", 1)
    assert all(torch.equal(first[name], second[name]) for name in first if name != "seen")


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["int8()", "diloco(2)"])
def test_a_compiled_model(strategy: str) -> None:
    (stats, first), (_, second) = last_ranks(2, trained, strategy, {"dynamo_backend": "eager"})
    assert stats.steps == 8
    assert all(torch.equal(first[name], second[name]) for name in first if name != "seen")


# Processes of their own


SINGLE = """
    import warnings

    import torch
    from accelerate import Accelerator
    from laconic.integrations.accelerate import LocalSGD, attach

    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def step():
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(accelerator, model, optimizer, "diloco(8)") as run:
            before = net.weight.clone()
            step()
            with run.consensus():
                accelerator.save_state("saved")
            accelerator.load_state("saved")
            run.sync()
            run.swap("int8()")
    said = [str(one.message) for one in caught if "laconic" in one.filename or "laconic" in str(one.message)]
    assert len(said) == 1, said
    assert "diloco(period=8) is not attached: this is a single process" in said[0]
    assert not torch.equal(net.weight, before)
    assert (run.stats().steps, run.stats().wire_bytes, str(run.strategy)) == (0, 0, "int8()")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LocalSGD(accelerator, model, 8) as local_sgd:
            step()
            local_sgd.step()
    assert (local_sgd.enabled, local_sgd.num_steps) == (False, 1)
    print("trained alone")
"""


def python(*command: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment.update(OMP_NUM_THREADS="1", HF_HOME=str(folder / "home"), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_single_process_trains_and_is_told_once_that_nothing_is_attached(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text(textwrap.dedent(SINGLE))
    assert "trained alone" in python("single.py", folder=tmp_path)


def test_what_stands_for_a_run_has_all_that_a_run_has() -> None:
    public = {name for name in vars(Run) if not name.startswith("_")}
    assert public <= {*dir(IdleRun), "strategy", "step"}


LAUNCHED = """
    import torch
    from accelerate import Accelerator
    from laconic.integrations.accelerate import attach
    from tests.integrations.frameworks import Net, batch, optimizer_of

    accelerator = Accelerator(cpu=True)
    rank, net = accelerator.process_index, Net(dropout=0.0)
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    with attach(accelerator, model, optimizer, "diloco(4)") as run:
        for number in range(10):
            accelerator.backward(model(**batch(rank, number))["loss"])
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        torch.save(net.state_dict(), "trained.pt")
        print(f"{accelerator.num_processes} processes, {run.stats().syncs} syncs")
    del run, model, optimizer  # they hold the process group
    accelerator.end_training()
"""

# As `accelerate config` writes it. What Accelerate calls multi-CPU in it wants mpirun; multi-GPU is what starts processes, and
# the script says that they use no GPU.
CONFIG = """
    compute_environment: LOCAL_MACHINE
    debug: false
    distributed_type: MULTI_GPU
    downcast_bf16: 'no'
    gpu_ids: all
    machine_rank: 0
    main_training_function: main
    mixed_precision: 'no'
    num_machines: 1
    num_processes: 2
    rdzv_backend: static
    same_network: true
    main_process_port: 0
    use_cpu: false
"""
FLAGS = [
    "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
    "--main_process_port", "0",
]  # fmt: skip


def ten_steps(rank: int) -> dict[str, Tensor]:
    with started(rank) as (accelerator, _):
        model, optimizer = prepared(accelerator, Net(dropout=0.0))
        with attach(accelerator, model, optimizer, "diloco(4)"):
            for number in range(10):
                step(accelerator, model, optimizer, rank, number)
        return weights_of(model)


@pytest.mark.parametrize("how", ["config", pytest.param("flags", marks=pytest.mark.soak)])
def test_accelerate_launch(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(LAUNCHED))
    (tmp_path / "config.yaml").write_text(textwrap.dedent(CONFIG))
    options = ["--config_file", "config.yaml"] if how == "config" else FLAGS
    said = python("-m", "accelerate.commands.launch", *options, "script.py", folder=tmp_path)
    assert "2 processes, 2 syncs" in said
    assert same(torch.load(tmp_path / "trained.pt"), ranks(2, ten_steps)[0])


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
