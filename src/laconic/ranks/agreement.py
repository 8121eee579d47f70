"""Agreement: ranks compare what they were given, so that a difference is an error that names it, and not a job that hangs."""

import hashlib
from collections.abc import Sequence
from uuid import uuid4

import torch

from laconic.comm.collectives import AllGather
from laconic.comm.exchange import Rounds, complete
from laconic.comm.group import TorchGroup
from laconic.comm.ledger import Ledger

REFUSED, FAILED = "refused", "failed"  # how a rank came to an agreement that has nothing to agree on


class PeerError(RuntimeError):
    """Another rank could not do its part, by no fault of what anybody was given: it can't read a file, or has no compiler.

    All ranks that could do theirs raise it, and its text has each rank that failed, with its error. That rank raises the error
    itself. (What a rank was given and can't use is a ValueError on all ranks instead.)

    >>> import laconic
    >>> try:  # doctest: +SKIP
    ...     run = laconic.attach(model, optimizer, "int8()", fused=True)
    ... except laconic.PeerError as error:
    ...     print(error)
    other ranks failed:
      rank 1: CompilerError: fused=True compiles with a C++ compiler, and there is no g++ or clang++; install one, or ...
    """


def gather_texts(text: str, device: torch.device) -> Rounds[list[str]]:
    """Every rank's text."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = (yield AllGather(torch.tensor([len(data)], device=device))).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    rows = yield AllGather(padded)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def agree(facts: Sequence[str], problem: Exception | None, group: TorchGroup, device: torch.device) -> str:
    """Compare `facts` over the ranks; returns an id for this agreement, the same on all of them.

    Where they differ, or where a rank came with a `problem` of its own, every rank raises. Only a digest travels, unless
    there is something to explain.
    """
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    status = digest if problem is None else REFUSED if isinstance(problem, TypeError | ValueError) else FAILED
    rows = complete(gather_texts(f"{uuid4().hex} {status}", device), group, Ledger())
    identity, statuses = rows[0].split()[0], [row.split()[1] for row in rows]
    if len(set(statuses)) == 1 and problem is None:
        return identity
    report = f"{type(problem).__name__}: {problem}" if problem else "\n".join(facts)
    reports = complete(gather_texts(report, device), group, Ledger())
    if problem is not None:
        raise problem
    bad = [f"{group.names[rank]}: {reports[rank]}" for rank, one in enumerate(statuses) if one in (REFUSED, FAILED)]
    if FAILED in statuses:  # a disk that is full, say: nothing that anybody was given is wrong
        raise PeerError("other ranks failed:\n  " + "\n  ".join(bad))
    if bad:
        raise ValueError("other ranks have something that can't be used:\n  " + "\n  ".join(bad))
    raise ValueError("the ranks were given different things:\n  " + "\n  ".join(differences(reports, group.names)))


def agree_apart(facts: Sequence[str], group: TorchGroup, everyone: TorchGroup, device: torch.device) -> None:
    """Compare `facts` within each of several groups; where they differ in one, all ranks of all groups raise."""
    problem: Exception | None = None
    try:
        agree(facts, None, group, device)
    except ValueError as error:
        problem = error
    agree([], problem, everyone, device)


def differences(reports: Sequence[str], names: Sequence[str]) -> list[str]:
    """One line for each rank whose facts are not the first one's: the first fact that differs."""
    first = reports[0].split("\n")
    lines: list[str] = []
    for rank, report in enumerate(reports):
        mine = report.split("\n")
        pairs = zip([*first, *["nothing"] * len(mine)], [*mine, *["nothing"] * len(first)], strict=False)
        unlike = next(((a, b) for a, b in pairs if a != b), None)
        if unlike is not None:
            lines.append(f"{names[rank]} has {unlike[1]}, {names[0]} has {unlike[0]}")
    return lines


def alike(text: str, device: torch.device) -> Rounds[bool]:
    """Whether all ranks have the same text."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    rows = (yield AllGather(torch.tensor([digest], device=device))).flatten().tolist()
    return len(set(rows)) == 1
