"""What a worker that joins, or has missed a sync, gets from one that has not: plain numbers, checked before they are written.

Two messages from one worker to another, through the process group that all of them have just built: a description as JSON, and
the tensors one behind the other. Nothing is unpickled, and no port is opened for it. (torchft's own transports send a pickle,
by HTTP from all interfaces or through the process group.)
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.group import CommunicationError
from laconic.elastic.group import ElasticGroup

TAG = 0x1AC1  # of these messages
MOST_BYTES = 1 << 26  # of a description: a longer one is none
MOST_NUMBERS = 1 << 28  # of a tensor whose shape this worker doesn't know: a reducer's own
CHUNK_BYTES = 1 << 24
FORM = "laconic elastic 1"

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip


class Looks(NamedTuple):
    """What a tensor must look like."""

    dtypes: Sequence[torch.dtype]
    shape: list[int] | None  # None: any
    infinite: bool = False  # whether it may have infinities: a mask is often made of them


class HealingError(CommunicationError):
    """What a peer sent is not what this worker can go on from; nothing of it has been written."""


@dataclass(frozen=True)
class State:
    """Where a run is: plain data, and tensors by name."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    who: str = "this worker"


def send(state: State, group: ElasticGroup, to: Sequence[int]) -> None:
    """Send it to these workers, to all of them at the same time."""
    if not to:
        return
    tensors = {name: tensor.detach() for name, tensor in state.tensors.items()}
    looks = {name: [name_of(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    text = json.dumps({"form": FORM, "facts": state.facts, "tensors": looks}).encode()
    _send(torch.tensor([len(text)]), group, to)
    _send(torch.frombuffer(bytearray(text), dtype=torch.uint8), group, to)
    for tensor in tensors.values():
        _send(tensor.contiguous().view(-1).view(torch.uint8), group, to)


def receive(group: ElasticGroup, source: int, looks_of: Callable[[str], Looks | None]) -> State:
    """What `source` sends; `looks_of` says what a tensor of a name may look like, and None of one that nobody knows."""
    who = group.names[source]
    length = int(_get(torch.zeros(1, dtype=torch.int64), group, source))
    if not 0 < length <= MOST_BYTES:
        raise HealingError(f"{who} sent a description of {length} bytes; at most {MOST_BYTES} are taken")
    described = _described(bytes(_get(torch.empty(length, dtype=torch.uint8), group, source).tolist()), who)
    looks = _checked(described, looks_of, who)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape, _) in looks.items()}
    for tensor in tensors.values():
        _get(tensor.view(-1).view(torch.uint8), group, source)
    floats = {name: one for name, one in tensors.items() if one.is_floating_point() or one.is_complex()}
    broken = [name for name, tensor in floats.items() if not _is_sound(tensor, infinite=looks[name][2])]
    if broken:
        raise HealingError(f"{who} sent numbers that are not finite, in {', '.join(broken[:3])}; nothing is taken")
    return State(described.get("facts", {}), tensors, who)


def _described(text: bytes, who: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HealingError(f"{who} sent a description that is no JSON, or one nested too deep: {error}") from error
    if not isinstance(found, dict) or found.get("form") != FORM or not isinstance(found.get("tensors"), dict):
        raise HealingError(f"{who} sent a description of another form than {FORM!r}; all workers must run the same laconic")
    return found


def _checked(
    described: Mapping[str, Any], looks_of: Callable[[str], Looks | None], who: str
) -> dict[str, tuple[torch.dtype, list[int], bool]]:
    """The dtype and the shape of each tensor, and whether it may have infinities."""
    looks: dict[str, tuple[torch.dtype, list[int], bool]] = {}
    for name, look in described["tensors"].items():
        wanted = looks_of(name)
        if wanted is None:
            raise HealingError(f"{who} sent {name!r}, which this worker doesn't have; nothing is taken")
        if not _is_look(look):
            raise HealingError(f"{who} sent {name!r} as {look!r:.60}, where a dtype and a shape belong; nothing is taken")
        kind, shape = look
        fits = math.prod(max(1, size) for size in shape) <= MOST_NUMBERS if wanted.shape is None else shape == wanted.shape
        if DTYPES[kind] not in wanted.dtypes or not fits:
            there = f"at most {MOST_NUMBERS} numbers" if wanted.shape is None else f"shape {wanted.shape}"
            mine = f"{' or '.join(map(name_of, wanted.dtypes))} of {there}"
            raise HealingError(f"{who} sent {name!r} as {kind} of shape {shape}; this worker has it as {mine}")
        looks[name] = DTYPES[kind], shape, wanted.infinite
    return looks


def _is_look(look: object) -> bool:
    """Whether it is a known dtype and a shape."""
    if not isinstance(look, list) or len(look) != 2 or not isinstance(look[1], list):
        return False
    sizes = [size for size in look[1] if isinstance(size, int) and not isinstance(size, bool) and size >= 0]
    return isinstance(look[0], str) and look[0] in DTYPES and len(sizes) == len(look[1])


def _is_sound(tensor: Tensor, *, infinite: bool) -> bool:
    """Whether its numbers are some to go on from."""
    return not bool(tensor.isnan().any()) if infinite else bool(tensor.isfinite().all())


def name_of(dtype: torch.dtype) -> str:
    """As a description has it; DTYPES knows it by that."""
    return str(dtype).removeprefix("torch.")


def _send(flat: Tensor, group: ElasticGroup, to: Sequence[int]) -> None:
    for piece in _pieces(flat):
        part = piece.to(group.device)
        _wait(group, [lambda peer=peer: dist.isend(part, group=group.process_group, group_dst=peer, tag=TAG) for peer in to])  # type: ignore[misc]  # noqa: B023


def _get(flat: Tensor, group: ElasticGroup, source: int) -> Tensor:
    for piece in _pieces(flat):
        part = piece.to(group.device)  # itself, where messages travel from the CPU
        _wait(group, [lambda: dist.irecv(part, group=group.process_group, group_src=source, tag=TAG)])  # noqa: B023
        if part is not piece:
            piece.copy_(part)
    return flat


def _pieces(flat: Tensor) -> list[Tensor]:
    """One after the other: a peer that goes away is noticed at the next one."""
    return [piece for piece in torch.split(flat, max(1, CHUNK_BYTES // flat.itemsize)) if piece.numel()]


def _wait(group: ElasticGroup, launches: Sequence[Callable[[], Any]]) -> None:
    try:
        for work in [launch() for launch in launches]:
            work.wait()
    except RuntimeError as error:
        raise CommunicationError(f"a worker was lost while state was sent among {group.who}: {error}") from error
