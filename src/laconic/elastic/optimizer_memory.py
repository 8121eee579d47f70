"""What the optimizers remember of parameters, such as Adam's moments: a worker that joins gets it from a peer.

Without it, Adam would begin anew in the middle of a run, where the learning rate is high: its first steps are of full length
in every number, whatever the gradient.
"""

import inspect
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.flat_tensors import local
from laconic.elastic.facts import is_number
from laconic.elastic.healing import DTYPES, HealingError, Looks, name_of
from laconic.elastic.island import Island
from laconic.local.trial_step import memory_after_a_step

log = logging.getLogger("laconic.elastic")
UNKNOWN = Looks((), None)
KIND = "moment"  # in the names of a state's tensors: moment/number of the optimizer/parameter/key


class OptimizerMemory:
    """What some optimizers keep of named parameters, by `place`: "number of the optimizer/parameter/key".

    What a peer sends is held against what an optimizer like this worker's keeps after one step on zeros. An optimizer is left
    out, and its memory stays this worker's own, if no other one can be built by its settings, or if it keeps what can't be
    sent: sparse tensors, or dtypes that are not in `DTYPES`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
        self._optimizers, self._parameters = optimizers, parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._groups = {
            (number, names[id(parameter)]): place
            for number, optimizer in enumerate(optimizers)
            for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in names
        }
        self._unknown: set[int] = set()  # optimizers that are left out
        self._looks: dict[object, dict[str, Looks | None]] = {}  # by the kind of parameter; None: a number, and no tensor

    def facts(self) -> list[str]:
        """What all workers must have alike: which parameters have what kept of them."""
        found: dict[str, list[str]] = {}
        for number, name in self._groups:
            keys = ", ".join(f"{key} ({_kind(looks)})" for key, looks in sorted(self.keys(number, name).items())) or "nothing"
            found.setdefault(f"optimizer {number}, {type(self._optimizers[number]).__name__}, keeps {keys}", []).append(name)
        return [f"{what} of {', '.join(names)}" for what, names in found.items()]

    # What this worker has

    def held(self, names: Iterable[str]) -> tuple[dict[str, Tensor], list[list[Any]]]:
        """Tensors, and [place, number], of these parameters; nothing of one whose memory is not finite, or unlike others'."""
        tensors: dict[str, Tensor] = {}
        numbers: list[list[Any]] = []
        wanted = set(names)
        for number, name in self._groups:
            memory = self._optimizers[number].state.get(self._parameters[name], {}) if name in wanted else {}
            looks = self.keys(number, name)
            mine = {key: memory.get(key) for key in looks}
            parts = {key: local(value) for key, value in mine.items() if isinstance(value, Tensor)}
            if not all(_is_like(mine[key], looks[key]) for key in looks):
                continue
            tensors |= {f"{number}/{name}/{key}": part for key, part in parts.items()}
            numbers += [[f"{number}/{name}/{key}", value] for key, value in mine.items() if not isinstance(value, Tensor)]
        return tensors, numbers

    # What a peer sends

    def looks(self, place: str) -> Looks | None:
        """What a tensor of that place must look like; None: there is none."""
        number, name, key = _split(place)
        return self.keys(number, name).get(key)

    def check(self, tensors: Iterable[str], numbers: object, who: str) -> None:
        """Of each parameter, all that its optimizer keeps, or nothing; `tensors` are places that `looks` knows."""
        there: dict[tuple[int, str], set[str]] = {}
        for place in [*tensors, *self._checked(numbers, who)]:
            number, name, key = _split(place)
            there.setdefault((number, name), set()).add(key)
        for (number, name), keys in there.items():
            lacking = sorted(set(self.keys(number, name)) - keys)
            if lacking:
                raise HealingError(f"{who} sent moments of {name} that lack {lacking[0]}; nothing of them is taken")

    def _checked(self, numbers: object, who: str) -> list[str]:
        """The places of what is a number and no tensor."""
        places: list[str] = []
        for entry in numbers if isinstance(numbers, list) else [numbers]:
            place, value = entry if isinstance(entry, list) and len(entry) == 2 else ("", None)
            number, name, key = _split(str(place))
            if self.keys(number, name).get(key, UNKNOWN) is not None or not is_number(value):
                raise HealingError(
                    f"{who} sent {entry!r:.60} as part of an optimizer's memory, where a place that this worker knows and a "
                    "finite number belong; nothing of it is taken"
                )
            places.append(str(place))
        return places

    def load(self, tensors: Mapping[str, Tensor], numbers: Sequence[Sequence[Any]]) -> None:
        """Go on from this, which has been checked; of parameters that it says nothing of, nothing is remembered."""
        given: dict[tuple[int, str], dict[str, Any]] = {}
        for place, value in [*tensors.items(), *numbers]:
            number, name, key = _split(place)
            given.setdefault((number, name), {})[key] = value
        for (number, name), values in given.items():
            memory = self._after_a_step(number, name)
            for key, value in values.items():
                if isinstance(value, Tensor):
                    local(memory[key]).copy_(value)
                else:
                    memory[key] = type(memory[key])(value)
            self._optimizers[number].state[self._parameters[name]] = memory

    def forget(self, names: Iterable[str]) -> None:
        """Nothing is remembered of these."""
        wanted = set(names)
        for number, name in self._groups:
            if name in wanted and number not in self._unknown:
                self._optimizers[number].state.pop(self._parameters[name], None)

    def spread(self, island: Island, dealt: Sequence[Sequence[str]]) -> None:
        """Each rank of an island has that of some parameters: the others get it, too; all of them together."""
        mine, numbers = self.held(dealt[island.rank])
        mine = {place: tensor.contiguous() for place, tensor in mine.items()}  # pieces are cut in the order of memory
        kept = {_split(place)[1] for place in [*mine, *(place for place, _ in numbers)]}
        self.forget(name for name in dealt[island.rank] if name not in kept)
        looks = {place: [name_of(tensor.dtype), list(tensor.shape)] for place, tensor in mine.items()}
        told = [json.loads(text) for text in island.texts(json.dumps([looks, numbers]))]
        parts = [{place: torch.empty(shape, dtype=DTYPES[kind]) for place, (kind, shape) in looks.items()} for looks, _ in told]
        parts[island.rank] = mine
        island.spread(parts)
        for rank, (part, (_, others)) in enumerate(zip(parts, told, strict=True)):
            if rank != island.rank:
                self.forget(dealt[rank])
                self.load(part, others)

    # What an optimizer keeps

    def keys(self, number: int, name: str) -> dict[str, Looks | None]:
        """What this optimizer keeps of this parameter: what tensors look like, and None for numbers."""
        group = self._groups.get((number, name))
        if group is None or number in self._unknown:
            return {}
        # Not by the shard's shape, which differs among ranks: a trial may communicate, so all of them make it, or none.
        parameter = self._parameters[name]
        kind = (number, group, parameter.shape, parameter.dtype, str(getattr(parameter, "placements", "")))
        if kind not in self._looks:
            try:
                self._looks[kind] = _looks_of(self._after_a_step(number, name))
            except Exception as error:  # an optimizer of a user's may raise anything, and the others train on
                self._unknown.add(number)
                which = type(self._optimizers[number]).__name__
                log.warning("what %s remembers can't be handed over, as a trial of another one says: %s", which, error)
                return {}
        return self._looks[kind]

    def _after_a_step(self, number: int, name: str) -> dict[str, Any]:
        optimizer = self._optimizers[number]
        group = optimizer.param_groups[self._groups[number, name]]
        known = inspect.signature(type(optimizer)).parameters
        settings = {key: value for key, value in group.items() if key in known and key != "params"}
        return memory_after_a_step(
            lambda trial: type(optimizer)([{**group, "params": [trial]}], **settings), self._parameters[name].detach()
        )


