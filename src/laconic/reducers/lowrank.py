"""Parameters as matrices, and bases of their columns: what the PowerSGD family has in common."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.comm.bucket import Bucket, Slot
from laconic.kernels.kernel import PIECE, Kernel, Spec
from laconic.reducers.randomness import normal

# Up to this rank, the mean and the error are written in one pass, vector by vector. On 19 MB, one core, one and two vectors
# took 1.0 ms compiled, 2.2 and 4.0 as it is, 1.6 and 4.5 by matrix products and a copy. Four took 1.7, 6.5 and 4.2: too slow
# where nothing can be compiled, and ranks that compile later than others need the same bits.
FEW = 2


class Matrix(NamedTuple):
    """One parameter of a bucket, seen as rows x columns."""

    place: int  # which parameter of the bucket
    start: int
    rows: int
    columns: int
    rank: int


class Split(NamedTuple):
    """Which parameters of a bucket are sent as matrices, and which spans of numbers as they are."""

    matrices: tuple[Matrix, ...]  # same shapes together
    rest: tuple[tuple[int, int], ...]
    tall: int  # numbers in all rank x rows factors
    wide: int
    plain: int  # numbers that are sent as they are
    runs: tuple[int, ...]  # how many matrices of the same shape follow each other


def split(bucket: Bucket, rank: int, min_compression_rate: float) -> Split:
    """Compress where rank * (rows + columns) * min_compression_rate < rows * columns."""
    return split_shapes(tuple(tuple(view.shape) for view in bucket.views), rank, min_compression_rate)


@lru_cache(maxsize=1024)
def split_shapes(shapes: tuple[tuple[int, ...], ...], rank: int, min_compression_rate: float) -> Split:
    """The same for a bucket of parameters of these shapes."""
    chosen: list[Matrix] = []
    rest: list[tuple[int, int]] = []
    start = 0
    for index, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        rows, columns = (shape[0], size // shape[0]) if len(shape) > 1 and size else (0, 0)
        kept = min(rank, rows, columns)
        if kept * (rows + columns) * min_compression_rate < rows * columns:
            chosen.append(Matrix(index, start, rows, columns, kept))
        elif rest and rest[-1][1] == start:
            rest[-1] = (rest[-1][0], start + size)
        else:
            rest.append((start, start + size))
        start += size
    chosen.sort(key=lambda m: (m.rows, m.columns, m.place))
    return Split(
        tuple(chosen),
        tuple(rest),
        sum(m.rows * m.rank for m in chosen),
        sum(m.columns * m.rank for m in chosen),
        sum(stop - begin for begin, stop in rest),
        tuple(len(list(run)) for _, run in groupby(chosen, key=lambda m: (m.rows, m.columns))),
    )


@dataclass(frozen=True)
class Factors:
    """One factor of each matrix of a bucket, rank x side, in one flat tensor.

    In memory a factor lies vector by vector, or across: side x rank, which is what M Q comes out as. Which of the two goes
    into a product is worth a factor of 2 to 8 of its time (ranks 2 to 8, one core).
    """

    parts: Split
    flat: Tensor
    wide: bool  # rank x columns, else rank x rows
    across: bool = False

    def batches(self) -> Iterator[Tensor]:
        """The factors as (matrices, rank, side), one batch for each run of equal shapes."""
        first = start = 0
        for count in self.parts.runs:
            matrix = self.parts.matrices[first]
            side, rank = matrix.columns if self.wide else matrix.rows, matrix.rank
            piece = self.flat[start : start + count * rank * side]
            yield piece.view(count, side, rank).mT if self.across else piece.view(count, rank, side)
            first, start = first + count, start + piece.numel()

    def each(self) -> list[Tensor]:
        """The factors one by one, in the order of the matrices."""
        return [factor for batch in self.batches() for factor in batch.unbind()]

    def basis(self) -> "Factors":
        """Orthonormal vectors that span the same."""
        bases = Factors(self.parts, torch.empty_like(self.flat), self.wide)
        for vectors, basis in zip(self.batches(), bases.batches(), strict=True):
            basis.copy_(orthonormal(vectors))
        return bases


def orthonormal(batch: Tensor) -> Tensor:
    """An orthonormal basis of the rows of each matrix, whatever they are, in fp64.

    By Cholesky of the Gram matrix G of the normalised rows: in fp64 no square of an fp32 number overflows, and fp32's whole
    range of conditions fits. A ridge at the limit of fp32's own rounding keeps it solvable: a row that depends on those
    before it comes out small instead of as noise, zeros stay zeros, and what is not finite stays so.
    """
    rows = batch.double()
    gram = rows @ rows.mT
    norm = gram.diagonal(dim1=1, dim2=2).sqrt().clamp_min(1e-100).unsqueeze(2)
    if batch.shape[1] == 1:
        return rows / norm
    gram = gram / norm / norm.mT
    ridge = 1e-13 * batch.shape[1] + 1e-60
    unit = torch.eye(batch.shape[1], dtype=rows.dtype, device=rows.device)
    lower = torch.linalg.cholesky_ex(gram + ridge * unit).L
    inverse = torch.linalg.solve_triangular(lower, unit.expand_as(gram), upper=False)
    # The ridge shortens a row that was nearly dependent. It gets its length back unless it is mostly rounding.
    length = ((inverse @ gram) * inverse).sum(2, keepdim=True).clamp_min(0).sqrt()
    inverse = torch.where(length > 0.7, inverse / length, inverse)
    return (inverse / norm.mT) @ rows


def warm(
    bucket: Bucket, parts: Split, key: str, wide: bool, seed: int, dtype: torch.dtype = torch.float32, keep: bool = True
) -> Factors:
    """The factors that the last exchange left, or, at first and without warm start, random ones that all ranks draw alike."""
    pieces = []
    for matrix in parts.matrices:
        side = matrix.columns if wide else matrix.rows
        old = bucket.slots[matrix.place].get(key) if keep else None
        if old is None or old.shape != (matrix.rank, side):
            when = 0 if keep else bucket.exchanges
            old = normal((matrix.rank, side), bucket.flat.device, seed, when, key, bucket.names[matrix.place])
        pieces.append(old.reshape(-1).to(bucket.flat.device, dtype))
    return Factors(parts, torch.cat(pieces), wide)


def keep_factors(slots: Sequence[Slot], new: Factors, old: Factors, key: str, good: Tensor) -> None:
    """Remember factors for the next exchange; instead of a vector of zeros, or of anything after a bad step, the old one.

    (A zero vector would stay zero for ever: zero times the next gradient.)
    """
    kept: list[Tensor] = []
    for vectors, before in zip(new.batches(), old.batches(), strict=True):
        kept += torch.where(good & (vectors != 0).any(2, keepdim=True), vectors, before).unbind()
    for matrix, factor in zip(new.parts.matrices, kept, strict=True):
        slots[matrix.place][key] = factor


def matrix_views(flat: Tensor, parts: Split) -> list[Tensor]:
    """The matrices, rows x columns, in the order in which their numbers lie."""
    return [flat[m.start : m.start + m.rows * m.columns].view(m.rows, m.columns) for m in parts.matrices]


def rebuild(whole: Tensor, p: Factors, q: Factors, rest: Tensor) -> None:
    """Every matrix as the product of its factors, and between them what was sent as it is."""
    for matrix, tall, wide in zip(matrix_views(whole, p.parts), p.each(), q.each(), strict=True):
        _write_product(matrix, tall, wide)
    for span, piece in zip(_spans(whole, p.parts), _pieces(rest, p.parts), strict=True):
        span.copy_(piece)


def _write_product(matrix: Tensor, tall: Tensor, wide: Tensor) -> None:
    if len(tall) > FEW:
        torch.mm(tall.T, wide, out=matrix)
        return
    # To the same bits as `end`, which ranks that hold a residual call instead: not all need hold one.
    step = max(1, PIECE // max(1, matrix.shape[1]))
    for rows, columns in zip(torch.split(matrix, step), torch.split(tall.unsqueeze(2), step, dim=1), strict=True):
        torch.mul(columns[0], wide[0], out=rows)
        for column, row in zip(columns[1:], wide[1:], strict=True):
            rows.add_(column * row)


def leave_out(whole: Tensor, p: Factors, q: Factors) -> None:
    """Take the product of the factors away, in place; of what is sent as it is, nothing is left."""
    for matrix, tall, wide in zip(matrix_views(whole, p.parts), p.each(), q.each(), strict=True):
        matrix.addmm_(tall.T, wide, alpha=-1)
    for span in _spans(whole, p.parts):
        span.zero_()


def _ending(rank: int) -> Kernel:
    """Of (matrix, residual, vectors): the residual becomes the matrix without this rank's product, the matrix the mean's."""

    def end(matrix: Tensor, residual: Tensor, *vectors: Tensor) -> None:
        tall, own, mean = vectors[:rank], vectors[rank : 2 * rank], vectors[2 * rank :]
        left, whole = matrix - tall[0].unsqueeze(1) * own[0], tall[0].unsqueeze(1) * mean[0]
        for column, mine, everyones in zip(tall[1:], own[1:], mean[1:], strict=True):
            left = left - column.unsqueeze(1) * mine
            whole = whole + column.unsqueeze(1) * everyones
        residual.copy_(left)
        matrix.copy_(whole)

    numbers, column, row = (Spec(torch.float32, sizes) for sizes in (("rows", "columns"), ("rows",), ("columns",)))
    return Kernel(f"lowrank-end-{rank}", end, numbers, numbers, *[column] * rank, *[row] * (2 * rank))


_ENDINGS = {rank: _ending(rank) for rank in range(1, FEW + 1)}


def endings(rank: int) -> list[Kernel]:
    """The kernels by which exchanges of this rank may end: a small matrix has a lower rank."""
    return [kernel for lower, kernel in _ENDINGS.items() if lower <= rank <= FEW]


def ends_at_once(bucket: Bucket, whole: Tensor, rank: int) -> bool:
    """Whether `end` can be called instead of `leave_out` and `rebuild`."""
    return bucket.residual is not None and whole is bucket.flat and whole.dtype == torch.float32 and rank <= FEW


def end(bucket: Bucket, p: Factors, own: Factors, mean: Factors, rest: Tensor, good: Tensor) -> None:
    """Every matrix becomes the product of p and the mean, and its residual what p and this rank's own factor leave out of it.

    Where not all is good, residuals stay.
    """
    assert bucket.residual is not None
    if not good:
        rebuild(bucket.flat, p, mean, rest)
        return
    matrices = zip(matrix_views(bucket.flat, p.parts), matrix_views(bucket.residual, p.parts), strict=True)
    for (matrix, residual), tall, mine, everyones in zip(matrices, p.each(), own.each(), mean.each(), strict=True):
        vectors = [*tall.unbind(), *mine.unbind(), *everyones.unbind()]
        _ENDINGS[len(tall)](matrix, residual, *vectors, fused=bucket.fused)
    for span in _spans(bucket.residual, p.parts):
        span.zero_()
    for span, piece in zip(_spans(bucket.flat, p.parts), _pieces(rest, p.parts), strict=True):
        span.copy_(piece)


def take_rest(message: Tensor, whole: Tensor, parts: Split) -> None:
    """The numbers that are no matrices, into the message."""
    if parts.rest:
        torch.cat(_spans(whole, parts), out=message)


def _spans(whole: Tensor, parts: Split) -> list[Tensor]:
    return [whole[start:stop] for start, stop in parts.rest]


def _pieces(message: Tensor, parts: Split) -> Sequence[Tensor]:
    return torch.split(message, [stop - start for start, stop in parts.rest]) if parts.rest else ()
