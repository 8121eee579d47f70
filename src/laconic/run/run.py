"""The live object: what a user holds of a strategy at work."""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

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
    """A strategy attached to a model; `laconic.attach` makes it.

    As a context manager it makes the replicas equal at the end of the block and takes everything off. If ranks have made
    different numbers of steps, every rank raises an UnevenError that names them, unless `uneven` is "stop". An exception in the
    block goes on, no collective is started because of it, and the other ranks are told. `stats()` and `advice()` work after
    the block, too.

    All ranks call these together, between steps: `sync`, `consensus`, `swap`, `load_state_dict`, and the end of the block.
    Inside `consensus()` they raise a RuntimeError, and so they do once the run has been detached.

    >>> import torch, laconic
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.attach(model, optimizer, "powersgd(rank=1, warmup=1)") as run:
    ...     for batch in torch.ones(3, 8, 4):
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     buckets = run.layout()
    ...     state = run.state_dict()
    ...     run.swap("diloco(2)")
    ...     with run.consensus("anchor"):
    ...         evaluated = model(torch.ones(1, 4))
    ...     run.sync()
    >>> run.step, run.strategy == laconic.diloco(2), run.stats().steps, buckets
    (3, True, 3, [['bias', 'weight']])
    >>> run.advice()  # None: nothing was left to the advisor

    Another run over the same model goes on from the state:

    >>> again = laconic.attach(model, optimizer, "powersgd(rank=1, warmup=1)")
    >>> again.load_state_dict(state)
    >>> again.step
    3
    >>> again.detach()
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def strategy(self) -> Strategy:
        """By which the next step goes: the one that was attached, swapped to, or chosen by `auto()`."""
        return self._engine.strategy

    @property
    def step(self) -> int:
        """Attempted optimizer steps so far, before a resume and since; a step that the GradScaler skipped counts."""
        return self._engine.step

    def stats(self) -> Stats:
        """Counts of the whole run on this rank: steps, bytes, seconds of waiting. See `Stats` for each.

        They are always on. A run that resumes goes on counting where its state was taken. No collective.
        """
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
        """What the advisor has found, the same on all ranks; no collective.

        `.choice` is the row of the strategy that it chose, `.reason` says why in a sentence or two, and `.rows` has a row for
        each strategy: `.strategy`, `.risk`, `.share` of the rate without communication, `.time`, `.wire_bytes_per_step` and
        others. None before the choice, of a run that is not by `auto()`, and after a resume: the choice was made before.
        """
        return self._engine.advice

    def layout(self) -> list[list[str]]:
        """DDP's buckets by parameter name, in the order in which they leave: for `laconic.predict(..., buckets=)`.

        DDP rebuilds them once, after the first backward. Of a model that `fully_shard` has sharded, its groups. No collective.
        Before the first backward that was averaged, and of a bare module, it raises a RuntimeError.
        """
        buckets = self._engine.hook.layout() if self._engine.hook else []
        if not buckets:
            raise RuntimeError("no bucket has been seen: run a backward first, or call predict() without buckets")
        return buckets

    def sync(self) -> None:
        """Replace every replica by the mean of all, if steps were taken apart; all ranks together.

        Parameters and buffers are averaged; exchanges that are outstanding are completed before. The outer optimizer has
        no part in that, and a new period begins. Where no rank has drifted, some bytes of agreement are all that is sent.

        Bytes: 2(N-1)/N * n * itemsize, which `stats()` counts as training.

        Not: the optimizers' state, which stays each rank's own.

        It raises an UnevenError where ranks are at different steps.
        """
        self._engine.require_live("sync")
        with self._engine.during("making replicas equal"):
            if self._engine.agree_on_drift():
                self._engine.local.equalise(self._engine.counter.training)
        self._engine.wrote()

    @contextmanager
    def consensus(self, of: Literal["mean", "anchor"] = "mean") -> Iterator[None]:
        """Inside the block, the model is that of all ranks; after it, each rank's own again, bit for bit. All ranks together.

        Use it to evaluate, or to save a model. Exchanges that are outstanding stay so.

        Bytes: of the mean 2(N-1)/N * n * itemsize, in `stats().background_bytes`, and nothing if replicas are equal. The anchor
        costs none.

        Memory: a copy of parameters and buffers on their own device, as long as the block lasts.

        Not: a place to train in, or to call `save`, `swap` or `sync`: what is there is on loan, and they raise a RuntimeError.

        Arguments:
          `of`: "mean": parameters and buffers are the mean of the replicas. "anchor": parameters are those of the outer
            optimizer, as of the last sync, and buffers are this rank's own. Default "mean".

        It raises a ValueError for "anchor" where the strategy has none, or has none yet: in a warm-up.
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
        """Go on by another strategy from the next step; all ranks together, between steps.

        Replicas become equal before, if they may differ. If the new strategy averages gradients, the optimizers' state becomes
        equal, too, and the loss scale is the first rank's. What error feedback has not sent yet goes into the next exchange,
        or, if it is of deltas, into the parameters. The clock goes on: a warm-up of 100 steps is over in step 500.

        Bytes: those of `sync`, if replicas may differ; and of the optimizers' state, if the new strategy averages gradients.

        Not: replicas are not made equal for a strategy that never communicates, such as `silent()`, unless the old one has an
        anchor.

        Arguments:
          `strategy`: an object such as `laconic.fp16()`, or its text. "auto()" works only in a run that was attached by it,
            and searches anew.

        Every rank raises a ValueError where strategies or steps differ between ranks, or where the new strategy doesn't fit the
        model. The run goes on by the old one then.
        """
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
        agree([f"strategy {chosen.compared}", f"step {engine.clock.step}"], None, engine.group, engine.device)
        with engine.during(f"going over to {chosen}"):
            switch_to(engine, chosen)
        if chosen.advised is not None:
            engine.advised_by, engine.advice = chosen, None

    def detach(self) -> None:
        """Take everything off again: a plain DDP, plain optimizers. Calling it twice is harmless.

        It sends nothing and waits for nobody, so replicas stay as they are; a warning says so if they differ. The end of the
        block does it as well, after it has made them equal.
        """
        self._engine.end(failed=sys.exc_info()[0] is not None)

    def state_dict(self) -> dict[str, Any]:
        """This rank's communication state, as plain data that `torch.load` reads by default. No collective.

        The strategy's text, the clock, residuals, factors, anchors, the outer optimizer's memory, the deltas of outstanding
        exchanges, and the counts of `stats()`. Each rank has another one: save all of them. Where no rank keeps anything of its
        own (`bf16()`, `int8()`), that of one rank may be loaded on all.

        Memory: its tensors are the run's own and no copies. Write them, or copy them, before the next step.

        Not: parameters, optimizers, the GradScaler and random generators. `laconic.checkpoint.save` saves a whole run.
        """
        return resume.state_of(self._engine)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where `state_dict` was taken; all ranks together, before the first step or between two.

        Load parameters and optimizers before. Deltas that were outstanding are sent again, and arrive at the step at which they
        would have.

        Arguments:
          `state`: what this rank's `state_dict` gave, in a run of as many ranks over the same model.
          `strict`: True: the state of another strategy is refused. False: it is loaded as if the run had been by that
            strategy until now and were swapped here; a warning names what can't be used. Default True.

        Not: a state of another number of ranks is taken as it is, and what the others kept is lost; `laconic.checkpoint` deals
        it anew. Ranks don't ask each other: load on all of them.

        It raises a ValueError that says what doesn't fit, and has changed nothing then.
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

    if not TYPE_CHECKING:  # type checkers would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            if name not in _MOVED:
                raise AttributeError(f"a Run has no {name!r}", name=name, obj=self)
            hint = "it is the process group of the DDP, or the default one" if name == "group" else "you gave it to attach"
            warnings.warn(f"run.{name} is going away: {hint}", DeprecationWarning, stacklevel=2)
            return getattr(self._engine, name)


def engine_of(run: Run) -> Engine:
    """The engine behind a run: for the packages above this one, which go by what `Engine` says is for them."""
    return run._engine
