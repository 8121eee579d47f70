"""Any strategy on N workers in one process: a training run of minutes becomes one of seconds, and needs one core.

Every parameter has a leading dimension of workers, so that all workers' forward, backward and optimizer steps are one batched
call each. What is averaged goes through the strategy's own reducers, route, agenda, outer optimizer and second moment; bytes
are counted as a run counts them. Not simulated: fragments, a period that follows the learning rate, subgroups.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import laconic
from benchmarks.stacked_models import MODELS, Parameters
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.dryrun import simulate
from laconic.comm.flat_tensors import flatten, unflatten
from laconic.comm.ledger import Ledger
from laconic.local.agenda import Agenda
from laconic.reducers.base import Reducer
from laconic.reducers.exact import Exact
from laconic.run.second_moment import SecondMoment
from laconic.strategies.strategy import Deltas, Strategy

CACHE = Path(tempfile.gettempdir()) / "laconic-simulation"


@dataclass(frozen=True)
class Setting:
    """A task, and how it is trained. `warm`: so many steps of plain DDP at a constant rate, before the `steps` that count."""

    model: str  # a key of MODELS
    batch: int  # of one worker
    lr: float
    steps: int
    warm: int = 0
    workers: int = 4
    optimizer: str = "adamw"  # or sgd
    beta2: float = 0.95
    clip: float = 1.0

    def __str__(self) -> str:
        regime = f"{self.warm} + {self.steps} steps" if self.warm else f"{self.steps} steps from scratch"
        return f"{self.model}, {self.workers} x {self.batch}, {self.optimizer}, lr {self.lr:g}, {regime}"


class Outcome(NamedTuple):
    """How a run ended."""

    loss: float  # of the mean of all workers, on held-out data
    bytes_per_step: float  # of one worker, on the wire


class Workers:
    """All replicas of a model, and their optimizer."""

    def __init__(self, setting: Setting, seed: int, start: Parameters) -> None:
        self.setting, self.model = setting, MODELS[setting.model]
        self.named = {name: value.expand(setting.workers, *value.shape).clone() for name, value in start.items()}
        for value in self.named.values():
            value.requires_grad_()
        values = list(self.named.values())
        self.optimizer: torch.optim.Optimizer
        if setting.optimizer == "adamw":
            betas = (0.9, setting.beta2)
            self.optimizer = torch.optim.AdamW(values, lr=setting.lr, betas=betas, weight_decay=0.01, fused=True)
        else:
            self.optimizer = torch.optim.SGD(values, lr=setting.lr, momentum=0.9, foreach=True)
        self.second_moment = SecondMoment([self.optimizer])
        self.ledger = Ledger()
        self._memory: dict[str, list[dict[str, Slot]]] = {}  # of gradients and of deltas apart, as a run keeps them
        self._draw = torch.Generator().manual_seed(10_000 * (seed + 1) + bool(setting.warm))

    def gradients(self) -> dict[str, Tensor]:
        """Of the next batch of each worker."""
        batch = self.model.batch(self._draw, self.setting.workers, self.setting.batch)
        found = torch.autograd.grad(self.model.losses(self.named, batch).sum(), list(self.named.values()))
        return dict(zip(self.named, found, strict=True))

    def mean(self, what: str, reducer: Reducer, rows: Mapping[str, Tensor], step: int, number: int) -> dict[str, Tensor]:
        """The workers' mean of named tensors, by a reducer."""
        world, names = self.setting.workers, list(rows)
        memory = self._memory.setdefault(what, [{name: {} for name in names} for _ in range(world)])
        buckets = []
        for rank in range(world):
            flat, views = flatten([rows[name][rank] for name in names])
            slots = [memory[rank][name] for name in names]
            buckets.append(Bucket(flat, views, names, slots, rank, world, step, number))
        results = simulate([reducer.reduce(bucket) for bucket in buckets], self.ledger)
        for result in results:
            result.finish()
        return dict(zip(names, unflatten(results[0].mean, buckets[0].views), strict=True))

    def apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Clip by each worker's norm, and step."""
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()]).sum(0).sqrt()
        factor = (self.setting.clip / (norms + 1e-6)).clamp(max=1.0)
        for name, value in self.named.items():
            # Contiguous, as backward() would leave it: the fused step reads the numbers in the order in which they lie.
            value.grad = (gradients[name] * factor.view(-1, *[1] * (value.dim() - 1))).contiguous()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        mean = {name: value.mean(0, keepdim=True) for name, value in self.named.items()}
        return float(self.model.losses(mean, self.model.held_out())[0])


