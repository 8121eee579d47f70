"""Averaging of how far replicas have come from a common anchor, at once or while training goes on."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.comm.bucket import RESIDUAL, Bucket, Slot
from laconic.comm.exchange import PendingExchange, Reduced, complete
from laconic.comm.flat_tensors import local, squared_norm, unflatten
from laconic.comm.group import TorchGroup
from laconic.comm.inspection import Inspector, sync_of_deltas
from laconic.comm.ledger import Ledger
from laconic.comm.pipeline import WINDOW, Pipeline
from laconic.local.anchors import Anchors, InnerGroups
from laconic.local.fragment_exchange import FragmentExchange, PendingBucket
from laconic.local.fragments import buckets
from laconic.local.outliers import Norms
from laconic.ranks.presence import Heartbeat, gather_flags, heartbeat
from laconic.reducers.base import finite
from laconic.strategies.strategy import Deltas


def _nothing(fragments: Sequence[int]) -> None:
    """Nobody has to be asked."""


class Mark(NamedTuple):
    """Where exchanges stand, for `undo`."""

    exchanges: list[int]  # that each fragment has begun
    norms: list[list[float]]  # of the syncs that were accepted


class DeltaAverager:
    """Sends anchor - parameters by any reducer, and moves the anchor by an outer optimizer's step on the mean.

    Maths, for each fragment: delta = mean of anchor - x as x was when it left; anchor <- outer(anchor, delta) when the
    exchange is complete; x <- blend * x + (1 - blend) * there, where `there` is the anchor or, with `carry`, the anchor + x - x
    as it was when it left: what a replica learns while its delta is outstanding counts in its next one.
    Bytes: the reducer's.  Memory: the anchor, what the outer optimizer keeps, and the deltas that are outstanding.

    The i-th of R rounds of an outstanding exchange leaves i * delay / R steps after the first, whatever has arrived by then, so
    that all ranks send in the same order. (R is known from a bucket's last exchange; in its first one, later rounds leave when
    it is due.) A sync in which a delta is not finite on any rank, or out of line with those before, moves nothing: all replicas
    go back to the anchor. Nothing is written before all buckets have arrived: a collective that fails leaves parameters and
    anchors as they were.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        fragments: Sequence[Sequence[str]],
        deltas: Deltas,
        group: TorchGroup,
        heartbeats: TorchGroup,
        island: TorchGroup | None,
        ledger: Ledger,
        control: Ledger,
        device: torch.device,
        inner: InnerGroups,
        rates: bool,
        on_reset: Callable[[Sequence[str]], None],
        inspector: Inspector,
        fused: bool = False,
    ) -> None:
        self.fragments = fragments
        self._given = dict(parameters)
        self._deltas, self._group, self._ledger, self._control, self._device = deltas, group, ledger, control, device
        self._inspector, self._fused = inspector, fused
        self._heartbeats, self._island = heartbeats, island  # who must be there; who holds the other shards of this replica
        self._on_reset = on_reset  # given the names of parameters that went back to the anchor
        self._rates = [rate for _, rate in inner] if rates else []
        self.memory: dict[str, Slot] = {name: {} for name in parameters}
        self._exchanges = [0] * len(fragments)  # that each fragment has begun
        self._expected: dict[Hashable, int] = {}  # rounds that a bucket took in its last exchange, by its first parameter
        self.skipped = 0  # syncs that moved nothing
        self._norms = [Norms(deltas.outlier) for _ in fragments]
        # For workers that may come and go: how much each fragment of this rank counts, 1 on average; what is asked before
        # anything is written, which may raise; and, where a rank has a part of a replica and heartbeats go to the same part of
        # the others, what makes squares of the parts those of the whole.
        self.weights: Mapping[int, float] = {}
        self.confirm: Callable[[Sequence[int]], None] = _nothing
        self.replica_squares: Callable[[Sequence[float]], Sequence[float]] | None = None
        self._clean: set[int] = set()  # fragments that are known to be the same on all ranks
        self._outstanding: list[FragmentExchange] = []
        tensors = {name: local(parameter) for name, parameter in parameters.items()}
        self._buckets = [buckets(tensors, names) for names in fragments]
        self.anchors = Anchors(tensors, deltas.outer, inner, offload=deltas.offload)

    @property
    def drifted(self) -> bool:
        """Whether replicas may differ."""
        return len(self._clean) < len(self.fragments)

    @property
    def outstanding(self) -> bool:
        """Whether an exchange is outstanding."""
        return bool(self._outstanding)

    def drift(self) -> None:
        """A local step has been taken."""
        self._clean.clear()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin a period here: replicas are equal, and where they are is the anchor."""
        assert not self._outstanding, "what is outstanding has to be completed first"
        for name, anchor in self.anchors.by_name.items():
            anchor.copy_(self._parameter(name))
        self._clean = set(range(len(self.fragments)))

    @torch.no_grad()
    def advance(self, step: int, departures: Iterable[int]) -> dict[int, Heartbeat]:
        """After `step` completed steps: complete or send on what is outstanding, launch these fragments.

        Returns the fragments that are complete now, with what ranks told each other when these left.
        """
        departures, delay = list(departures), self._deltas.delay
        complete = [one for one in self._outstanding if step >= one.launched + delay]
        for one in complete:
            self._finish(one)
        if complete:
            self.confirm([one.fragment for one in complete])
        self._apply(complete)  # before anything else is sent, which may fail
        squares = self._squares(departures)
        for one in self._outstanding:
            one.pipeline.advance(step - one.launched, delay)
        if delay:
            self._outstanding += [self._launch(n, step, self._filled(n, step), squares.get(n)) for n in departures]
        else:
            complete = [self._exchange(number, step, squares.get(number)) for number in departures]
            if complete:
                self.confirm([one.fragment for one in complete])
            self._apply(complete)
        return {one.fragment: one.heartbeat.result for one in complete}

    @torch.no_grad()
    def complete_all(self) -> None:
        """Complete everything that is outstanding, before its time."""
        for one in list(self._outstanding):
            self._finish(one)
            self._apply([one])

    @torch.no_grad()
    def release(self) -> None:
        """What error feedback still holds goes into the parameters, once, and is forgotten."""
        for name, slot in self.memory.items():
            if RESIDUAL in slot:
                self._parameter(name).sub_(slot.pop(RESIDUAL))

    def mark(self) -> Mark:
        """Where exchanges stand now, without those that are outstanding: these would be lost with the workers."""
        over = list(self._exchanges)
        for one in self._outstanding:
            over[one.fragment] -= 1
        return Mark(over, [list(norms.norms) for norms in self._norms])

    def undo(self, mark: Mark) -> list[int]:
        """The exchanges since then came to nothing, on all ranks; the fragments whose deltas were outstanding."""
        lost = [one.fragment for one in self._outstanding]
        self.abandon()
        self._exchanges = list(mark.exchanges)
        self._norms = [Norms(self._deltas.outlier, norms) for norms in mark.norms]
        self._expected.clear()
        return lost

    def abandon(self) -> None:
        """Forget what is outstanding."""
        for one in self._outstanding:
            one.heartbeat.abandon(0)
            one.pipeline.abandon(0)
        self._outstanding = []

    # One exchange

    def _squares(self, fragments: Sequence[int]) -> dict[int, float]:
        """How far whole replicas have come, by fragment, where this rank has a part of one; nothing where it has all of it.

        Before anything is sent to others: the ranks of a replica ask each other, and each of them may lose others later.
        """
        if self.replica_squares is None or not fragments:
            return {}
        parts = [squared_norm(map(self._delta, self.fragments[number])) for number in fragments]
        return dict(zip(fragments, self.replica_squares(parts), strict=True))

    def _exchange(self, fragment: int, step: int, square: float | None) -> FragmentExchange:
        """At once, a few buckets outstanding at a time; none where the heartbeat says that the sync is to be skipped."""
        if square is None:
            square = squared_norm(map(self._delta, self.fragments[fragment]))
        pipeline = Pipeline(self._group, self._ledger, {}, window=WINDOW)
        exchange = FragmentExchange(fragment, step, self._heartbeat(step, square), [], pipeline)
        self._judge(exchange)
        if exchange.problem is None:
            for bucket in self._filled(fragment, step):
                exchange.buckets.append(PendingBucket(bucket, self._add(pipeline, bucket, fragment)))
        pipeline.finish()
        return exchange

    def _launch(self, fragment: int, step: int, filled: Iterable[Bucket], square: float | None = None) -> FragmentExchange:
        """All buckets, of which the first rounds leave now."""
        filled = list(filled)
        pipeline = Pipeline(self._group, self._ledger, self._expected)
        if square is None:
            square = squared_norm(bucket.flat for bucket in filled)
        present = self._heartbeat(step, square)
        exchange = FragmentExchange(fragment, step, present, [], pipeline)
        for bucket in filled:
            delta = bucket.flat.clone()  # as it leaves: what a checkpoint needs to send it again
            exchange.buckets.append(PendingBucket(bucket, self._add(pipeline, bucket, fragment), delta))
        return exchange

    def _heartbeat(self, step: int, square: float) -> PendingExchange[Heartbeat]:
        """Of all ranks of all islands: the shards of a replica must be judged alike, by the replica as a whole."""
        group, rates = self._heartbeats, [rate() for rate in self._rates]
        rounds = heartbeat(step, square, rates, group, self._device, group.world // self._group.world)
        return PendingExchange(rounds, group, self._control)

    def _add(self, pipeline: Pipeline, bucket: Bucket, fragment: int) -> PendingExchange[Reduced]:
        weight = self.weights.get(fragment, 1.0)
        if weight != 1:
            bucket.flat.mul_(weight)
        return pipeline.add(bucket.names[0], self._inspector.inspect(self._deltas.reducer.reduce, bucket))

    def _finish(self, exchange: FragmentExchange) -> None:
        exchange.pipeline.finish()
        self._outstanding.remove(exchange)
        self._judge(exchange)

    def _judge(self, exchange: FragmentExchange) -> None:
        """Whether it is in line with those before; the same answer on all ranks."""
        present = exchange.heartbeat.complete()
        exchange.problem = self._norms[exchange.fragment].problem(present.squares, present.broken)

    # What comes of it

    def _apply(self, exchanges: Sequence[FragmentExchange]) -> None:
        """Move the anchors by one step of the outer optimizer over all fragments that are complete, then the parameters."""
        carried: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        bad: list[str] = []
        accepted = [exchange for exchange in exchanges if exchange.problem is None]
        verdicts = iter(self._verdicts(accepted))
        for exchange in accepted:
            self.anchors.use_rates(exchange.heartbeat.result.rates)
            for pending in exchange.buckets:
                names, result = pending.bucket.names, pending.exchange.result
                good = next(verdicts)
                result.finish()
                if good:
                    means |= zip(names, unflatten(result.mean, pending.bucket.views), strict=True)
                    carried |= self._progress(pending)
                else:
                    bad += names
        if means:
            self.anchors.step(means)
        for exchange in exchanges:
            if exchange.problem is not None:
                self._skip(exchange.fragment, exchange.problem, exchange.launched)
                continue
            for name in self.fragments[exchange.fragment]:
                self._move(name, carried.get(name), blend=0.0 if name in bad else self._deltas.blend)
            self._note(exchange)
        if bad:
            self.skipped += 1
            self._on_reset(bad)
            warnings.warn(
                f"a mean delta is not finite although each rank's was (among {bad[0]}, ...); these parameters go back "
                "to where they were after the last exchange",
                stacklevel=2,
            )

    def _verdicts(self, exchanges: Sequence[FragmentExchange]) -> list[bool]:
        """Which buckets have a mean that is finite. Of a sharded replica all or none, whatever buckets its shards are in."""
        buckets = [pending for exchange in exchanges for pending in exchange.buckets]
        results = [pending.exchange.result for pending in buckets]
        goods = [bool(finite(result.mean) if result.good is None else result.good) for result in results]
        if self._island is not None and exchanges:  # this rank may have nothing of a fragment, and others some of it
            everywhere = all(complete(gather_flags(all(goods), self._device), self._island, self._control))
            goods = [everywhere] * len(goods)
            for verdict in [result.good for result in results if result.good is not None]:
                verdict.fill_(everywhere)
        return goods

    def _move(self, name: str, carried: Tensor | None, blend: float) -> None:
        """A parameter goes to its anchor, with what it learnt on the way, or some of the way there."""
        parameter = self._parameter(name)
        there = self.anchors[name].to(parameter.device)
        if carried is not None:
            there = carried.add_(there)
        parameter.copy_(there if blend == 0 else torch.lerp(there, parameter.to(there.dtype), blend))

    def _note(self, exchange: FragmentExchange) -> None:
        if self._inspector.watching:
            means = squared_norm(pending.exchange.result.mean for pending in exchange.buckets)
            squares, rank = exchange.heartbeat.result.own_squares, self._group.rank
            self._inspector.syncs.append(sync_of_deltas(exchange.launched, squares, rank, means))
        if self._deltas.blend == 0 and not (self._deltas.carry and self._deltas.delay):
            self._clean.add(exchange.fragment)

    def _skip(self, fragment: int, problem: str, step: int) -> None:
        """The sync moves nothing: all replicas go back to the anchor."""
        names = self.fragments[fragment]
        self.skipped += 1
        self._on_reset(names)
        for name in names:
            self._parameter(name).copy_(self.anchors[name])
        self._clean.add(fragment)
        warnings.warn(
            f"the sync of step {step} is skipped: {problem}; all replicas go back to where they were after the last one",
            stacklevel=2,
        )

    def _progress(self, pending: PendingBucket) -> dict[str, Tensor]:
        """With `carry`, how far parameters have come since their deltas left."""
        if not self._deltas.carry or pending.delta is None:
            return {}
        moved = unflatten(pending.delta, pending.bucket.views)  # anchor - x then, and the anchor is still the same one
        for name, step in zip(pending.bucket.names, moved, strict=True):
            step.sub_(self.anchors[name].to(step.device)).add_(self._parameter(name))
        return dict(zip(pending.bucket.names, moved, strict=True))

    def _parameter(self, name: str) -> Tensor:
        """Looked up at each use: `model.to()` gives a parameter another storage."""
        return local(self._given[name])

    def _delta(self, name: str) -> Tensor:
        return self.anchors[name] - self._parameter(name).to(self.anchors[name].device)

    # Buckets

    def _filled(self, fragment: int, step: int) -> Iterable[Bucket]:
        number = self._exchanges[fragment]
        self._exchanges[fragment] += 1
        for names in self._buckets[fragment]:
            bucket = self._bucket(names, step, number)
            for name, view in zip(names, bucket.views, strict=True):
                torch.sub(self.anchors[name].to(view.device), self._parameter(name), out=view)
            yield bucket

    def _bucket(self, names: Sequence[str], step: int, number: int) -> Bucket:
        like = [self.anchors[name] for name in names]
        device = self._parameter(names[0]).device
        flat = torch.empty(sum(anchor.numel() for anchor in like), dtype=like[0].dtype, device=device)
        slots = [self.memory[name] for name in names]
        rank, world = self._group.rank, self._group.world
        return Bucket(flat, unflatten(flat, like), names, slots, rank, world, step, number, fused=self._fused)

    # State

    def state(self) -> dict[str, Any]:
        """Plain data, by parameter name."""
        return {
            **self.anchors.state(),
            "memory": {name: dict(slot) for name, slot in self.memory.items() if slot},
            "exchanges": list(self._exchanges),
            "norms": [norms.norms for norms in self._norms],
            "skipped": self.skipped,
            "clean": sorted(self._clean),
            "outstanding": [exchange.state() for exchange in self._outstanding],
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on where `state` was taken: what was outstanding is sent again, by all ranks together."""
        self.anchors.load(state)
        for name, slot in self.memory.items():
            device = self._parameter(name).device
            slot.clear()
            slot.update({key: value.to(device, copy=True) for key, value in state["memory"].get(name, {}).items()})
        self._exchanges, self._clean, self._outstanding = list(state["exchanges"]), set(state["clean"]), []
        self._norms = [Norms(self._deltas.outlier, norms) for norms in state["norms"]]
        self.skipped = state["skipped"]
        for entry in state["outstanding"]:
            fragment, launched, filled = entry["fragment"], entry["launched"], []
            for names in self._buckets[fragment]:
                bucket = self._bucket(names, launched, self._exchanges[fragment] - 1)
                for name, view in zip(names, bucket.views, strict=True):
                    view.copy_(entry["deltas"][name])
                filled.append(bucket)
            exchange = self._launch(fragment, launched, filled)
            exchange.pipeline.advance(step - launched, self._deltas.delay)
            self._outstanding.append(exchange)
