"""Sparse matrices that are stored for blocks of vectors.

The entries of each row are cut into pieces of `width` entries, filled up with zeros. A
table has a row for each piece: the first pieces of all n rows, then the others. With slot s
the entries at place s of all pieces, the product with a block X is

    sum over s of values_s o X[columns_s],    then the other pieces are added to their rows.

One scan over the slots, each of which gathers whole rows of the block. The width is the one
with the least work. The derivative in the entries is a scan, too, that gathers again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int

Places = Int[np.ndarray, " entries"]
_WIDEST = 64


class Pattern:
    """Where a matrix has entries. Equal patterns are equal, so that programs are shared.
    `colourings` are the samplers that were made of it."""

    def __init__(self, rows: Places, columns: Places, n: int) -> None:
        self.rows, self.columns, self.shape = rows, columns, (n, n)
        self.digest = hashlib.blake2b(np.stack([rows, columns]).tobytes()).digest()
        self.colourings: dict[Any, Any] = {}

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.digest == other.digest


def is_of_jax(matrix: Any) -> bool:
    """Whether it is a BCOO or a BCSR, which take long to import."""
    return type(matrix).__module__.startswith("jax.experimental.sparse")


def places_of(matrix: Any) -> tuple[Places, Places]:
    """The rows and columns of the entries of a concrete matrix, in its order."""
    if is_of_jax(matrix) and not hasattr(matrix, "indptr"):
        rows, columns = np.asarray(matrix.indices).T
    elif is_of_jax(matrix):
        columns, starts = np.asarray(matrix.indices), np.asarray(matrix.indptr)
        rows = np.repeat(np.arange(matrix.shape[0]), np.diff(starts))
    else:
        import scipy.sparse  # noqa: PLC0415

        rows, columns = scipy.sparse.coo_array(matrix).coords
    return rows, columns


class Table(eqx.Module):
    """By slot and piece, columns and places in the data, one behind them for a zero;
    `others` are the rows of the pieces after the first n."""

    columns: Int[Any, "w pieces"]
    places: Int[Any, "w pieces"]
    others: Int[Any, " others"]


def table(rows: Places, columns: Places, n: int) -> Table:
    order = np.lexsort((columns, rows))
    rows, columns, counts = rows[order], columns[order], np.bincount(rows, minlength=n)
    widths = np.arange(1, min(max(counts.max(initial=1), 1), _WIDEST) + 1)
    pieces = np.stack([np.maximum(-(-counts // width), 1) for width in widths])
    total = pieces.sum(axis=1)
    best = np.argmin(widths * total + 12 * (total - n))  # adding a piece takes longer
    width, pieces, total = widths[best], pieces[best], total[best]
    within = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    piece, slot = within // width, within % width
    first_other = n + np.cumsum(pieces - 1) - (pieces - 1)
    piece = np.where(piece == 0, rows, first_other[rows] + piece - 1)
    others = np.repeat(np.arange(n), pieces - 1)
    own = np.concatenate([np.arange(n), others])
    filled = np.tile(own, (width, 1)), np.full((width, total), rows.size)
    for part, entries in zip(filled, (columns, order), strict=True):
        part[slot, piece] = entries
    return Table(*(jnp.asarray(part, jnp.int32) for part in (*filled, others)))


class SparseOperator(lx.AbstractLinearOperator):
    """A square sparse matrix. `data` are its entries in the order of `pattern`;
    `transposed` is None if it is tagged symmetric."""

    data: Inexact[Array, " entries"]
    rows: Table
    transposed: Table | None
    pattern: Pattern = eqx.field(static=True)
    tags: frozenset[object] = eqx.field(static=True)

    def times(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        n, (columns, places) = block.shape[0], (self.rows.columns, self.rows.places)
        values = jnp.append(self.data, jnp.zeros((), self.data.dtype))[places]

        @jax.checkpoint
        def add(total: Array, slot: tuple[Array, Array]) -> tuple[Array, None]:
            entries, columns = slot
            # The transpose of a product sums rows faster than that of a broadcast. Full
            # precision, or a GPU would round the entries to 10 bits.
            spread = jnp.matmul(entries[:, None], ones, precision=jax.lax.Precision.HIGHEST)
            return total + spread * block[columns], None

        ones = jnp.ones((1, block.shape[1]), block.dtype)
        start = jnp.zeros((places.shape[1], block.shape[1]), self.data.dtype)
        total, _ = jax.lax.scan(add, start, (values, columns))
        return total[:n].at[self.rows.others].add(total[n:])

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return self.times(vector.astype(self.data.dtype)[:, None])[:, 0]

    def as_matrix(self) -> Inexact[Array, "n n"]:
        empty = jnp.zeros(self.pattern.shape, self.data.dtype)
        return empty.at[self.pattern.rows, self.pattern.columns].add(self.data)

    def transpose(self) -> SparseOperator:
        if self.transposed is None:
            return self
        pattern = self.pattern
        turned = Pattern(pattern.columns, pattern.rows, pattern.shape[0])
        return SparseOperator(self.data, self.transposed, self.rows, turned, self.tags)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.pattern.shape[:1], self.data.dtype)

    out_structure = in_structure

    def diagonal(self) -> Inexact[Array, " n"]:
        own = np.flatnonzero(self.pattern.rows == self.pattern.columns)
        empty = jnp.zeros(self.pattern.shape[0], self.data.dtype)
        return empty.at[self.pattern.rows[own]].add(self.data[own])


_QUESTIONS = {
    lx.is_symmetric: lx.symmetric_tag,
    lx.is_diagonal: lx.diagonal_tag,
    lx.is_tridiagonal: lx.tridiagonal_tag,
    lx.is_lower_triangular: lx.lower_triangular_tag,
    lx.is_upper_triangular: lx.upper_triangular_tag,
    lx.is_positive_semidefinite: lx.positive_semidefinite_tag,
    lx.is_negative_semidefinite: lx.negative_semidefinite_tag,
    lx.has_unit_diagonal: lx.unit_diagonal_tag,
}


def answer(kind: type, tags: Callable[[Any], Collection[object]]) -> None:
    """Let what lineax asks of operators of a class be answered by the tags that it has."""
    for question, tag in _QUESTIONS.items():
        question.register(kind, lambda operator, tag=tag: tag in tags(operator))


answer(SparseOperator, lambda operator: operator.tags)


@lx.conj.register(SparseOperator)
def _conj(operator: SparseOperator) -> SparseOperator:
    return eqx.tree_at(lambda op: op.data, operator, operator.data.conj())


lx.linearise.register(SparseOperator)(lambda operator: operator)
lx.diagonal.register(SparseOperator)(SparseOperator.diagonal)


@lx.materialise.register(SparseOperator)
def _materialise(operator: SparseOperator) -> lx.MatrixLinearOperator:
    return lx.MatrixLinearOperator(operator.as_matrix(), operator.tags)


@lx.tridiagonal.register(SparseOperator)
def _tridiagonal(operator: SparseOperator) -> tuple[Array, Array, Array]:
    return lx.tridiagonal(lx.materialise(operator))


def own_pattern(operator: Any) -> Pattern | None:
    """That of a sparse matrix, scaled, tagged, or plus a diagonal."""
    if isinstance(operator, lx.AddLinearOperator):
        parts = operator.operator1, operator.operator2
        found = [own_pattern(part) for part in parts if not lx.is_diagonal(part)]
        return found[0] if len(found) == 1 else None
    if isinstance(inner := getattr(operator, "operator", None), lx.AbstractLinearOperator):
        return own_pattern(inner)
    return operator.pattern if isinstance(operator, SparseOperator) else None
