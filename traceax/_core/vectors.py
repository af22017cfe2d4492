"""Vectors of an operator's space, pytrees, as columns of blocks, and back.

The leaves of a short vector follow each other in a column. The leaves of a long one are cut
into p pieces each, and the first pieces of all leaves come first, then the second pieces,
and so on. With p = 2, leaves a of four entries and b of two become

    a0 a1 b0 | a2 a3 b1.

Devices often have parts of each leaf, along its first axis. A device that has the first
half of a and of b then has the first half of the column, and nothing moves. (If b came
after a, every device would need the whole column.) Small leaves whose sizes p does not
divide, for example biases, come last as they are. Only this module knows the order:
`flatten` and `unflatten` are inverse to each other, and `in_rows` sorts by it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

Structure = PyTree[jax.ShapeDtypeStruct]
Column = Inexact[Array, " n"]
LONG = 100_000  # dimensions, from which leaves are cut into pieces


def _sizes(structure: Structure) -> list[int]:
    return [math.prod(leaf.shape) for leaf in jax.tree.leaves(structure)]


def dimension(structure: Structure) -> int:
    return sum(_sizes(structure))


def common_dtype(structure: Structure | PyTree[Array]) -> jnp.dtype:
    """Return the least dtype of at least 32 bits that holds every leaf."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(structure)]
    return np.result_type(*(np.float32 if jnp.finfo(d).bits < 32 else d for d in dtypes))


def _num_pieces(sizes: list[int]) -> int:
    """Return the number of pieces into which leaves are cut: the greatest one that divides
    the sizes of all leaves but the small ones, which have few entries even together."""
    n = sum(sizes)
    large = [size for size in sizes if 1000 * len(sizes) * size > n]
    return math.gcd(*large) if len(sizes) > 1 and n >= LONG else 1


def _cut(num_pieces: int) -> tuple[int, ...]:
    """Return the shape of a leaf in pieces: a row for each piece, if there are several."""
    return (num_pieces, -1) if num_pieces > 1 else (-1,)


def flatten(vector: PyTree[Array], dtype: jnp.dtype) -> Column:
    """Return one vector of the operator's space as a column."""
    return _joined([jnp.asarray(leaf).astype(dtype) for leaf in jax.tree.leaves(vector)])


def in_rows(entries: Any, structure: Structure, xp: Any = np) -> Any:
    """Sort numbers that belong to the entries of a vector, leaf after leaf, as `flatten`
    sorts the entries. `xp` is NumPy, or `jax.numpy` for numbers that are traced."""
    return _joined(_split(xp.asarray(entries), _sizes(structure), xp), xp)


def _joined(leaves: list[Any], xp: Any = jnp) -> Any:
    leaves = [leaf.reshape(-1) for leaf in leaves]
    pieces = _num_pieces([leaf.size for leaf in leaves])
    cut = [leaf.reshape(_cut(pieces)) for leaf in leaves if leaf.size % pieces == 0]
    column = xp.concatenate(cut, axis=-1).reshape(-1)
    small = [leaf for leaf in leaves if leaf.size % pieces]
    if not small:
        return column
    # If `concatenate` joined both, a long column would be whole on every device.
    others = xp.concatenate(small)
    longer = xp.pad(column, (0, others.size))
    place = xp.arange(longer.size) - column.size
    return xp.where(place < 0, longer, others[xp.maximum(place, 0)])


def unflatten(column: Column, structure: Structure) -> PyTree[Array]:
    """Return the vector whose `flatten` is this column, in the leaves' own dtypes."""
    leaves, treedef = jax.tree.flatten(structure)
    sizes = _sizes(structure)
    pieces = _num_pieces(sizes)
    widths = [size // pieces for size in sizes if size % pieces == 0]
    small = [size for size in sizes if size % pieces]
    start = pieces * sum(widths)
    cut = iter(_split(column[:start].reshape(_cut(pieces)), widths))
    # By indices: a slice of a few entries would move the entries of all devices.
    others = iter(_split(column[start + np.arange(sum(small))], small) if small else ())
    parts = [next(others if size % pieces else cut) for size in sizes]

    def leaf_of(part: Array, leaf: jax.ShapeDtypeStruct) -> Array:
        part = part if jnp.iscomplexobj(leaf) else part.real
        return part.astype(leaf.dtype).reshape(leaf.shape)

    return jax.tree.unflatten(treedef, map(leaf_of, parts, leaves))


def _split(array: Any, sizes: list[int], xp: Any = jnp) -> list[Any]:
    """Split an array along its last axis into parts of these sizes."""
    ends = np.cumsum(sizes)[:-1].tolist()
    return xp.split(array, ends, axis=-1) if ends else [array]


def unflatten_rows(rows: Inexact[Array, "k n"], structure: Structure) -> PyTree[Array]:
    """Return the vectors that are rows, with a leading axis on each leaf."""
    return jax.vmap(lambda row: unflatten(row, structure))(rows)


def as_columns(vectors: PyTree[Array], dtype: jnp.dtype) -> Inexact[Array, "n k"]:
    """Return vectors with a leading axis on each leaf, flattened, as columns."""
    return jax.vmap(lambda vector: flatten(vector, dtype), out_axes=1)(vectors)


def as_result(column: Column, structure: Structure) -> PyTree[Array]:
    """Return a diagonal with the structure of the space. Its leaves have the dtypes of the
    space, but of at least 32 bits, and are real if the column is."""

    def result(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = common_dtype(leaf)
        dtype = dtype if jnp.iscomplexobj(column) else jnp.finfo(dtype).dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return unflatten(column, jax.tree.map(result, structure))
