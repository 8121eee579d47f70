"""Averaging of how far replicas have come from a common anchor, at once or while training goes on."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.agreement import Roll, roll
from laconic.airborne import Airborne, Cargo
from laconic.averaging import WINDOW
from laconic.bucket import Bucket, Slot, local, pack, squared_norm, unflatten
from laconic.composition import Deltas
from laconic.outliers import Norms
from laconic.probe import Probe, sync_of_deltas
from laconic.reducers.base import finite
from laconic.wire import Flight, Ledger, TorchGroup

BUCKET_BYTES = 25 << 20


class DeltaAverager:
    """Sends anchor - parameters by any reducer, and moves the anchor by an outer optimizer's step on the mean.

    Maths, for each fragment: delta = mean of anchor - x as x was at the launch; anchor <- outer(anchor, delta) at the
    landing; x <- blend * x + (1 - blend) * there, where `there` is the anchor or, with `carry`, the anchor + x - x as it was
    at the launch: what a replica learns while its delta is in the air counts in its next one. Anchors of 16-bit parameters
    are kept in fp32.
    Bytes: the reducer's.  Memory: the anchor, what the outer optimizer keeps, and the deltas in the air.

    An exchange in the air holds all that it needs: its i-th of R rounds leaves i * delay / R steps after the first, whatever
    has landed by then, so that all ranks send in the same order. (R is known from a bucket's last exchange; in its first one,
    later rounds leave when it is due to land.) A round in which a delta is not finite on any rank, or out of line with those
    before, moves nothing: all replicas go back to the anchor. Nothing is written before all buckets have landed: a collective
    that fails leaves parameters and anchors as they were.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        fragments: Sequence[Sequence[str]],
        deltas: Deltas,
        group: TorchGroup,
        ledger: Ledger,
        control: Ledger,
        device: torch.device,
        inner: Sequence[tuple[Sequence[str], Callable[[], float]]],
        rates: bool,
        on_reset: Callable[[Sequence[str]], None],
        probe: Probe,
    ) -> None:
        self.fragments = fragments
        self._given = dict(parameters)
        self._deltas, self._group, self._ledger, self._control, self._device = deltas, group, ledger, control, device
        self._probe = probe
        self._on_reset = on_reset  # told the names of parameters that went back to the anchor
        self._rates = [rate for _, rate in inner] if rates else []
        self._memory: dict[str, Slot] = {name: {} for name in parameters}
        self._rounds = [0] * len(fragments)  # exchanges that each fragment has begun
        self._expected: dict[str, int] = {}  # collectives that a bucket took in the last exchange, by its first parameter
        self.skipped = 0  # rounds that moved nothing
        self._norms = [Norms(deltas.outlier) for _ in fragments]
        self._clean: set[int] = set()  # fragments that are known to be the same on all ranks
        self._air: list[Airborne] = []
        self._buckets = [self._pack(names) for names in fragments]
        self.anchors = {name: self._anchor(local(parameter)) for name, parameter in parameters.items()}
        groups = [{"params": [self.anchors[name] for name in names], "rate": 1.0} for names, _ in inner]
        self._outer = deltas.outer.build(groups)

    @property
    def drifted(self) -> bool:
        """Whether replicas may differ."""
        return len(self._clean) < len(self.fragments)

    @property
    def airborne(self) -> bool:
        """Whether an exchange is in the air."""
        return bool(self._air)

    def drift(self) -> None:
        """A local step has been taken."""
        self._clean.clear()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin a round here: replicas are equal, and where they are is the anchor."""
        assert not self._air, "what is in the air has to land first"
        for name, anchor in self.anchors.items():
            anchor.copy_(self._parameter(name))
        self._clean = set(range(len(self.fragments)))

    @torch.no_grad()
    def advance(self, step: int, launches: Iterable[int]) -> list[tuple[int, Roll]]:
        """After `step` completed steps: send on or land what is in the air, launch these fragments. Returns who landed."""
        landed = []
        for airborne in list(self._air):
            if step >= airborne.launched + self._deltas.delay:
                landed.append((airborne.fragment, self._land(airborne)))
            else:
                airborne.send_on(step, self._deltas.delay)
        for fragment in launches:
            if self._deltas.delay:
                self._air.append(self._launch(fragment, step, self._bucketed(fragment, step)))
            else:
                landed.append((fragment, self._exchange(fragment, step)))
        return landed

    @torch.no_grad()
    def land_all(self) -> None:
        """Land everything that is in the air, before its time."""
        for airborne in list(self._air):
            self._land(airborne)

    @torch.no_grad()
    def release(self) -> None:
        """What error feedback still holds goes into the parameters, once, and is forgotten."""
        for name, slot in self._memory.items():
            if "error" in slot:
                self._parameter(name).sub_(slot.pop("error"))

    def abandon(self) -> None:
        """Forget what is in the air."""
        for airborne in self._air:
            for flight in airborne.flights:
                flight.abandon(0)
        self._air = []

    # One exchange

    def _exchange(self, fragment: int, step: int) -> Roll:
        """At once, a few buckets in the air at a time."""
        square = squared_norm(self._delta(name) for name in self.fragments[fragment])
        present = self._call(step, square).complete()
        problem = self._norms[fragment].problem(present.squares)
        if problem is not None:
            self._skip(fragment, problem, step)
            return present
        self._use_rates(present)
        air: list[Cargo] = []
        for bucket in self._bucketed(fragment, step):
            if len(air) >= WINDOW:
                air[-WINDOW].flight.complete()
            air.append(Cargo(bucket, Flight(self._probe.reduce(self._deltas.reducer, bucket), self._group, self._ledger)))
        for cargo in air:
            cargo.flight.complete()
        self._apply_all(fragment, step, present, air)
        return present

    def _launch(self, fragment: int, step: int, buckets: Iterable[Bucket]) -> Airborne:
        buckets = list(buckets)
        present, cargo = self._call(step, squared_norm(bucket.flat for bucket in buckets)), []
        for bucket in buckets:
            delta = bucket.flat.clone()  # as it leaves: what a checkpoint needs to send it again
            flight = Flight(self._probe.reduce(self._deltas.reducer, bucket), self._group, self._ledger)
            cargo.append(Cargo(bucket, flight, delta, self._expected.get(bucket.names[0], 1)))
        return Airborne(fragment, step, present, cargo)

    def _land(self, airborne: Airborne) -> Roll:
        for flight in airborne.flights:
            flight.complete()
        self._air.remove(airborne)
        for cargo in airborne.cargo:
            self._expected[cargo.bucket.names[0]] = cargo.flight.launched
        problem = self._norms[airborne.fragment].problem(airborne.present.result.squares)
        if problem is not None:
            self._skip(airborne.fragment, problem, airborne.launched)
            return airborne.present.result
        self._use_rates(airborne.present.result)
        self._apply_all(airborne.fragment, airborne.launched, airborne.present.result, airborne.cargo)
        return airborne.present.result

    def _apply_all(self, fragment: int, step: int, present: Roll, air: Sequence[Cargo]) -> None:
        means, bad = [], []  # type: list[Tensor], list[str]
        for cargo in air:
            mean, good = self._apply(cargo)
            means.append(mean)
            bad += [] if good else cargo.bucket.names
        if bad:
            self.skipped += 1
            self._on_reset(bad)
            warnings.warn(
                f"a mean delta is not finite although each rank's was (among {bad[0]}, ...); these parameters go back "
                "to where they were after the last exchange",
                stacklevel=2,
            )
        if self._probe.watching:
            self._probe.syncs.append(sync_of_deltas(step, present.squares, self._group.rank, squared_norm(means)))
        if self._deltas.blend == 0 and not (self._deltas.carry and self._deltas.delay):
            self._clean.add(fragment)

    def _skip(self, fragment: int, problem: str, step: int) -> None:
        """The round moves nothing: all replicas go back to the anchor."""
        names = self.fragments[fragment]
        self.skipped += 1
        self._on_reset(names)
        for name in names:
            self._parameter(name).copy_(self.anchors[name])
        self._clean.add(fragment)
        warnings.warn(
            f"the round of step {step} is skipped: {problem}; all replicas go back to where they were after the last one",
            stacklevel=2,
        )

    def _call(self, step: int, square: float) -> Flight[Roll]:
        rates = [rate() for rate in self._rates]
        return Flight(roll(step, square, rates, self._group, self._device), self._group, self._control)

    def _use_rates(self, present: Roll) -> None:
        if present.rates:
            for group, rate in zip(self._outer.param_groups, present.rates, strict=True):
                group["rate"] = rate

    def _apply(self, cargo: Cargo) -> tuple[Tensor, bool]:
        """The mean delta, and whether it could be used."""
        bucket, result, blend = cargo.bucket, cargo.flight.complete(), self._deltas.blend
        good = bool(finite(result.mean) if result.good is None else result.good)
        result.finish()
        anchors = [self.anchors[name] for name in bucket.names]
        carried = self._progress(cargo) if self._deltas.carry and good else None
        if good:
            for anchor, delta in zip(anchors, unflatten(result.mean, anchors), strict=True):
                anchor.grad = delta.to(anchor.device)
            self._outer.step()
            for anchor in anchors:
                anchor.grad = None
        else:
            blend = 0.0
        for index, (name, anchor) in enumerate(zip(bucket.names, anchors, strict=True)):
            parameter = self._parameter(name)
            there = anchor.to(parameter.device) if carried is None else carried[index].add_(anchor.to(parameter.device))
            parameter.copy_(there if blend == 0 else torch.lerp(there, parameter.to(there.dtype), blend))
        return result.mean, good

    def _progress(self, cargo: Cargo) -> list[Tensor] | None:
        """How far this replica has come since the launch, in the place of the delta that left; None: it left just now."""
        if cargo.delta is None:
            return None
        moved = unflatten(cargo.delta, cargo.bucket.views)  # anchor - x at the launch, and the anchor is still the same one
        for name, step in zip(cargo.bucket.names, moved, strict=True):
            step.sub_(self.anchors[name].to(step.device)).add_(self._parameter(name))
        return moved

    def _parameter(self, name: str) -> Tensor:
        """Looked up at each use: `model.to()` gives a parameter another storage."""
        return local(self._given[name])

    def _delta(self, name: str) -> Tensor:
        return self.anchors[name] - self._parameter(name).to(self.anchors[name].device)

    # Buckets

    def _pack(self, names: Sequence[str]) -> list[list[str]]:
        runs = pack([self._parameter(name) for name in names], BUCKET_BYTES)
        return [[names[index] for index in run] for run in runs]

    def _anchor(self, parameter: Tensor) -> Tensor:
        dtype = parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32
        device = torch.device("cpu") if self._deltas.offload else parameter.device
        return parameter.to(device=device, dtype=dtype, copy=True)

    def _bucketed(self, fragment: int, step: int) -> Iterable[Bucket]:
        number = self._rounds[fragment]
        self._rounds[fragment] += 1
        for names in self._buckets[fragment]:
            bucket = self._bucket(names, step, number)
            for name, view in zip(names, bucket.views, strict=True):
                torch.sub(self.anchors[name].to(view.device), self._parameter(name), out=view)
            yield bucket

    def _bucket(self, names: Sequence[str], step: int, number: int) -> Bucket:
        like = [self.anchors[name] for name in names]
        device = self._parameter(names[0]).device
        flat = torch.empty(sum(anchor.numel() for anchor in like), dtype=like[0].dtype, device=device)
        slots = [self._memory[name] for name in names]
        return Bucket(flat, unflatten(flat, like), names, slots, self._group.rank, self._group.world, step, number)

    def replicated(self) -> dict[str, Tensor]:
        """What is the same on all ranks."""
        found = {f"the anchor of {name}": anchor for name, anchor in self.anchors.items()}
        for name, anchor in self.anchors.items():
            memory = self._outer.state.get(anchor, {})
            found |= {f"the outer {key} of {name}": value for key, value in memory.items() if isinstance(value, Tensor)}
        return found

    # State

    def state(self) -> dict[str, Any]:
        """Plain data, by parameter name."""
        return {
            "anchors": dict(self.anchors),
            "outer": {name: dict(self._outer.state.get(anchor, {})) for name, anchor in self.anchors.items()},
            "memory": {name: dict(slot) for name, slot in self._memory.items() if slot},
            "rounds": list(self._rounds),
            "norms": [norms.norms for norms in self._norms],
            "skipped": self.skipped,
            "clean": sorted(self._clean),
            "air": [airborne.state() for airborne in self._air],
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on where `state` was taken: what was in the air is sent again, by all ranks together."""
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
            self._outer.state[anchor] = {
                key: value.to(anchor.device, copy=True) if isinstance(value, Tensor) else value
                for key, value in state["outer"].get(name, {}).items()
            }
            slot, device = self._memory[name], self._parameter(name).device
            slot.clear()
            slot.update({key: value.to(device, copy=True) for key, value in state["memory"].get(name, {}).items()})
        self._rounds, self._clean, self._air = list(state["rounds"]), set(state["clean"]), []
        self._norms = [Norms(self._deltas.outlier, norms) for norms in state["norms"]]
        self.skipped = state["skipped"]
        for entry in state["air"]:
            buckets = []
            for names in self._buckets[entry["fragment"]]:
                bucket = self._bucket(names, entry["launched"], self._rounds[entry["fragment"]] - 1)
                for name, view in zip(names, bucket.views, strict=True):
                    view.copy_(entry["deltas"][name])
                buckets.append(bucket)
            airborne = self._launch(entry["fragment"], entry["launched"], buckets)
            airborne.send_on(step, self._deltas.delay)
            self._air.append(airborne)
