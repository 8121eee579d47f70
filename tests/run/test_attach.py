"""What can't work is refused before anything is changed, on every rank, with a sentence; and nobody hangs."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import laconic
from laconic.comm.group import TorchGroup
from laconic.ranks.agreement import PeerError, agree
from laconic.run.arguments import unwrapped
from laconic.run.run import engine_of
from tests.live import last_ranks, ranks
from tests.models import build, chain, everywhere_equal, vectors, weights


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hooked() -> DistributedDataParallel:
    model = build(chain)
    model.register_comm_hook(None, allreduce_hook)
    return model


def mixed() -> DistributedDataParallel:
    model = build(chain)
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    return model


def taken() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = build(chain)
    optimizer = sgd(model)
    laconic.attach(model, optimizer, "ddp()")
    return model, optimizer


def bare_parameterless() -> tuple[nn.Module, torch.optim.Optimizer]:
    return nn.ReLU(), sgd(nn.Linear(1, 1))


def doubled() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = build(chain)
    return model, [sgd(model)] * 2


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(chain)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    return model, sgd(model)


def fully_sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = chain(2)
    fully_shard(model)
    return model, sgd(model)


def sharded_buffer() -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    model = chain(2)
    everywhere = init_device_mesh("cpu", (dist.get_world_size(),))
    model.register_buffer("mask", distribute_tensor(torch.ones(4), everywhere, [Replicate()]))
    return model, sgd(model)


CASES: list[tuple[Callable[[], Any], str, dict[str, Any], type[Exception], str]] = [
    (sharded, "diloco(2)", {}, ValueError, "takes steps apart, and a ZeroRedundancyOptimizer"),
    (fully_sharded, "int8()", {}, ValueError, "Sequential is sharded, and attach was given no mesh: it must know which"),
    (fully_sharded, "diloco(2)", {}, ValueError, "Shard over islands: mesh = init_device_mesh(device, (islands, shards), "),
    (sharded_buffer, "diloco(2)", {}, ValueError, "the buffer mask is a DTensor, and only parameters may be"),
    (bare_parameterless, "silent()", {}, ValueError, "ReLU has no parameters that are trained"),
    (lambda: pair(chain), "bf16()", {}, ValueError, "averages gradients, which needs a DistributedDataParallel"),
    (lambda: pair(lambda: build(chain)), "bf61()", {}, ValueError, "did you mean 'bf16'?"),
    (lambda: pair(lambda: build(chain)), "bf16(warmup=-1)", {}, ValueError, "warmup must be 0 or more steps, got -1"),
    (lambda: pair(lambda: build(chain)), "ddp()", {"uneven": "maybe"}, ValueError, "'error' or 'stop', got 'maybe'"),
    (lambda: pair(lambda: build(chain)), "ddp()", {"scaler": 3}, TypeError, "scaler must be a torch.amp.GradScaler, got int"),
    (lambda: (build(chain), []), "ddp()", {}, ValueError, "optimizer is an empty list"),
    (lambda: (build(chain), "adam"), "ddp()", {}, TypeError, "must be a torch.optim.Optimizer or a list of them, got str"),
    (lambda: (build(chain), sgd(chain())), "ddp()", {}, ValueError, "steps none of the model's parameters"),
    (lambda: ("model", sgd(chain())), "ddp()", {}, TypeError, "model must be a torch.nn.Module, got str"),
    (lambda: pair(hooked), "ddp()", {}, ValueError, "the communication hook allreduce_hook already"),
    (lambda: pair(mixed), "ddp()", {}, ValueError, "a DDP built with mixed_precision= runs a communication hook of its own"),
    (taken, "ddp()", {}, ValueError, "attached to a run already"),
    (doubled, "ddp()", {}, ValueError, "an optimizer is given twice"),
    (lambda: pair(lambda: nn.Sequential(build(chain))), "silent()", {}, ValueError, "a DistributedDataParallel inside"),
    (lambda: pair(lambda: build(chain, static_graph=True)), "silent()", {}, ValueError, "attach ddp() for a step and swap"),
    (lambda: pair(lambda: build(lambda: nn.Embedding(5, 3, sparse=True))), "bf16()", {}, ValueError, "sparse gradients"),
]


def refused(rank: int, case: int) -> None:
    make, text, options, kind, wanted = CASES[case]
    model, optimizer = make()
    before = dict(vars(model)) if isinstance(model, nn.Module) else {}
    with pytest.raises(kind) as caught:
        laconic.attach(model, optimizer, text, **options)
    assert wanted in str(caught.value)
    assert not isinstance(model, nn.Module) or dict(vars(model)) == before, "nothing may have been changed"
    # and the process group is still in order
    good = build(chain)
    with laconic.attach(good, its := sgd(good), "ddp()"):
        good(vectors(rank, 0)).sum().backward()
        its.step()
    assert everywhere_equal(weights(good))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[4][:40] for case in CASES])
def test_bad_input_is_refused_on_every_rank(case: int) -> None:
    ranks(2, refused, case)


def accelerated(optimizer: torch.optim.Optimizer) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(optimizer)


def lightened(optimizer: torch.optim.Optimizer) -> Any:
    from pytorch_lightning.core.optimizer import LightningOptimizer

    return LightningOptimizer(optimizer)


@pytest.mark.parametrize("wrap", [accelerated, lightened])
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_a_frameworks_optimizer_stands_for_the_one_inside(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build(chain)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        outside = wrap(inner)
        assert outside is not inner
        with laconic.attach(model, outside, "diloco(2)") as run:
            assert engine_of(run).optimizers == [inner]
            for step in range(5):
                model(vectors(0, step)).square().sum().backward()
                inner.step()
                inner.zero_grad()
            assert (run.step, run.stats().syncs) == (5, 2)
            laconic.checkpoint.save(tmp_path, run=run, optimizer=outside)
            with pytest.raises(ValueError, match="counts the steps of this AdamW already"):
                engine_of(run).add_optimizer(outside)
    finally:
        dist.destroy_process_group()


class Lookahead(torch.optim.Optimizer):
    """A wrapper with a state of its own: the inner optimizer's alone would lose it at a checkpoint."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_an_optimizer_with_a_state_of_its_own_is_no_wrapper() -> None:
    inner = sgd(chain())
    outside = Lookahead(inner)
    assert unwrapped(outside) is outside
    assert unwrapped(inner) is inner


