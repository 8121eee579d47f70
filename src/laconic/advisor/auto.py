"""`auto()` at work: times the first steps, probes the ranks' own network, asks the advisor, and goes over to its choice."""

import json
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from laconic._torch.process_groups import training_device
from laconic.advisor.advice import Advice, Candidate, Row, advise
from laconic.advisor.candidates import candidates
from laconic.advisor.risk import Risk
from laconic.comm.exchange import complete
from laconic.comm.group import CommunicationError
from laconic.cost.codec import Codec
from laconic.cost.link import parse
from laconic.cost.measured import Probe
from laconic.cost.network import Network
from laconic.cost.step_time import Compute, StepTime, step_time
from laconic.cost.step_timer import SKIPPED, StepTimer, without_communication
from laconic.probing.probe import measure
from laconic.ranks.agreement import gather_texts
from laconic.ranks.presence import UnevenError
from laconic.reducers.base import Reducer
from laconic.reducers.momentum import Momentum
from laconic.run.arguments import check_route, check_sharded
from laconic.run.engine import Engine
from laconic.run.run import Run, engine_of
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Advised, Strategy

PLAIN = "ddp()"  # what is trained until the choice
DISBELIEF = 10.0  # a probe by which a step of ddp() would take so many times as long as it took, or as short, is not believed


class AutoPilot:
    """Watches a run by `auto()`, one on each rank, and swaps its strategy once.

    All that ranks do together happens after the same step on all of them. Only the first rank decides: what it has timed and
    what it is told by the others is known to no other rank. A run that leaves `auto()` by itself, because the user swaps it or
    loads a state, is left alone; one that comes back to it is watched anew.
    """

    def __init__(self, advised: Advised) -> None:
        if advised.link is not None:
            parse(advised.link)  # says what is wrong with it
        self._run: Run | None = None
        self._timer: StepTimer | None = None
        self._last = 0  # the step after which the timer ticked
        self._waited: float | None = None  # until then, in seconds; None: not known on this device
        self._over: Strategy | None = None  # by which nothing can be chosen

    def begin(self, run: Run) -> None:
        """The run is attached, and its first step is to come."""
        self._run = run
        engine = engine_of(run)
        if engine.replicas.world == 1:
            self._over = engine.strategy
            _say(engine, f"{run.strategy} has one replica here, and nobody to communicate with: it trains as {PLAIN}")
            return
        self._watch(engine)

    def stepped(self) -> None:
        """The run has made a step."""
        assert self._run is not None, "it has begun"
        engine = engine_of(self._run)
        advised = engine.strategy.advised
        if advised is None or engine.strategy is self._over or engine.replicas.world == 1:
            self._rest()
            return
        if self._timer is None or engine.step != self._last + 1:  # it has come back to auto(), or a state was loaded
            self._rest()
            self._watch(engine)
            return
        self._last = engine.step
        waited = engine.counter.training.wait_seconds
        self._timer.tick(0.0 if waited is None or self._waited is None else waited - self._waited)
        self._waited = waited
        if self._timer.ticks >= SKIPPED + advised.steps:
            self._choose(engine, advised, self._timer)

    def ended(self, failure: str | None) -> None:
        """The run is over."""
        assert self._run is not None, "it has begun"
        engine = engine_of(self._run)
        waiting, self._timer = self._timer, None
        if waiting is None:
            return
        waiting.stop()
        advised = engine.strategy.advised
        if failure is None and advised is not None and engine.step:
            wanted = SKIPPED + advised.steps
            _say(
                engine,
                f"{engine.strategy} ended before it had chosen: it needs {wanted} steps in a row and had {waiting.ticks}, as "
                f"{PLAIN}; with auto(steps=...), give fewer",
            )

    def _watch(self, engine: Engine) -> None:
        self._timer, self._last = StepTimer(engine.model, engine.optimizers), engine.step
        self._waited = engine.counter.training.wait_seconds

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def _choose(self, engine: Engine, advised: Advised, timer: StepTimer) -> None:
        """All ranks together: the first one's choice, or a warning and no choice."""
        assert self._run is not None, "it has begun"
        self._rest()
        by, problem = str(engine.strategy), ""
        _say(engine, f"{by} has timed {timer.timed} steps; it probes the network for {advised.seconds:g} s, and times encoding")
        with engine.during("choosing a strategy"):
            found = self._found(engine, advised, timer)
            rows = complete(gather_texts(json.dumps(found), engine.device), engine.group, engine.counter.control)
        answers = [json.loads(row) for row in rows]
        bad = [f"{name}: {one['problem']}" for name, one in zip(engine.group.names, answers, strict=True) if "problem" in one]
        if not bad:
            advice = heard(answers[0])
            try:
                self._run.swap(advice.choice.strategy)  # which all ranks accept, or none
            except (TypeError, ValueError) as error:
                problem = f"{advice.choice.strategy} can't be used here: {error}"
            else:
                engine.advice = advice
                _say(engine, f"{by} goes on by {advice.choice.strategy} after step {engine.step}. {advice.reason}")
                return
        self._over = engine.strategy
        if engine.group.rank == 0:
            why = problem or "; ".join(bad)
            warnings.warn(f"{by} has chosen nothing, and the run goes on as {PLAIN}: {why}", stacklevel=2)

    def _found(self, engine: Engine, advised: Advised, timer: StepTimer) -> dict[str, Any]:
        """What this rank tells the others: the first one its advice, and any one what went wrong."""
        slowest, probe = _slowest(engine, timer.compute()), _probed(engine, advised)
        try:
            if slowest is None:
                raise ValueError("no step was timed on any rank")
            network = _network(probe, advised)
            with torch.random.fork_rng(devices=[]):  # codecs are timed on random numbers; the user's stay
                # Every rank works out the same at the same time: they share cores in training, too.
                families = _families(engine, network, Risk.read(advised.risk))
            waited = timer.waited if self._waited is not None else None
            advice = choose(slowest, waited, families, network, advised)
        except Exception as error:  # whatever it is, no rank may wait for this one
            return {"problem": f"{type(error).__name__}: {error}"}
        return told(advice) if engine.group.rank == 0 else {}


