"""A user's script that uses every public name of `laconic` and `laconic.checkpoint`.

It is never run. `make check` reads it as a user's type checker does: by `mypy --strict`, and by pyright in its strict mode.
`test_face.py` fails where a public name is missing here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, assert_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic import checkpoint


def train(model: DistributedDataParallel, optimizer: Optimizer, batches: list[Tensor]) -> laconic.Stats:
    with laconic.attach(model, optimizer, "bf16()") as run:
        for batch in batches:
            loss: Tensor = model(batch).sum()
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_type(run, laconic.Run)
    return run.stats()


def train_by_every_argument(model: nn.Module, optimizers: list[Optimizer], mesh: DeviceMesh) -> None:
    strategy = laconic.strategy("post_local_sgd(subgroup='inner')")
    scaler = torch.amp.GradScaler("cpu")
    with laconic.attach(
        model,
        optimizers,
        strategy,
        scaler=scaler,
        uneven="stop",
        mesh=mesh,
        replicate="replicate",
        check_every=10,
        fused="auto",
    ) as run:
        laconic.Meter(run, Path("runs/first"), every=100, tensorboard=False)
    laconic.attach(model, tuple(optimizers), strategy, uneven="error", fused=False).detach()


def hold(run: laconic.Run) -> None:
    with run.consensus():
        pass
    with run.consensus(of="anchor"):
        run.sync()
    run.swap("int8()")
    run.swap(laconic.int4())
    state: dict[str, Any] = run.state_dict()
    run.load_state_dict(state)
    run.load_state_dict(state, strict=False)
    laconic.check_replicas(run)
    assert_type(run.strategy, laconic.Strategy)
    assert_type(run.step, int)
    buckets: list[list[str]] = run.layout()
    advice = run.advice()
    if advice is not None:
        print(buckets, advice.reason, advice.choice.strategy, len(advice.rows), advice.as_dict())
    run.detach()


def count(stats: laconic.Stats) -> list[float]:
    waited = 0.0 if stats.wait_seconds is None else stats.wait_seconds
    kinds: dict[str, int] = {**stats.wire_bytes_by_kind, **stats.collectives_by_kind}
    whole = [stats.steps, stats.counted_steps, stats.exchanges, stats.syncs, stats.skipped, stats.collectives]
    return [*whole, stats.payload_bytes, stats.wire_bytes, stats.background_bytes, stats.work_seconds, waited, *kinds.values()]


def fail(model: DistributedDataParallel, optimizer: Optimizer) -> str:
    try:
        with laconic.attach(model, optimizer, laconic.ddp()):
            optimizer.step()
    except laconic.CommunicationError as error:
        return f"a collective: {error}"
    except (laconic.PeerError, laconic.UnevenError, laconic.ReplicaError) as error:
        return str(error)
    return laconic.__version__


def save(run: laconic.Run, model: nn.Module, optimizer: Optimizer) -> int:
    saving = checkpoint.save("checkpoints", run=run, model=model, optimizer=[optimizer], extra={"epoch": 3}, keep=None)
    assert_type(saving, checkpoint.Saving)
    where: Path = saving.wait() if not saving.done else Path("checkpoints")
    newest = checkpoint.latest(where)
    if newest is None:
        return 0
    loaded = checkpoint.load(newest, run=run, model=model, optimizer=optimizer, strict=False)
    assert_type(loaded, checkpoint.Loaded)
    whole = {checkpoint.island_key(run): model.state_dict(), "laconic": laconic.checkpoint.RankState(run)}
    print(loaded.path, loaded.extra, whole)
    return loaded.step


def recipes() -> Iterator[laconic.Strategy]:
    yield laconic.ddp(reducer=laconic.Cast("fp16"), warmup=10, warmup_reducer=laconic.Exact(), second_moment="slow")
    yield laconic.fp16(warmup=10)
    yield laconic.bf16()
    yield laconic.fp8()
    yield laconic.int8()
    yield laconic.int4()
    yield laconic.powersgd(rank=4, warmup=10)
    yield laconic.topk(ratio=0.01)
    yield laconic.randomk(ratio=0.05)
    yield laconic.sign()
    yield laconic.onebit_adam(beta=0.9)
    yield laconic.silent()
    yield laconic.local_sgd(laconic.QSR(4, 0.02), moments={"exp_avg": 48}, atomic=False)
    yield laconic.post_local_sgd(100, 16, subgroup="node")
    yield laconic.hierarchical_sgd({4: "node", 16: "world"}, buffers="local")
    yield laconic.slowmo(12, beta=0.5, alpha=1.0)
    yield laconic.diloco(laconic.Every(32), outer=laconic.Nesterov(0.7, 0.9), reducer=laconic.Quantized(8), outlier=3.0)
    yield laconic.streaming_diloco(32, fragments=4, delay=4, blend=0.5, carry=True, offload=True)
    yield laconic.sparseloco(30, ratio=1 / 64, decay=0.95)
    yield laconic.local_adam(4, refresh=64, outer=laconic.Adopt())


def reducers() -> list[laconic.Reducer]:
    return [
        laconic.Exact(),
        laconic.Cast("bf16", accumulate="fp32"),
        laconic.Quantized(4, block=128, rounding="stochastic", seed=1),
        laconic.Float8("e5m2"),
        laconic.Ternary(block=256),
        laconic.Sign(block=64, phases=1),
        laconic.TopK(0.01, values="bf16"),
        laconic.RandomK(0.01),
        laconic.PowerSGD(rank=4, warm_start=False),
        laconic.BatchedPowerSGD(rank=1),
        laconic.AlternatingPowerSGD(rank=2),
        laconic.ErrorFeedback(laconic.Sign(), decay=0.95, dtype="bf16"),
        laconic.Release(laconic.TopK(0.1)),
        laconic.Momentum(laconic.Sign(), beta=0.9),
        laconic.Warmup(100, laconic.Sign(), laconic.Exact()),
    ]


def a_strategy_of_parts() -> laconic.Strategy:
    route = laconic.Route(((laconic.Every(16, start=100), "world"), (laconic.Every(4), "node"), (laconic.Never(), "world")))
    outer = laconic.OuterOptimizer(torch.optim.Adam, {"lr": 0.1})
    deltas = laconic.Deltas(outer=outer, reducer=laconic.Quantized(8))
    others: list[laconic.Outer] = [laconic.SlowMo(beta=0.5), laconic.Nesterov(), outer]
    averaging = laconic.Averaging(laconic.Route(((laconic.Every(32), "world"),)), deltas, moments="reset")
    chosen = laconic.Strategy(laconic.Exact(), route, averaging)
    print(others, chosen.warmup, chosen.cycle, str(chosen))
    return chosen


def before_anything_runs(model: nn.Module) -> float:
    forecast = laconic.predict("diloco(32)", model, world_size=8, steps=64, buckets=[["weight"], ["bias"]])
    assert_type(forecast, laconic.Forecast)
    traffic: laconic.Traffic = forecast
    print(traffic.payload_bytes, traffic.wire_bytes, traffic.collectives, forecast.steps)
    return forecast.wire_bytes_per_step + forecast.payload_bytes_per_step + forecast.collectives_per_step


def measure(group: dist.ProcessGroup) -> float:
    found = laconic.probe(group, seconds=10, progress=lambda share: print(f"{share:.0%}"))
    print(found.network(), found.slow, found.as_dict(), found.text())
    return laconic.probe().bits_per_second or found.delay_seconds


@laconic.register
@dataclass(frozen=True)
class Halved(laconic.Reducer):
    """A reducer of the user's own: every other number, the rest stays with its rank."""

    scale: float = 1.0

    def reduce(self, bucket: laconic.Bucket) -> laconic.Exchange:
        mean = yield laconic.AllReduce(bucket.flat[::2] * self.scale)
        assert_type(mean, Tensor)
        rows = yield laconic.AllGather(bucket.flat[1::2])
        mine = yield laconic.AllToAll(rows)
        sent: laconic.Collective = laconic.AllReduce(mine)
        print(sent.traffic(bucket.world).wire_bytes, sent.payload_bytes, sent.kind)
        slot: laconic.Slot = bucket.slots[0]

        def finish() -> None:
            slot["kept"] = mine

        bucket.flat[::2] = mean / self.scale
        return laconic.Reduced(bucket.flat, error=None, finish=finish, good=bucket.flat.isfinite().all())

    @classmethod
    def examples(cls) -> Iterator[Self]:
        yield cls()
        yield cls(scale=2.0)