def _looks_of(memory: Mapping[str, Any]) -> dict[str, Looks | None]:
    """What its tensors look like, and None for numbers."""
    looks: dict[str, Looks | None] = {}
    for key, value in memory.items():
        if isinstance(value, Tensor):
            part = local(value)
            if part.dtype not in DTYPES.values() or part.layout != torch.strided:
                raise ValueError(f"{key} is a tensor of {part.dtype} and layout {part.layout}, which can't be sent")
            looks[key] = Looks((part.dtype,), list(part.shape))
        elif isinstance(value, int | float):
            looks[key] = None
    return looks


def _is_like(value: object, looks: Looks | None) -> bool:
    """Whether it can be sent as that."""
    if looks is None:
        return is_number(value)
    if not isinstance(value, Tensor):
        return False
    part = local(value)
    return part.dtype in looks.dtypes and list(part.shape) == looks.shape and bool(part.isfinite().all())


def _kind(looks: Looks | None) -> str:
    return "a number" if looks is None else name_of(looks.dtypes[0])


def _split(place: str) -> tuple[int, str, str]:
    """Number of the optimizer, parameter and key; parameters may have any name, with strokes, too."""
    number, _, rest = place.partition("/")
    name, _, key = rest.rpartition("/")
    return int(number) if number.isdecimal() and len(number) < 10 else -1, name, key