def choose(
    timed: Compute, waited: float | None, families: Sequence[Sequence[Candidate]], network: Network, advised: Advised
) -> Advice:
    """The advice on a step of ddp() that took `timed`, without the seconds that training `waited`; None: not known.

    A probe that says something else of that step than what was seen is not believed: machines are busy now and then.
    """
    plain = next(one for family in families for one in family if one.strategy == PLAIN)
    compute = without_communication(timed, plain.steps, network, waits_known=waited is not None)
    if waited is not None and advised.link is None:
        took, says = timed.seconds + waited, step_time(plain.steps, compute, network).seconds
        if not took / DISBELIEF <= says <= took * DISBELIEF:
            raise ValueError(
                f"by the probe, a step of {PLAIN} takes {says:.3g} s, and it took {took:.3g} s: the machine may have been "
                f"busy; probe for longer, with auto(seconds={2 * advised.seconds:g})"
            )
    return advise(families, compute, network, share=advised.share, risk=Risk.read(advised.risk))


def _probed(engine: Engine, advised: Advised) -> Probe:
    """The network between the replicas; all ranks together. What goes wrong on one rank ends all: they can't vote on it."""
    group = engine.replicas
    try:
        return measure(group, training_device(group.process_group), seconds=advised.seconds)
    except (CommunicationError, UnevenError):
        raise
    except Exception as error:
        raise CommunicationError(f"the probe failed here: {type(error).__name__}: {error}") from error


def _slowest(engine: Engine, compute: Compute | None) -> Compute | None:
    """The compute of the rank that takes longest, by which the rate without communication goes; all ranks together.

    How much its steps differ is the mean over the ranks: one rank has few of them.
    """
    mine = json.dumps(None if compute is None else asdict(compute))
    rows = [json.loads(row) for row in complete(gather_texts(mine, engine.device), engine.group, engine.counter.control)]
    known = [Compute(**row) for row in rows if row is not None]
    if not known:
        return None
    jitter = statistics.fmean(one.jitter for one in known)
    return replace(max(known, key=lambda one: one.seconds), jitter=jitter)


def _network(probe: Probe, advised: Advised) -> Network:
    """What was probed, or the user's link between these hosts."""
    if advised.link is None:
        return probe.network()
    return probe.network(parse(advised.link))  # between the ranks of one host, too: as if each had a host of its own


def _families(engine: Engine, network: Network, risk: Risk) -> list[list[Candidate]]:
    """What may be chosen for this model on these ranks."""
    buckets = engine.hook.layout() if engine.hook is not None and engine.place.sharding is None else None
    adam = any("betas" in optimizer.defaults for optimizer in engine.optimizers)
    found = candidates(
        engine.model,
        engine.replicas.world,
        Codec(),
        sizes={"node": network.per_node},
        buckets=buckets or None,
        optimizer="adam" if adam else "sgd",
        risk=risk,
    )
    return [[one for one in family if _fits(engine, one.strategy)] for family in found]


def _fits(engine: Engine, strategy: str) -> bool:
    """Whether the run could go by it: a model may have too few layers for its fragments, or an optimizer that shards.

    Nor may a strategy ask of the loop what nobody can see from here: `Momentum` takes gradients that are not clipped.
    """
    chosen = read(strategy)
    if _has_momentum(chosen.reducer):
        return False
    try:
        check_route(chosen, engine.place, engine.replicas.world)
        check_sharded(chosen, engine.optimizers)
    except ValueError:
        return False
    return True


def _has_momentum(reducer: Reducer) -> bool:
    return isinstance(reducer, Momentum) or any(_has_momentum(part) for part in reducer.inner_reducers())


def told(advice: Advice) -> dict[str, Any]:
    """Plain data for the other ranks."""
    rows = [{**vars(row), "time": asdict(row.time), "risk": row.risk.option, "steps": ()} for row in advice.rows]
    place = next(number for number, row in enumerate(advice.rows) if row is advice.choice)
    return {"rows": rows, "choice": place, "reason": advice.reason, "share": advice.share, "risk": advice.risk.option}


def heard(data: Mapping[str, Any]) -> Advice:
    """What `told` was given, but for the steps of each row."""
    parts = [{**row, "time": StepTime(**row["time"]), "risk": Risk.read(row["risk"]), "steps": ()} for row in data["rows"]]
    rows = [Row(**part) for part in parts]
    return Advice(rows, rows[data["choice"]], data["reason"], data["share"], Risk.read(data["risk"]))


def _say(engine: Engine, sentence: str) -> None:
    if engine.group.rank == 0:
        print(f"laconic: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