def part_failed(rank: int) -> None:
    group = TorchGroup(dist.group.WORLD)  # type: ignore[arg-type]
    problem = OSError(28, "No space left on device") if rank == 0 else None
    with pytest.raises(OSError if rank == 0 else PeerError) as caught:
        agree([], problem, group, torch.device("cpu"))
    if rank == 1:
        assert str(caught.value) == "other ranks failed:\n  rank 0: OSError: [Errno 28] No space left on device"
    with pytest.raises(
        ValueError, match=r"^bad$" if rank == 1 else r"(?s)have something that can't be used:.*rank 1: ValueError"
    ):
        agree([], ValueError("bad") if rank == 1 else None, group, torch.device("cpu"))


def test_a_full_disk_is_nothing_that_a_rank_was_given() -> None:
    ranks(2, part_failed)


def different(rank: int, what: str) -> str:
    texts = {"strategy": ["ddp()", "ddp()", "bf16()"], "typo": ["ddp()", "ddp()", "dpd()"]}
    text = texts.get(what, ["silent()"] * 3)[rank]
    torch.manual_seed(0)
    width = 17 if what == "shape" and rank == 1 else 16
    model: nn.Module = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 3))
    if what == "dtype" and rank == 2:
        model = model.to(torch.bfloat16)
    if what == "frozen" and rank == 2:
        model[1].bias.requires_grad_(False)  # type: ignore[index]
    if text != "silent()":
        model = DistributedDataParallel(model)
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller looks at what it says)
        laconic.attach(model, sgd(model), text)
    assert time.monotonic() - start < 10
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("strategy", "rank 2 has strategy bf16(), rank 0 has strategy ddp()"),
        (
            "shape",
            "rank 1 has parameter 0.weight of shape (17, 16), torch.float32, rank 0 has parameter 0.weight of shape (16, 16)",
        ),
        ("dtype", "rank 2 has parameter 0.weight of shape (16, 16), torch.bfloat16, rank 0 has"),
        ("frozen", "rank 2 has nothing, rank 0 has parameter 1.bias of shape (3,)"),
    ],
)
def test_ranks_that_were_given_different_things_all_say_which(what: str, wanted: str) -> None:
    messages = ranks(3, different, what)
    assert len(set(messages)) == 1
    assert wanted in messages[0]


def test_one_ranks_typo_is_an_error_on_all() -> None:
    first, second, culprit = ranks(3, different, "typo")
    assert "did you mean 'ddp'?" in culprit
    assert first == second
    assert "rank 2: ValueError: unknown name 'dpd'" in first


def test_without_a_process_group() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="init_process_group"):
        laconic.attach(model, sgd(model), "silent()")


