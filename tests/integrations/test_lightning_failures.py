"""Lightning: what is refused, what goes wrong on one rank, and what happens to the others."""

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.frameworks import as_torchrun_starts
from tests.integrations.test_lightning import EF, same
from tests.live import ranks

# What is refused


def refused(rank: int, case: str) -> str:
    from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    from laconic.integrations.lightning import LaconicCallback
    from tests.integrations.lightning_runs import Module, made, numbers

    text, options = "diloco(4)", {}
    # Their constructors ask for accelerators and for DeepSpeed: what can be tested here is the callback's opinion.
    twin = type("Twin", (DDPStrategy,), {"__module__": "lightning.pytorch.strategies"})
    foreign = {"fsdp": FSDPStrategy, "deepspeed": DeepSpeedStrategy, "twin": twin}
    if case == "typo":
        text = "dilocco(4)"
    elif case == "consensus":
        options = {"consensus": "median"}
    elif case == "anchor":
        text, options = "int8()", {"consensus": "anchor"}
    elif case == "static":
        options = {"strategy": DDPStrategy(static_graph=True)}
    elif case == "different":
        text = f"diloco({4 + rank})"
    with as_torchrun_starts(rank, 2):
        try:
            trainer, hook = made(text, **options)
            if case in foreign:
                strategy = foreign[case].__new__(foreign[case])
                strategy.cluster_environment = trainer.strategy.cluster_environment
                trainer._accelerator_connector.strategy = strategy
                hook.setup(trainer, Module(rank), "fit")
            else:
                trainer.callbacks += [LaconicCallback("int8()")] if case == "two" else []
                trainer.fit(Module(rank), numbers(2))
        except ValueError as error:
            return str(error)
    return "nothing was refused"


REFUSED = {
    "typo": "did you mean 'diloco'",
    "consensus": "consensus must be 'mean', 'anchor' or 'local', got 'median'",
    "anchor": "consensus='anchor' is the outer optimizer's model, and int8() has none; use 'mean'",
    "static": "static_graph",
    "two": "the Trainer has 2 LaconicCallbacks, of diloco(period=4) and int8(); a model is trained by one strategy",
    "different": "rank 1 has strategy diloco(period=5), rank 0 has strategy diloco(period=4)",
    "fsdp": "needs Trainer(strategy='ddp'), or a ModelParallelStrategy whose islands it averages, got FSDPStrategy",
    "deepspeed": "got DeepSpeedStrategy, which communicates in its own way",
    "twin": "the Trainer is of lightning, and laconic took pytorch_lightning",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_on_all_ranks(case: str) -> None:
    for sentence in ranks(2, refused, case):
        assert REFUSED[case] in sentence


def alone(rank: int) -> Any:
    import torch.distributed as dist

    from tests.integrations.lightning_runs import Module, copied, made, numbers

    dist.destroy_process_group()
    found = []
    with as_torchrun_starts(0, 1) as said:
        for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"):
            del os.environ[name]
        for text in ("diloco(4)", None):
            module = Module(rank)
            trainer, hook = made(text, devices=1, strategy="auto")
            torch.manual_seed(0)
            trainer.fit(module, numbers(6))
            found.append(copied(module.net))
            assert hook is None or hook.run is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for whoever destroys it
    return found, said


def test_a_single_process_trains_as_without_it() -> None:
    (((ours, plain), said),) = ranks(1, alone)
    assert same(ours, plain)
    (sentence,) = said
    assert "diloco(period=4) is not attached: this is a single process without a process group" in sentence


# What goes wrong


def failing(rank: int, folder: Path, *given: Any) -> Any:
    """What a rank raises after how long, and what it is left with."""
    outcome = failed(rank, *given)
    (folder / str(rank)).touch()
    while not (folder / str(1 - rank)).exists():  # it asks after this one as long as the connection is there
        time.sleep(0.01)
    gc.collect()  # a collective that hangs goes with its process group, and both with the trainer, which is in cycles
    return outcome


def failed(rank: int, strategy: str, how: str, where: str, bad: list[int]) -> Any:
    from tests.integrations.lightning_runs import Look, Module, copied, made, numbers

    class Fails(Module):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.fail("training", number)
            return super().training_step(batch, number)

        def validation_step(self, batch: Any, number: int) -> None:
            self.fail("validation", self.global_step)

        def fail(self, here: str, step: int) -> None:
            if here != where or step != 6 or rank not in bad:
                return
            if how == "error":
                raise RuntimeError("boom")
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "stop":
                self.trainer.should_stop = True
            if how == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)

    with as_torchrun_starts(rank, 2) as said:
        handler, module, look = signal.getsignal(signal.SIGINT), Fails(rank), Look()
        trainer, _ = made(strategy, [look], limit_val_batches=1, val_check_interval=3)
        raised, start = "nothing", time.monotonic()
        try:
            trainer.fit(module, numbers(9 if how == "end" and rank in bad else 12), numbers(1))
        except (Exception, SystemExit) as error:
            raised = f"{type(error).__name__}: {error}"
        finally:
            signal.signal(signal.SIGINT, handler)  # Lightning ignores further ones, and leaves it so
        seconds = time.monotonic() - start
    owners = (trainer, trainer.strategy, trainer.fit_loop.epoch_loop)
    ours = [
        name
        for name in ("save_checkpoint", "remove_checkpoint", "_broadcast_sigterm_tensor")
        for one in owners
        if name in vars(one)
    ]
    return {"raised": raised, "seconds": seconds, "left": ours, "own": same(look.own[-1], copied(module.net)), "said": said}


