"""Parameters as matrices, and bases of their columns: what the PowerSGD family has in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.bucket import Bucket, Slot
from laconic.reducers.randomness import normal


class Matrix(NamedTuple):
    """One parameter of a bucket, seen as rows x columns, and its factors' place among those of all matrices."""

    place: int  # which parameter of the bucket
    start: int
    rows: int
    columns: int
    rank: int
    tall: int  # where its rank x rows factor starts
    wide: int  # where its rank x columns factor starts


class Split(NamedTuple):
    """Which parameters of a bucket are sent as matrices, and which spans of numbers as they are."""

    matrices: tuple[Matrix, ...]  # same shapes together
    rest: tuple[tuple[int, int], ...]
    tall: int  # numbers in all rank x rows factors
    wide: int

    @property
    def plain(self) -> int:
        """Numbers that are sent as they are."""
        return sum(stop - start for start, stop in self.rest)


def split(bucket: Bucket, rank: int, min_compression_rate: float) -> Split:
    """Compress where rank * (rows + columns) * min_compression_rate < rows * columns."""
    return _split(tuple(tuple(view.shape) for view in bucket.views), rank, min_compression_rate)


@lru_cache(maxsize=1024)
def _split(shapes: tuple[tuple[int, ...], ...], rank: int, min_compression_rate: float) -> Split:
    chosen: list[tuple[int, int, int, int, int]] = []  # rows, columns, index, start, rank
    rest: list[tuple[int, int]] = []
    start = 0
    for index, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        rows, columns = (shape[0], size // shape[0]) if len(shape) > 1 and size else (0, 0)
        kept = min(rank, rows, columns)
        if kept * (rows + columns) * min_compression_rate < rows * columns:
            chosen.append((rows, columns, index, start, kept))
        elif rest and rest[-1][1] == start:
            rest[-1] = (rest[-1][0], start + size)
        else:
            rest.append((start, start + size))
        start += size
    matrices: list[Matrix] = []
    tall = wide = 0
    for rows, columns, index, begin, kept in sorted(chosen):
        matrices.append(Matrix(index, begin, rows, columns, kept, tall, wide))
        tall, wide = tall + rows * kept, wide + columns * kept
    return Split(tuple(matrices), tuple(rest), tall, wide)


@dataclass(frozen=True)
class Factors:
    """One factor of each matrix of a bucket, in one flat tensor.

    They are kept as rank x side, vectors in rows: with the thin side first, matrix products were 3 to 10 times as fast
    (ranks 2 to 8, one core) as with it last.
    """

    matrices: Sequence[Matrix]
    flat: Tensor
    wide: bool  # rank x columns, else rank x rows

    def of(self, matrix: Matrix) -> Tensor:
        side, start = (matrix.columns, matrix.wide) if self.wide else (matrix.rows, matrix.tall)
        return self.flat[start : start + side * matrix.rank].view(matrix.rank, side)

    def orthonormalise(self) -> None:
        """Every factor's vectors, in batches of equal shapes."""
        done = 0
        while done < len(self.matrices):
            first = self.matrices[done]
            same = [m for m in self.matrices[done:] if (m.rows, m.columns, m.rank) == (first.rows, first.columns, first.rank)]
            one = self.of(first)
            start = first.wide if self.wide else first.tall
            orthonormalise_(self.flat[start : start + len(same) * one.numel()].view(len(same), *one.shape))
            done += len(same)


def orthonormalise_(batch: Tensor) -> Tensor:
    """Replace the rows of each matrix by an orthonormal basis, in place, whatever they are.

    By Cholesky of the Gram matrix, in fp64 and after scaling each row by its largest entry: no square overflows, and fp32's
    whole range of conditions fits. A ridge at the limit of fp32's own rounding keeps it solvable: a row that depends on
    those before it comes out small instead of as noise, zeros stay zeros, and what is not finite stays so.
    """
    if batch.numel() == 0:
        return batch
    rows = batch.double()
    rows = rows / rows.abs().amax(2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    if batch.shape[1] == 1:
        norm = rows.square().sum(2, keepdim=True).sqrt()
        return batch.copy_(rows / norm.clamp_min(1e-30))
    gram = rows @ rows.mT
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += 1e-13 * diagonal.sum(1, keepdim=True) + 1e-60
    lower = torch.linalg.cholesky_ex(gram).L
    basis = torch.linalg.solve_triangular(lower, rows, upper=False)
    # The ridge shortens a row that was nearly dependent. It gets its length back unless it is mostly rounding.
    length = basis.square().sum(2, keepdim=True).sqrt()
    return batch.copy_(torch.where(length > 0.7, basis / length, basis))


def warm(bucket: Bucket, matrices: Sequence[Matrix], key: str, wide: bool, seed: int, keep: bool, size: int) -> Factors:
    """The factors that the last exchange left, or, at first and without warm start, random ones that all ranks draw alike."""
    flat = bucket.flat.new_empty(size, dtype=torch.float32)
    factors = Factors(matrices, flat, wide)
    for matrix in matrices:
        factor, slot = factors.of(matrix), bucket.slots[matrix.place]
        old = slot.get(key) if keep else None
        if old is not None and old.shape == factor.shape:
            factor.copy_(old)
        else:
            when = 0 if keep else bucket.round
            factor.copy_(normal(tuple(factor.shape), flat.device, seed, when, key, bucket.names[matrix.place]))
    return factors


def keep_factors(slots: Sequence[Slot], factors: Factors, key: str, good: Tensor) -> None:
    """Remember factors for the next exchange; a vector of zeros, or anything after a bad step, leaves what was there.

    (A zero vector would stay zero for ever: zero times the next gradient.)
    """
    for matrix in factors.matrices:
        new, slot = factors.of(matrix), slots[matrix.place]
        old = slot.get(key)
        if old is None or old.shape != new.shape:
            old = normal(tuple(new.shape), new.device, 1, key, matrix.place)
        slot[key] = torch.where(good & (new != 0).any(1, keepdim=True), new, old)


def matrix_view(flat: Tensor, matrix: Matrix) -> Tensor:
    """A parameter's numbers as rows x columns, in the order in which they lie."""
    return flat[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def product(out: Tensor, p: Factors, q: Factors) -> None:
    """Every matrix as the product of its factors."""
    for matrix in p.matrices:
        torch.mm(p.of(matrix).T, q.of(matrix), out=matrix_view(out, matrix))


def leave_out(whole: Tensor, p: Factors, q: Factors, parts: Split) -> None:
    """Take the product of the factors away, in place; of what is sent as it is, nothing is left."""
    for matrix in parts.matrices:
        matrix_view(whole, matrix).addmm_(p.of(matrix).T, q.of(matrix), alpha=-1)
    for start, stop in parts.rest:
        whole[start:stop] = 0


def copy_rest(message: Tensor, whole: Tensor, parts: Split, *, into: bool) -> None:
    """The numbers that are no matrices: from `whole` to the message, or back into it."""
    position = 0
    for start, stop in parts.rest:
        piece, span = message[position : position + stop - start], whole[start:stop]
        span.copy_(piece) if into else piece.copy_(span)
        position += stop - start
