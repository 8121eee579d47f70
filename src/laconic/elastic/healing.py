"""What a worker that joins, or has missed a sync, gets from one that has not: plain numbers, checked before they are written.

Two messages from one worker to another, through the process group that all of them have just built: a description as JSON, and
the tensors one behind the other. Nothing is unpickled, and no port is opened for it. (torchft's own transports send a pickle,
by HTTP from all interfaces or through the process group.)
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.group import CommunicationError
from laconic.elastic.group import ElasticGroup

TAG = 0x1AC1  # of these messages
MOST_BYTES = 1 << 26  # of a description: a longer one is none
CHUNK_BYTES = 1 << 24
FORM = "laconic elastic 1"

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip


Looks: TypeAlias = tuple[Sequence[torch.dtype], Sequence[list[int]]]
"""The dtypes and the shapes that a tensor may have."""


class HealingError(CommunicationError):
    """What a peer sent is not what this worker can go on from; nothing of it has been written."""


@dataclass(frozen=True)
class State:
    """Where a run is: plain data, and tensors by name."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def send(state: State, group: ElasticGroup, to: Sequence[int]) -> None:
    """Send it to these workers."""
    tensors = {name: tensor.detach() for name, tensor in state.tensors.items()}
    looks = {name: [_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    text = json.dumps({"form": FORM, "facts": state.facts, "tensors": looks}).encode()
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for peer in to:
        _each(group, lambda part, at=peer: dist.isend(part, group=group.process_group, group_dst=at, tag=TAG), [  # type: ignore[misc]
            torch.tensor([len(head)]), head,
            *(tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel()),
        ])  # fmt: skip


def receive(group: ElasticGroup, source: int, looks_of: Callable[[str], Looks | None]) -> State:
    """What `source` sends; `looks_of` says what a tensor of a name may look like, and None of one that nobody knows."""

    def get(part: Tensor) -> Tensor:
        _each(group, lambda piece: dist.irecv(piece, group=group.process_group, group_src=source, tag=TAG), [part])
        return part

    length = int(get(torch.zeros(1, dtype=torch.int64)))
    if not 0 < length <= MOST_BYTES:
        raise HealingError(f"{group.names[source]} sent a description of {length} bytes; at most {MOST_BYTES} are taken")
    described = _described(bytes(get(torch.empty(length, dtype=torch.uint8)).tolist()), group.names[source])
    looks = _checked(described, looks_of, group.names[source])
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in looks.items()}
    for tensor in tensors.values():
        if tensor.numel():
            get(tensor.view(-1).view(torch.uint8))
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if broken:
        raise HealingError(
            f"{group.names[source]} sent numbers that are not finite, in {', '.join(broken[:3])}; nothing is taken"
        )
    return State(described["facts"], tensors)


def _described(text: bytes, who: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise HealingError(f"{who} sent a description that is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("form") != FORM or not isinstance(found.get("tensors"), dict):
        raise HealingError(f"{who} sent a description of another form than {FORM!r}; all workers must run the same laconic")
    return found


def _checked(
    described: Mapping[str, Any], looks_of: Callable[[str], Looks | None], who: str
) -> dict[str, tuple[torch.dtype, list[int]]]:
    looks: dict[str, tuple[torch.dtype, list[int]]] = {}
    for name, (kind, shape) in described["tensors"].items():
        wanted = looks_of(name)
        if wanted is None:
            raise HealingError(f"{who} sent {name!r}, which this worker doesn't have")
        dtypes, shapes = wanted
        if DTYPES.get(kind) not in dtypes or shape not in shapes:
            mine = f"{' or '.join(map(_name, dtypes))} of shape {' or '.join(map(str, shapes))}"
            raise HealingError(f"{who} sent {name!r} as {kind} of shape {shape}; this worker has it as {mine}")
        looks[name] = DTYPES[kind], shape
    return looks


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _each(group: ElasticGroup, launch: Callable[[Tensor], Any], parts: Sequence[Tensor]) -> None:
    """In pieces, one after the other: a peer that goes away is noticed at the next one."""
    for part in parts:
        step = max(1, CHUNK_BYTES // part.itemsize)
        for start in range(0, len(part), step):
            try:
                launch(part[start : start + step]).wait()
            except RuntimeError as error:
                raise CommunicationError(f"a worker was lost while state was sent: {error}") from error


def norm(tensors: Sequence[Tensor]) -> float:
    """Of all of them together."""
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))
