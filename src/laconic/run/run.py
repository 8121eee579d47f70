"""The live object: what a user holds of a strategy at work."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from laconic.comm.exchange import complete
from laconic.comm.flat_tensors import local
from laconic.comm.group import CommunicationError
from laconic.gradients.dispatcher import in_buffers
from laconic.gradients.sharded import in_island
from laconic.ranks.agreement import agree
from laconic.ranks.presence import still_training
from laconic.run import resume
from laconic.run.arguments import check_route, check_sharded
from laconic.run.ending import make_equal, warn_if_still_warming_up
from laconic.run.engine import Engine, Stop
from laconic.run.stats import Advice, Stats
from laconic.run.switch import switch_to
from laconic.strategies.parsing import strategy as read
from laconic.strategies.strategy import Strategy

_MOVED = ("model", "optimizers", "scaler", "group")  # what a Run had before, and its engine has


class Run:
    """A strategy attached to a model; made by `attach`.

    As a context manager it makes replicas equal at the end of the block, and tells the other ranks of an exception in it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def strategy(self) -> Strategy:
        """By which it goes on from here."""
        return self._engine.strategy

    @property
    def step(self) -> int:
        """Attempted optimizer steps so far."""
        return self._engine.step

    def stats(self) -> Stats:
        """Counts of the whole run, always on: a run that resumes goes on counting where its state was taken."""
        engine, counts = self._engine, self._engine.counter.total()
        return Stats(
            steps=engine.clock.step,
            exchanges=engine.hook.exchanges if engine.hook else 0,
            syncs=engine.local.syncs,
            collectives=counts.total.collectives,
            payload_bytes=counts.total.payload_bytes,
            wire_bytes=counts.total.wire_bytes,
            wait_seconds=counts.wait_seconds,
            skipped=engine.local.skipped,
            background_bytes=counts.background_bytes,
            work_seconds=counts.work_seconds,
            wire_bytes_by_kind={kind: cost.wire_bytes for kind, cost in counts.kinds.items()},
            collectives_by_kind={kind: cost.collectives for kind, cost in counts.kinds.items()},
            counted_steps=counts.steps,
        )

    def advice(self) -> Advice | None:
        """What the advisor has found, the same on all ranks: `.choice`, `.reason`, and `.rows`, one for each strategy.

        None, unless the run is by `auto()` and has chosen in this process: after a resume, the choice was made before.
        """
        return self._engine.advice

    def layout(self) -> list[list[str]]:
        """DDP's buckets as they are, by parameter name. DDP rebuilds them once, after the first backward."""
        buckets = self._engine.hook.layout() if self._engine.hook else []
        if not buckets:
            raise RuntimeError("no bucket has been seen: run a backward first, or call predict() without buckets")
        return buckets

    def sync(self) -> None:
        """Make every replica equal, if steps were taken apart: the mean of all. All ranks call it together."""
        self._engine.require_live("sync")
        with self._engine.during("making replicas equal"):
            if self._engine.agree_on_drift():
                self._engine.local.equalise(self._engine.counter.training)
        self._engine.wrote()

    @contextmanager
    def consensus(self, of: Literal["mean", "anchor"] = "mean") -> Iterator[None]:
        """Inside, the parameters are the mean of the replicas; after, the local ones again, bit for bit. All ranks together.

        With "anchor" they are the outer optimizer's instead, as of the last sync: no bytes, where a strategy has one.
        """
        engine = self._engine
        engine.require_live("consensus")
        anchors = engine.local.deltas.anchors if engine.local.deltas else None
        if of not in ("mean", "anchor") or (of == "anchor" and anchors is None):
            known = "'mean' or 'anchor'" if anchors else f"'mean': {self.strategy} has no anchor (yet)"
            raise ValueError(f"consensus is of {known}, got {of!r}")
        if of == "mean" and not engine.agree_on_drift():
            yield
            return
        tensors = [local(tensor) for tensor in engine.averaged().values()]
        kept = [tensor.clone() for tensor in tensors]
        engine.in_consensus = True
        try:
            if of == "anchor" and anchors is not None:
                for name, parameter in engine.parameters.items():
                    local(parameter).copy_(anchors[name])
            else:
                with engine.during("taking the mean of the replicas"):
                    engine.local.average_into_place(engine.counter.background, atomic=False)  # what was there is kept
            engine.wrote()
            yield
        finally:
            for tensor, mine in zip(tensors, kept, strict=True):
                tensor.copy_(mine)
            engine.wrote()
            engine.in_consensus = False

    def swap(self, strategy: Strategy | str) -> None:
        """Go on by another strategy from the next step; all ranks call it together, between steps."""
        engine = self._engine
        engine.require_live("swap")
        engine.ensure_all_training()
        try:
            chosen = read(strategy)
            check_route(chosen, engine.place, engine.replicas.world)
            check_sharded(chosen, engine.optimizers)
            if chosen.advised is not None and engine.pilot is None:
                raise ValueError(f"{chosen} chooses at the start of a run; attach it, or swap to a strategy of your choice")
        except (TypeError, ValueError) as problem:
            agree([], problem, engine.group, engine.device)
            raise
        agree([f"strategy {chosen}", f"step {engine.clock.step}"], None, engine.group, engine.device)
        with engine.during(f"going over to {chosen}"):
            switch_to(engine, chosen)
        if chosen.advised is not None:
            engine.advised_by, engine.advice = chosen, None

    def detach(self) -> None:
        """Take everything off again: a plain DDP, plain optimizers. Asks nobody; calling it twice is harmless."""
        self._engine.end(failed=sys.exc_info()[0] is not None)

    def state_dict(self) -> dict[str, Any]:
        """This rank's communication state, as plain data that `torch.load` takes by default."""
        return resume.state_of(self._engine)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` was taken; all ranks together. Nothing is changed if it doesn't fit.

        The state of another strategy is refused, or, with `strict=False`, loaded as if the run had been by that strategy
        until now and is swapped here.
        """
        resume.load_state(self._engine, state, strict=strict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        engine = self._engine
        if not engine.live:
            return False
        if error is not None and not isinstance(error, Stop):
            engine.fail(error)
            if in_buffers(error):
                phase = "DDP's broadcast of buffers"
                raise CommunicationError(f"{self.strategy}, step {self.step + 1}, {phase}: {error}") from error
            if engine.place.sharding is not None and in_island(error):
                phase = f"a collective of torch's own inside of island {engine.ranks.island}, here on {engine.name}"
                raise CommunicationError(f"{self.strategy}, step {self.step + 1}, {phase}: {error}") from error
            return False
        failed = True
        try:
            stop = engine.uneven == "stop"
            meets = engine.strategy.route.communicates or engine.strategy.averaging or engine.place.sharding is not None
            if stop and error is None and meets:
                complete(still_training(False, engine.device), engine.group, engine.counter.control)
            if engine.presence.leave(drifted=engine.drifted, may_differ=stop):
                make_equal(engine)
            warn_if_still_warming_up(engine)
            # The store lives in one rank's process: nobody goes before all have read it.
            complete(still_training(False, engine.device), engine.group, engine.counter.control)
            failed = False
            return isinstance(error, Stop)
        finally:
            engine.end(failed)

    def __getattr__(self, name: str) -> Any:
        if name not in _MOVED:
            raise AttributeError(f"a Run has no {name!r}", name=name, obj=self)
        hint = "it is the process group of the DDP, or the default one" if name == "group" else "you gave it to attach"
        warnings.warn(f"run.{name} is going away: {hint}", DeprecationWarning, stacklevel=2)
        return getattr(self._engine, name)


def engine_of(run: Run) -> Engine:
    """The engine behind a run: for the packages above this one, which go by what `Engine` says is for them."""
    return run._engine
