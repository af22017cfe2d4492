"""Vectors of an operator's space, pytrees, as columns of blocks, and back.

The leaves of a short vector follow each other in a block. Those of a long one are cut into
as many pieces each, and the first pieces of all leaves come first: where devices have parts
of each leaf, along its first axis, they join them, and nothing moves. (Joined leaf after
leaf, the block would be whole on every device.) Small leaves that cannot be cut come last.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

Structure = PyTree[jax.ShapeDtypeStruct]
LONG = 100_000  # dimensions, from which leaves are joined in pieces


def _sizes(structure: Structure) -> list[int]:
    return [math.prod(leaf.shape) for leaf in jax.tree.leaves(structure)]


def dimension(structure: Structure) -> int:
    return sum(_sizes(structure))


def common_dtype(structure: Structure | PyTree[Array]) -> jnp.dtype:
    """The least dtype of at least 32 bits that holds every leaf."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(structure)]
    return np.result_type(*(np.float32 if jnp.finfo(d).bits < 32 else d for d in dtypes))


def flatten(vector: PyTree[Array], dtype: jnp.dtype) -> Inexact[Array, " n"]:
    """One vector of the operator's space, as a column."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(vector)]
    leaves = [leaf if leaf.ndim == 1 else jnp.ravel(leaf) for leaf in leaves]
    column, *rest = _joined([leaf.astype(dtype) for leaf in leaves])
    if not rest:
        return column
    # Joined by `concatenate`, a long column would be whole on every device.
    longer = jnp.pad(column, (0, rest[0].size))
    place = jnp.arange(longer.size) - column.size
    return jnp.where(place < 0, longer, rest[0][jnp.maximum(place, 0)])


def _joined(leaves: list[Any], xp: Any = jnp) -> list[Any]:
    """The column of the leaves that are cut, and that of the others, if there are any."""
    pieces = _num_pieces([leaf.size for leaf in leaves])
    if pieces == 1:
        return [leaves[0] if len(leaves) == 1 else xp.concatenate(leaves)]
    cut = [
        leaf.reshape(pieces, leaf.size // pieces)
        for leaf in leaves
        if leaf.size % pieces == 0
    ]
    rest = [leaf for leaf in leaves if leaf.size % pieces]
    return [xp.concatenate(cut, axis=1).ravel(), *([xp.concatenate(rest)] if rest else [])]


def _num_pieces(sizes: list[int]) -> int:
    """What divides the sizes of all leaves but those that are small together."""
    n = sum(sizes)
    large = [size for size in sizes if 1000 * len(sizes) * size > n]
    return math.gcd(*large) if len(sizes) > 1 and n >= LONG else 1


def in_rows(entries: Any, structure: Structure) -> np.ndarray:
    """What belongs to the entries of a vector, leaf after leaf, in the order of rows."""
    leaves = np.split(np.asarray(entries), np.cumsum(_sizes(structure))[:-1])
    return np.concatenate(_joined(leaves, np))


def unflatten(column: Inexact[Array, " n"], structure: Structure) -> PyTree[Array]:
    """The inverse of `flatten`, rounded to the leaves' own dtypes."""
    leaves, treedef = jax.tree.flatten(structure)
    pairs = zip(_parts(column, _sizes(structure)), leaves, strict=True)
    leaves = [_rounded(part, leaf.dtype).reshape(leaf.shape) for part, leaf in pairs]
    return jax.tree.unflatten(treedef, leaves)


def _parts(column: Inexact[Array, " n"], sizes: list[int]) -> list[Array]:
    pieces = _num_pieces(sizes)
    if pieces == 1:
        return _split(column, sizes)
    rest = [size for size in sizes if size % pieces]
    widths = [size // pieces for size in sizes if size % pieces == 0]
    start = pieces * sum(widths)
    cut = iter(_split(column[:start].reshape(pieces, -1), widths))
    # By indices: a slice of a few entries would move those of all devices.
    others = iter(_split(column[start + np.arange(sum(rest))], rest) if rest else ())
    return [next(others if size % pieces else cut) for size in sizes]


def _split(array: Array, sizes: list[int]) -> list[Array]:
    ends = np.cumsum(sizes)[:-1].tolist()
    return jnp.split(array, ends, axis=-1) if ends else [array]


def _rounded(part: Array, dtype: jnp.dtype) -> Array:
    is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return (part.real if is_real and jnp.iscomplexobj(part) else part).astype(dtype)


def unflatten_rows(rows: Inexact[Array, "k n"], structure: Structure) -> PyTree[Array]:
    """The vectors that are rows: each leaf has a leading axis."""
    return jax.vmap(lambda row: unflatten(row, structure))(rows)


def as_columns(vectors: PyTree[Array], dtype: jnp.dtype) -> Inexact[Array, "n k"]:
    """Vectors with a leading axis on each leaf, flattened, as columns."""
    return jax.vmap(lambda vector: flatten(vector, dtype), out_axes=1)(vectors)


def as_result(column: Inexact[Array, " n"], structure: Structure) -> PyTree[Array]:
    """A diagonal with the structure of the space. Leaves have their own dtypes, but of at
    least 32 bits, and are real if the column is."""

    def result(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = common_dtype(leaf)
        dtype = dtype if jnp.iscomplexobj(column) else jnp.finfo(dtype).dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return unflatten(column, jax.tree.map(result, structure))


def in_leaves(
    entries: Inexact[Array, " n"], structure: Structure, dtype: jnp.dtype
) -> Inexact[Array, " n"]:
    """Entries that follow leaf after leaf, as a column."""
    return flatten(_split(entries, _sizes(structure)), dtype)
