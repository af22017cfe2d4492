"""Sparse matrices that are stored for blocks of vectors.

The entries of each row are cut into pieces of `width` entries, and the last piece of a row
is filled up with zeros. A table has a row for each piece: first come the first pieces of
all n rows, then the others. Slot s holds the entries at place s of all pieces. The product
with a block X is

    sum over s of values_s o X[columns_s],    then the other pieces are added to their rows.

This is one scan over the slots, and each step gathers whole rows of the block. The width is
the one with the least work. The derivative in the entries is another scan, which gathers
the rows of the block again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int

from traceax._core.questions import answer

Places = Int[np.ndarray, " entries"]
_WIDEST = 64


class Pattern:
    """The places where a matrix has entries, in the order of its data.

    Equal patterns have equal hashes, so they share compiled programs and colourings. The
    places are copied because SciPy may sort the matrix that they come from in place.
    """

    def __init__(self, places: Any, n: int) -> None:
        places = np.array(places, np.int32, order="C")
        self.rows, self.columns = places
        self.shape = n, n
        self.digest = n, hashlib.blake2b(places.tobytes()).digest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.digest == other.digest


def is_of_jax(matrix: Any) -> bool:
    """Whether a matrix is a BCOO or a BCSR. Their module takes long to import."""
    return type(matrix).__module__.startswith("jax.experimental.sparse")


def entries_of(matrix: Any) -> tuple[Any, Pattern]:
    """Return the data and the places of a square matrix, in its order.

    The padding of a BCOO or a BCSR has indices behind the last row or column. It is left
    out. The places must be concrete, the data may be traced.
    """
    n: int = np.shape(matrix)[0]
    if not is_of_jax(matrix):
        import scipy.sparse  # noqa: PLC0415

        stored = scipy.sparse.coo_array(matrix)
        if stored.dtype == bool:
            stored.sum_duplicates()  # True and True are 1, not 2
        return stored.data, Pattern(stored.coords, n)
    indices, starts = np.asarray(matrix.indices), getattr(matrix, "indptr", None)
    if starts is not None:
        rows = np.repeat(np.arange(n), np.diff(starts))
        indices = np.stack([rows, indices[: rows.size]], axis=1)
    kept = np.flatnonzero(np.all(indices < n, axis=1))
    data = matrix.data if kept.size == matrix.data.size else matrix.data[kept]
    return data, Pattern(indices[kept].T, n)


class Table(eqx.Module):
    """The column and the place in the data of each entry, as [slot, piece].

    A slot that is filled up points one place behind the data, to a zero. `others` are the
    rows of the pieces after the first n.
    """

    columns: Int[Any, "w pieces"]
    places: Int[Any, "w pieces"]
    others: Int[Any, " others"]


def table(rows: Places, columns: Places, n: int) -> Table:
    """Cut the rows of a matrix into pieces of the best width."""
    order = np.lexsort((columns, rows))
    rows, columns, counts = rows[order], columns[order], np.bincount(rows, minlength=n)
    widths = np.arange(1, min(counts.max(initial=1), _WIDEST) + 1)
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
    filled, places = np.tile(own, (width, 1)), np.full((width, total), rows.size)
    filled[slot, piece], places[slot, piece] = columns, order
    return Table(*(jnp.asarray(part, jnp.int32) for part in (filled, places, others)))


class SparseOperator(lx.AbstractLinearOperator):
    """A square sparse matrix.

    `data` are its entries in the order of `pattern`. `transposed` is None if the matrix is
    tagged symmetric, because then `rows` serves the transpose as well.
    """

    data: Inexact[Array, " entries"]
    rows: Table
    transposed: Table | None
    pattern: Pattern = eqx.field(static=True)
    tags: frozenset[object] = eqx.field(static=True)

    def times(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """Return the product with a block of k vectors."""
        n, places = block.shape[0], self.rows.places
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
        total, _ = jax.lax.scan(add, start, (values, self.rows.columns))
        return total[:n].at[self.rows.others].add(total[n:])

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return self.times(vector.astype(self.data.dtype)[:, None])[:, 0]

    def as_matrix(self) -> Inexact[Array, "n n"]:
        empty = jnp.zeros(self.pattern.shape, self.data.dtype)
        return empty.at[self.pattern.rows, self.pattern.columns].add(self.data)

    def transpose(self) -> SparseOperator:
        if self.transposed is None:
            return self
        turned = Pattern([self.pattern.columns, self.pattern.rows], self.pattern.shape[0])
        tags = lx.transpose_tags(self.tags)
        return SparseOperator(self.data, self.transposed, self.rows, turned, tags)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.pattern.shape[:1], self.data.dtype)

    out_structure = in_structure

    def diagonal(self) -> Inexact[Array, " n"]:
        own = np.flatnonzero(self.pattern.rows == self.pattern.columns)
        empty = jnp.zeros(self.pattern.shape[0], self.data.dtype)
        return empty.at[self.pattern.rows[own]].add(self.data[own])


answer(SparseOperator, lambda operator: operator.tags)


lx.diagonal.register(SparseOperator)(SparseOperator.diagonal)


@lx.conj.register(SparseOperator)
def _conj(operator: SparseOperator) -> SparseOperator:
    return eqx.tree_at(lambda op: op.data, operator, operator.data.conj())


def own_pattern(operator: Any) -> Pattern | None:
    """Return the pattern of a sparse matrix that may be scaled, tagged, or plus a diagonal.

    The pattern of any other operator is not known: then return None.
    """
    if isinstance(operator, lx.AddLinearOperator):
        parts = operator.operator1, operator.operator2
        found = [own_pattern(part) for part in parts if not lx.is_diagonal(part)]
        return found[0] if len(found) == 1 else None
    if isinstance(inner := getattr(operator, "operator", None), lx.AbstractLinearOperator):
        return own_pattern(inner)
    return operator.pattern if isinstance(operator, SparseOperator) else None