FAILURES = {
    "training": ("diloco(5)", "error", "training", [1], "rank 1 failed in step 7 with RuntimeError: boom"),
    "training, the first": (EF, "error", "training", [0], "rank 0 failed in step 7 with RuntimeError: boom"),
    "validation": ("diloco(5)", "error", "validation", [0], "rank 0 failed in step 7 with RuntimeError: boom"),
    "interrupt": ("diloco(5)", "interrupt", "training", [0], "rank 0 failed in step 7 with KeyboardInterrupt"),
    "interrupt of all": ("diloco(5)", "interrupt", "validation", [0, 1], "SystemExit: 1"),
    "stop": ("diloco(5)", "stop", "training", [1], "rank 0 made 9 steps, rank 1 made 7 steps"),
    "end": ("diloco(5)", "end", "", [0], "rank 0 left after 9 steps, rank 1 is in step 11; give every rank as many batches"),
    "end, gradients": (EF, "end", "", [1], "rank 0 is in step 10, rank 1 left after 9 steps; give every rank as many batches"),
    "terminate": ("diloco(5)", "terminate", "training", [0], "rank 0 failed in step 8 with SIGTERMException"),
    "terminate another": ("diloco(5)", "terminate", "training", [1], "rank 1 failed in step 8 with SIGTERMException"),
}


SHORT = ["training", "validation", "interrupt of all", "end, gradients", "terminate"]


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(one, marks=pytest.mark.soak) for one in FAILURES if one not in SHORT)])
def test_what_goes_wrong_on_one_rank_is_an_error_on_all(name: str, tmp_path: Path) -> None:
    *given, wanted = FAILURES[name]
    bad: Any = given[-1]
    for rank, one in enumerate(ranks(2, failing, tmp_path, *given)):
        if rank in bad and given[1] in ("error", "interrupt", "terminate"):
            assert one["raised"].split(":")[0] in ("RuntimeError", "SystemExit", "SIGTERMException")
        else:
            assert wanted in one["raised"]
        assert one["seconds"] < 20
        assert not one["left"], "the trainer is as it was"
        assert one["own"] or given[2] != "validation", "each rank has its own again"
        assert not one["said"]


def test_all_ranks_stop_together(tmp_path: Path) -> None:
    for one in ranks(2, failing, tmp_path, "diloco(5)", "stop", "training", [0, 1]):
        assert one["raised"] == "nothing"
        assert not one["said"]


def ahead(rank: int, folder: Path) -> bool:
    from tests.integrations.lightning_runs import Module, made, numbers

    class Waits(Module):
        waited = False

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if rank == 1 and number == 6:
                (folder / "ahead").touch()
            deadline = time.monotonic() + 20
            while rank == 0 and number == 2 and not (folder / "ahead").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            self.waited = self.waited or time.monotonic() > deadline
            return super().training_step(batch, number)

    with as_torchrun_starts(rank, 2):
        module = Waits(rank)
        made("diloco(8)")[0].fit(module, numbers(8))
    return not module.waited


def test_nobody_waits_for_anybody_between_syncs(tmp_path: Path) -> None:
    """Not for Lightning's own broadcast before each batch either."""
    assert all(ranks(2, ahead, tmp_path))