def try_it() -> list[Tensor]:
    def one(rank: int) -> laconic.Exchange:
        flat, slots = torch.ones(4), [laconic.Slot()]
        bucket = laconic.Bucket(flat=flat, views=[flat], names=["weight"], slots=slots, rank=rank, world=2, step=3, exchanges=3)
        return Halved().reduce(bucket)

    laconic.check_reducer(Halved(), world=2, dtype=torch.float32, seed=1)
    return [reduced.mean for reduced in laconic.simulate([one(rank) for rank in range(2)])]


@laconic.register
@dataclass(frozen=True)
class PowersOfTwo(laconic.Schedule):
    """A schedule of the user's own."""

    start: int = 0

    def due(self, step: int, last: int = 0, rate: float | None = None) -> bool:
        return (step + 1).bit_count() == 1

    @property
    def cycle(self) -> int | None:
        return None


@laconic.register
@dataclass(frozen=True)
class Half(laconic.Outer):
    """An outer optimizer of the user's own."""

    lr: float = 0.5

    def build(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        return torch.optim.SGD(groups, lr=self.lr)


def by_parts_of_my_own() -> laconic.Strategy:
    return laconic.diloco(PowersOfTwo(), outer=Half(), reducer=Halved())


def mistakes_that_a_type_checker_finds(run: laconic.Run, model: nn.Module, optimizer: Optimizer) -> None:
    """Each comment is itself an error where there is nothing to ignore."""
    print(run.setp)  # type: ignore[attr-defined]
    print(laconic.int9)  # type: ignore[attr-defined]
    print(laconic.compat.no_such_module, laconic.elastic.atach)  # type: ignore[attr-defined]
    laconic.diloco(perod=3)  # type: ignore[call-arg]
    laconic.attach(model, optimizer)  # type: ignore[call-arg]
    laconic.attach(model, optimizer, 3)  # type: ignore[arg-type]
    laconic.Quantized(5)  # type: ignore[arg-type]
    steps: str = run.step  # type: ignore[assignment]
    print(steps)