class Averager:
    """What a strategy does between steps."""

    def __init__(self, strategy: Strategy, workers: Workers) -> None:
        self._averaging, self._workers = strategy.averaging, workers
        self._agenda = Agenda(strategy.averaging) if strategy.averaging else None
        self._syncs = 0
        self._outstanding: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None
        self._anchors: dict[str, Tensor] = {}
        self._outer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> None:
        """After `step` completed steps."""
        averaging, workers = self._averaging, self._workers
        if averaging is None or self._agenda is None or step < averaging.start:
            return
        if averaging.deltas is None:
            if self._agenda.scope(step) is not None:
                self._agenda.synced(step, None)
                self._adopt(workers.mean("parameters", Exact(), workers.named, step, 0))
                self._moments(step)
            return
        deltas = averaging.deltas
        assert deltas.fragments == 1, "fragments are not simulated"
        assert deltas.carry or not deltas.delay, "a delay is simulated with carry alone"
        if not self._anchors:
            self._anchors = {name: value[0].detach().clone() for name, value in workers.named.items()}
            self._outer = deltas.outer.build([{"params": list(self._anchors.values()), "rate": 1.0}])
            if step == averaging.start and step:
                return
        if self._outstanding is not None and step >= self._outstanding[0] + deltas.delay:
            self._complete(deltas, lr)
        if self._agenda.departures(step):
            there = {name: value.detach().clone() for name, value in workers.named.items()}
            rows = {name: anchor - there[name] for name, anchor in self._anchors.items()}
            mean = workers.mean("deltas", deltas.reducer, rows, step, self._syncs)
            self._syncs += 1
            self._agenda.synced(step, None)
            self._outstanding = step, mean, there
            if not deltas.delay:
                self._complete(deltas, lr)
            self._moments(step)

    def _complete(self, deltas: Deltas, lr: float) -> None:
        assert self._outstanding is not None
        assert self._outer is not None
        _, mean, there = self._outstanding
        self._outstanding = None
        for group in self._outer.param_groups:
            group["rate"] = lr
        for name, anchor in self._anchors.items():
            anchor.grad = mean[name]
        self._outer.step()
        for name, value in self._workers.named.items():
            value.add_(self._anchors[name] - there[name])  # with what was learnt since the deltas left

    def _adopt(self, mean: Mapping[str, Tensor]) -> None:
        for name, value in self._workers.named.items():
            value.copy_(mean[name].expand_as(value))

    def _moments(self, step: int) -> None:
        assert self._averaging is not None
        if self._averaging.moments == "average":
            for key in ("exp_avg", "exp_avg_sq"):
                state = {name: self._workers.optimizer.state[value][key] for name, value in self._workers.named.items()}
                for name, mean in self._workers.mean(key, Exact(), state, step, 0).items():
                    state[name].copy_(mean.expand_as(state[name]))


def train(setting: Setting, strategy: str, seed: int) -> Outcome:
    """One run of a strategy."""
    workers = started(setting, seed)
    _run(workers, laconic.strategy(strategy), setting.steps, lambda step: falling(setting, step))
    return Outcome(workers.evaluate(), workers.ledger.total.wire_bytes / setting.steps)


def started(setting: Setting, seed: int) -> Workers:
    """Workers before the first step that counts."""
    start, memory = warm(setting, seed) if setting.warm else (MODELS[setting.model].start(seed), {})
    workers = Workers(setting, seed, start)
    for name, value in workers.named.items():
        if name in memory:
            workers.optimizer.state[value] = {
                key: part.expand(setting.workers, *part.shape).clone() if part.dim() else part.clone()
                for key, part in memory[name].items()
            }
    return workers


