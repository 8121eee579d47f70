"""Whether replicas are equal, by a few bytes a parameter."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Rounds, complete
from laconic.comm.flat_tensors import local
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger


class ReplicaError(RuntimeError):
    """What must be the same on all ranks is not.

    `laconic.check_replicas` raises it on every rank, also where `attach(..., check_every=)` calls it. Its text names the first
    tensor that differs and the ranks in the minority. Go on from a checkpoint that was saved before.

    >>> import laconic
    >>> try:  # doctest: +SKIP
    ...     laconic.check_replicas(run)  # after rank 1 alone has written to a weight
    ... except laconic.ReplicaError as error:
    ...     print(error)
    after 3 steps, weight is not the same on rank 1 as on rank 0
    """


def compare(tensors: Mapping[str, Tensor], group: TorchGroup, ledger: Ledger, device: torch.device, step: int) -> None:
    """Raise on every rank if these tensors are not the same bits on all of them; the first that differs is named.

    Maths: for each tensor two sums of its 32-bit words, one plain, one weighted by position, modulo 2^64.
    Bytes: (N-1) * 16 a tensor.
    """
    names = list(tensors)
    digests = [digest(tensors[name]).to(device) for name in names]
    rows = complete(_gather(torch.stack(digests) if digests else torch.zeros(0, 2, dtype=torch.int64)), group, ledger)
    for place, name in enumerate(names):
        votes = Counter(tuple(row) for row in rows[:, place].tolist())
        usual = max(votes, key=lambda bits: votes[bits])  # of as many on both sides, the first rank's
        odd = [rank for rank, row in zip(group.names, rows[:, place].tolist(), strict=True) if tuple(row) != usual]
        if odd:
            others = int((rows != rows[0]).any(2).any(0).sum()) - 1
            most = next(rank for rank in group.names if rank not in odd)
            raise ReplicaError(
                f"after {step} steps, {name} is not the same on {', '.join(odd)} as on {most}"
                + (f"; neither are {others} others" if others else "")
            )


def _gather(digests: Tensor) -> Rounds[Tensor]:
    return (yield AllGather(digests)).cpu()


def digest(tensor: Tensor) -> Tensor:
    """Two 64-bit numbers that equal bits have in common; worked out on the tensor's own device."""
    flat = local(tensor).contiguous().view(-1)
    data = flat.view(torch.uint8)
    words = (
        torch.cat([data, data.new_zeros(-data.numel() % 4)]).view(torch.int32) if data.numel() % 4 else data.view(torch.int32)
    )
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), 1 << 20):
        piece = words[start : start + (1 << 20)].long()
        weights = torch.arange(start + 1, start + 1 + piece.numel(), device=piece.device)
        total += torch.stack([piece.sum(), (piece * weights).sum()])
    return total