def uneven(rank: int, steps: list[int], options: dict[str, Any], norm: bool) -> tuple[int, str]:
    make = functools.partial(with_norm, 16) if norm else chain
    model = build(make)
    optimizer = sgd(model)
    message, start = "", time.monotonic()
    try:
        with laconic.attach(model, optimizer, options.pop("strategy", "ddp()"), **options) as run:
            for step in range(steps[rank]):
                model(vectors(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except laconic.UnevenError as error:
        message = str(error)
    assert time.monotonic() - start < 30
    if not message:
        assert everywhere_equal(list(model.parameters()))
        dist.barrier()  # nothing is left outstanding
    return run.stats().steps, message


def with_norm(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def test_loaders_of_unequal_length_are_an_error_on_all() -> None:
    for _, message in last_ranks(3, uneven, [5, 3, 5], {}, False):
        assert "rank 1 left after 3 steps" in message
        assert "is in step 4" in message
        assert "uneven='stop'" in message


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
def test_with_uneven_stop_all_stop_together(norm: bool) -> None:
    assert ranks(3, uneven, [5, 3, 5], {"uneven": "stop"}, norm) == [(3, "")] * 3
    assert ranks(3, uneven, [4, 4, 4], {"uneven": "stop"}, norm) == [(4, "")] * 3


def accumulating(rank: int, batches: list[int]) -> int:
    model = build(chain)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, "ddp()", uneven="stop") as run:
        for part in range(batches[rank]):
            if rank == 1:
                with torch.no_grad():  # one rank evaluates: nobody has to be there
                    model(vectors(rank, part))
            if part % 2 == 0:
                with model.no_sync():
                    model(vectors(rank, part)).sum().backward()
            else:
                model(vectors(rank, part)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert everywhere_equal(weights(model))
    return run.stats().steps


def test_uneven_stop_in_the_middle_of_accumulation() -> None:
    assert ranks(2, accumulating, [5, 8]) == [2, 2]


def asking(rank: int, call: Callable[[laconic.Run], object], strategy: str) -> int:
    model = build(chain)
    optimizer = sgd(model)
    with laconic.attach(model, optimizer, strategy, uneven="stop") as run:
        for step in range(3 + rank):
            if step == 3:
                call(run)
            model(vectors(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert everywhere_equal(weights(model))
    return run.stats().steps


def enter_consensus(run: laconic.Run) -> None:
    with run.consensus():
        pass


@pytest.mark.parametrize(
    "call",
    [functools.partial(laconic.Run.swap, strategy="bf16()"), laconic.Run.sync, enter_consensus],
    ids=["swap", "sync", "consensus"],
)
def test_uneven_stop_where_a_rank_asks_for_something_collective(call: Callable[[laconic.Run], object]) -> None:
    assert ranks(2, asking, call, "ddp()") == [3, 3]


def test_a_rank_without_any_batch() -> None:
    assert ranks(2, uneven, [0, 3], {"strategy": "silent()", "uneven": "stop"}, True) == [(0, ""), (3, "")]


def handmade(rank: int) -> str:
    model = build(chain)
    route = laconic.ddp().route
    reducer: laconic.Reducer = laconic.Exact() if rank else laconic.Cast("bf16")
    with pytest.raises(ValueError, match="different things") as caught:
        laconic.attach(model, sgd(model), laconic.Strategy(reducer, route))
    return str(caught.value)


def test_strategies_without_a_text_are_told_apart() -> None:
    assert "rank 1 has strategy Strategy(reducer=Exact()" in ranks(2, handmade)[0]


class Bare(laconic.Reducer):
    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        return laconic.Reduced((yield laconic.AllReduce(bucket.flat)))


def test_a_reducer_must_say_what_it_is() -> None:
    with pytest.raises(TypeError, match="Bare must be a frozen dataclass"):
        laconic.ddp(reducer=Bare())


def test_silent_ranks_of_unequal_length() -> None:
    for _, message in ranks(2, uneven, [2, 4], {"strategy": "silent()"}, False):
        assert "rank 0 left after 2 steps, rank 1 left after 4 steps" in message
    assert ranks(2, uneven, [2, 4], {"strategy": "silent()", "uneven": "stop"}, False) == [(2, ""), (4, "")]


def failing(rank: int) -> str:
    model = build(chain)
    optimizer = sgd(model)
    start = time.monotonic()
    message = ""
    try:
        with laconic.attach(model, optimizer, "ddp()"):
            for step in range(5):
                if rank == 1 and step == 3:
                    raise ZeroDivisionError("no more")
                model(vectors(rank, step)).square().mean().backward()
                optimizer.step()
    except (ZeroDivisionError, laconic.UnevenError) as error:
        message = str(error)
    assert time.monotonic() - start < 30
    return message


def test_an_exception_on_one_rank_reaches_the_others_in_seconds() -> None:
    first, second, third = last_ranks(3, failing)
    assert second == "no more"
    for message in (first, third):
        assert "rank 1 failed in step 4 with ZeroDivisionError: no more" in message
