"""The graph of a pattern, and who is within so many steps of whom in it. On the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Int

# A sparse n x n matrix of SciPy, which is imported where it is needed: that takes longer
# than importing all of traceax.
Sparse = Any

# Products that make the entries of one power of a pattern: seconds.
_MOST_PRODUCTS = 100_000_000


def graph(name: str, pattern: Any) -> Sparse:
    """Symmetric, boolean, with a full diagonal, so that powers include shorter walks."""
    import scipy.sparse  # noqa: PLC0415
    from jax.experimental.sparse import BCOO  # noqa: PLC0415

    indices: Any
    shape: Any
    if isinstance(pattern, BCOO):
        _check_concrete(name, pattern.indices)
        indices = np.asarray(pattern.indices).reshape(-1, pattern.indices.shape[-1])
        shape = pattern.shape
    else:
        _check_concrete(name, pattern)
        matrix: Any = scipy.sparse.coo_array(pattern)
        indices, shape = np.stack(matrix.coords, axis=-1), matrix.shape
    if len(shape) != 2 or shape[0] != shape[1] or indices.shape[-1] != 2:
        raise ValueError(
            f"traceax.{name}(pattern=...) must be a square matrix, because its rows and "
            f"columns are the dimensions to colour, but got shape {shape}. Of a "
            "rectangular B take that of B.T @ B or B @ B.T; of a BCOO one with n_batch=0 "
            "and n_dense=0."
        )
    n = shape[0]
    indices = indices[np.all(indices < n, axis=1)]  # a BCOO pads with out-of-bounds ones
    rows = np.concatenate([indices[:, 0], indices[:, 1], np.arange(n)])
    columns = np.concatenate([indices[:, 1], indices[:, 0], np.arange(n)])
    ones = np.ones(rows.size, bool)
    return scipy.sparse.csr_array((ones, (rows, columns)), shape=(n, n))


def _check_concrete(name: str, pattern: Any) -> None:
    if isinstance(pattern, Tracer):
        raise TypeError(
            f"traceax.{name}(pattern=...) must be concrete, because it is coloured "
            "on the host, but got a traced array. Colour it outside of jax.jit."
        )


def within(step: Sparse, power: int) -> Sparse:
    """Who is within so many steps of whom."""
    reached = step
    for _ in range(power - 1):
        further = reached @ step
        if further.nnz == reached.nnz:
            break
        reached = further
    return reached


def one_further(reached: Sparse, step: Sparse) -> Sparse | None:
    """Who is within one step more; `None` where that is too much to work out."""
    products = np.sum(np.diff(step.indptr)[reached.indices], dtype=float)
    return None if products > _MOST_PRODUCTS else reached @ step


def neighbours(reached: Sparse, node: int) -> Int[np.ndarray, " _"]:
    """Itself among them."""
    return reached.indices[reached.indptr[node] : reached.indptr[node + 1]]


def keeps_apart(colours: Int[np.ndarray, " n"], reached: Sparse) -> bool:
    """Whether those within reach of each other differ."""
    rows, columns = reached.tocoo().coords
    return np.count_nonzero(colours[rows] == colours[columns]) == colours.size
