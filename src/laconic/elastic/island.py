"""An island: the ranks of one worker, which hold one replica together and take every decision together.

A worker of one process is an island of one rank, which has nobody to ask. In an island of several, each rank averages its own
part of the replica with the ranks of the same place in other islands: its shard where the model is sharded, and some of the
parameters where each rank has the whole model. So no number leaves an island twice.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._torch.process_groups import control_device
from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Rounds, complete
from laconic.comm.flat_tensors import local, stored
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger
from laconic.ranks.agreement import gather_texts

CHUNK_BYTES = 4 << 20
ALIGNED = 16  # bytes: where a rank's row begins, numbers of any dtype may


class Island:
    """The ranks of one worker; `group` is None where there is one alone."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        alone = process_group is None or process_group.size() == 1
        self.group = None if alone or process_group is None else TorchGroup(process_group)
        self.rank, self.size = (0, 1) if self.group is None else (self.group.rank, self.group.world)
        self.device = torch.device("cpu") if self.group is None else control_device(self.group.process_group)

    def first(self, text: str) -> str:
        """The first rank's text."""
        return self.texts(text)[0]

    def texts(self, text: str) -> list[str]:
        """Every rank's text."""
        return [text] if self.group is None else complete(gather_texts(text, self.device), self.group, Ledger())

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of these over all ranks of the island."""
        if self.group is None:
            return list(numbers)
        rows = complete(_gather(torch.tensor(numbers, dtype=torch.float64, device=self.device)), self.group, Ledger())
        return list(map(float, rows.sum(0).tolist()))

    def deal(self, sizes: Mapping[str, int]) -> list[list[str]]:
        """Which names each rank has, about as many numbers each: the largest first, to whom has least."""
        dealt: list[list[str]] = [[] for _ in range(self.size)]
        loads = [0] * self.size
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            least = loads.index(min(loads))
            dealt[least].append(name)
            loads[least] += sizes[name]
        order = {name: place for place, name in enumerate(sizes)}
        return [sorted(names, key=order.__getitem__) for names in dealt]

    @torch.no_grad()
    def spread(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Each rank's part, as that rank has it, goes to the others, in place. Bytes, of R ranks: (R-1) / R of all parts."""
        if self.group is None:
            return
        cut = [[piece for tensor in part.values() for piece in _pieces(tensor)] for part in parts]
        for place in range(max(map(len, cut))):
            pieces = [pieces[place] if place < len(pieces) else None for pieces in cut]
            longest = max(piece.nbytes for piece in pieces if piece is not None)
            longest = -(-longest // ALIGNED) * ALIGNED
            room = torch.zeros(longest, dtype=torch.uint8, device=self.device)
            mine = pieces[self.rank]
            if mine is not None:
                room[: mine.nbytes] = mine.contiguous().view(torch.uint8)
            rows = complete(_gather(room), self.group, Ledger())
            for rank, piece in enumerate(pieces):
                if piece is not None and rank != self.rank:
                    piece.copy_(rows[rank][: piece.nbytes].view(piece.dtype))


def _pieces(tensor: Tensor) -> list[Tensor]:
    """A tensor's numbers as flat views of limited size."""
    part = local(tensor)
    flat = stored(torch.view_as_real(part) if part.is_complex() else part)
    assert flat is not None, "attach has checked that parameters have no gaps"
    return [piece for piece in torch.split(flat, max(1, CHUNK_BYTES // flat.itemsize)) if piece.numel()]


def _gather(mine: Tensor) -> Rounds[Tensor]:
    rows: Tensor = yield AllGather(mine)
    return rows