def falling(setting: Setting, step: int) -> float:
    """The learning rate: from scratch it rises over a twentieth of the steps; then it falls as a cosine to a fiftieth."""
    ramp = 0 if setting.warm else setting.steps // 20
    fall = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / setting.steps))
    return setting.lr * min(1.0, (step + 1) / (ramp + 1)) * fall


def _run(workers: Workers, strategy: Strategy, steps: int, rate: Callable[[int], float]) -> None:
    averager, second = Averager(strategy, workers), workers.second_moment
    averager.after_step(0, rate(0))
    for step in range(steps):
        scope = strategy.route.at(step)
        assert scope in ("world", None), "subgroups are not simulated"
        gradients: Mapping[str, Tensor] = workers.gradients()
        if scope == "world":
            mean = workers.mean("gradients", strategy.reducer, gradients, step, step)
            gradients = {name: value.expand_as(workers.named[name]) for name, value in mean.items()}
        if step >= strategy.warmup:
            second.prepare(strategy.second_moment, step, synchronous=scope == "world")
        workers.apply(gradients, rate(step))
        if scope == "world":
            second.synchronised(step + 1)
        averager.after_step(step + 1, rate(step))


def warm(setting: Setting, seed: int) -> tuple[Parameters, dict[str, dict[str, Tensor]]]:
    """Parameters and the optimizer's memory after the warm steps of DDP; kept, so that they are made once."""
    facts = repr((replace(setting, steps=0), seed, _sources()))
    path = CACHE / f"warm-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.pt"
    if not path.exists():
        workers = Workers(replace(setting, warm=0), seed, MODELS[setting.model].start(seed))
        _run(workers, laconic.ddp(), setting.warm, lambda step: setting.lr * min(1.0, (step + 1) / 40))
        parameters = {name: value[0].detach().clone() for name, value in workers.named.items()}
        state = {
            name: {key: part[0].clone() if part.dim() else part.clone() for key, part in workers.optimizer.state[value].items()}
            for name, value in workers.named.items()
        }
        CACHE.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save((parameters, state), partial)
        partial.replace(path)
    found: tuple[Parameters, dict[str, dict[str, Tensor]]] = torch.load(path)
    return found


Job = tuple[Setting, str, int]


def outcome(job: Job) -> Outcome:
    """A run's, made now or kept from before: a benchmark that was stopped goes on where it was."""
    torch.set_num_threads(1)
    setting, strategy, seed = job
    facts = repr((asdict(setting), strategy, seed, _sources()))
    path = CACHE / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return Outcome(*json.loads(path.read_text()))
    found = train(setting, strategy, seed)
    CACHE.mkdir(exist_ok=True)
    path.write_text(json.dumps(found))
    print(f"  {setting}, seed {seed}: {strategy}: {found.loss:.4f}", flush=True)
    return found


def outcomes(jobs: Sequence[Job], processes: int = 2) -> dict[Job, Outcome]:
    """Of many runs, some at a time."""
    with get_context("fork").Pool(processes) as pool:
        firsts = {(setting, seed) for setting, _, seed in jobs if setting.warm}
        pool.starmap(warm, sorted(firsts, key=repr))
        return dict(zip(jobs, pool.map(outcome, jobs, chunksize=1), strict=True))


def _sources() -> str:
    """What a kept outcome depends on: this file, and the models'. A change of a reducer needs another cache."""
    files = [Path(__file__), Path(__file__).with_name("stacked_models.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def tuned(settings: Sequence[Setting], rates: Sequence[float], seed: int = 0) -> dict[Setting, float]:
    """For each setting the rate of a grid by which ddp() ends lowest."""
    jobs = [(replace(setting, lr=lr), "ddp()", seed) for setting in settings for lr in rates]
    found = outcomes(jobs)
    return {setting: min(rates, key=lambda lr: found[replace(setting, lr=lr), "ddp()", seed].loss) for setting in settings}


def percent(found: Mapping[Job, Outcome], setting: Setting, strategy: str, seeds: Sequence[int]) -> list[float]:
    """How far a strategy's loss ended above ddp's with the same seed, in percent."""
    pairs: list[tuple[Any, Any]] = [(found[setting, strategy, seed], found[setting, "ddp()", seed]) for seed in seeds]
    return [100 * (mine.loss / base.loss - 1) for mine, base in pairs]
