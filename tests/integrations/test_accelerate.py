"""Accelerate: what its users do, and what they do wrong."""

import os
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import Run
from laconic.integrations.training import IdleRun
from tests.integrations.accelerate_scripts import Script, attach, prepared, run_script, same, sgd, started, step, weights_of
from tests.integrations.frameworks import Net, optimizer_of
from tests.live import last_ranks, ranks


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
    import gc

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
    del run, model, optimizer
    gc.collect()  # they hold the process group, and where they outlive it, gloo's threads end after Python: that is an abort
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


@pytest.mark.soak
@pytest.mark.parametrize("how", ["config", "flags"])
def test_accelerate_launch(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(LAUNCHED))
    (tmp_path / "config.yaml").write_text(textwrap.dedent(CONFIG))
    options = ["--config_file", "config.yaml"] if how == "config" else FLAGS
    said = python("-m", "accelerate.commands.launch", *options, "script.py", folder=tmp_path)
    assert "2 processes, 2 syncs" in said
    assert same(torch.load(tmp_path / "trained.pt"), ranks(2, ten_steps)[0])
