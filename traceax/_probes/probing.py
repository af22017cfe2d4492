"""Probing: probes that know which entries of a sparse operator can disturb each other."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from traceax._core.operator import Structure, common_dtype, dimension, unflatten
from traceax._probes.samplers import rademacher


class Probing:
    """A sampler of one signed probe a colour, times as often as the budget allows."""

    def __init__(self, colours: Int[np.ndarray, " n"]) -> None:
        self.colours = colours
        self.num_colours = int(colours.max()) + 1

    def __call__(
        self, key: PRNGKeyArray, structure: Structure, num_probes: int
    ) -> PyTree[Array]:
        n, c = dimension(structure), self.num_colours
        if n != self.colours.size:
            raise ValueError(
                f"traceax.probing(colours=...) must have {n} entries, one for each "
                f"dimension of the operator, but got {self.colours.size}. Colour the "
                "pattern of this operator."
            )
        if num_probes % c:
            raise ValueError(
                f"traceax.probing(colours=...) must draw a multiple of {c} probes, one for "
                f"each colour, but got num_probes={num_probes}. Draw {c} or {2 * c}, say."
            )
        column = jax.ShapeDtypeStruct((n,), common_dtype(structure))
        signs = rademacher(key, column, num_probes // c)
        mine = self.colours == np.arange(c)[:, None]
        probes = math.sqrt(c) * jnp.where(mine, signs[:, None, :], 0)
        return jax.vmap(lambda probe: unflatten(probe, structure))(probes.reshape(-1, n))


def probing(colours: PyTree[Int[np.ndarray, ...]]) -> Probing:
    """Make a sampler for sparse structure from a colouring of the dimensions.

    One probe a colour: random signs (phases, for complex operators) on the dimensions of
    that colour, zero on all others. An entry A_ab disturbs an estimate only if a and b have
    the same colour, so for operators whose entries decay with the distance in a graph this
    beats every unstructured sampler:

        diagonal:   E_a = sum of A_ab s_b conj(s_a) over b != a of the colour of a

    Unbiased. Exact if no two dimensions a, b of one colour have A_ab != 0. For
    `hutchinson_trace` and `hutchinson_diagonal`, which spend a multiple of the number of
    colours; the others need independent probes.

    At equal budgets more colours are the more accurate, more repeats the surer: standard
    errors come from repeats. One has none; two agree by chance, and then promise too much,
    as often as every other time if a single neighbour disturbs an entry; three or more are
    honest.

    **Arguments**

    - `colours`: integers of at least 0, one for each dimension of the operator: an array,
      or a pytree of arrays with the operator's structure. `colouring` makes them.

    **Returns** a sampler, a function `(key, structure, num_probes) -> probes`. Its
    attribute `num_colours` is the number of probes in one repeat.

    **Raises** `TypeError` if the colours are not concrete integers; `ValueError` if one is
    negative or there are none, and, when it draws, if they do not fit the operator or the
    budget.

    **Derivatives**: none; the probes depend on the key alone.

    **Cost**: one random number for every dimension and repeat.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> band = jnp.ones(299)
    >>> precision = lx.TridiagonalLinearOperator(3 * jnp.ones(300), band, band)
    >>> sampler = tx.probing(jnp.arange(300) % 12)
    >>> variance = lx.invert(precision, solver=lx.Tridiagonal())
    >>> estimate = tx.hutchinson_diagonal(variance, jax.random.key(0), 24, sampler=sampler)
    >>> bool(jnp.all(abs(estimate.value[50:250] - 5**-0.5) < 1e-4))
    True

    ```

    **Reference**: Tang and Saad (2012), A probing method for computing the diagonal of a
    matrix inverse, Numerical Linear Algebra with Applications 19(3), doi:10.1002/nla.779;
    Stathopoulos, Laeuchli and Orginos (2013), Hierarchical probing, SIAM Journal on
    Scientific Computing 35(5), doi:10.1137/120881452.
    """
    leaves = [_concrete(leaf) for leaf in jax.tree.leaves(colours)]
    flat = np.concatenate(leaves) if leaves else np.zeros(0, int)
    if not flat.size or flat.min() < 0:
        raise ValueError(
            "traceax.probing(colours=...) must be integers of at least 0, because they "
            f"number the probes, but got {flat.min() if flat.size else 'none'}. Number the "
            "colours from 0; traceax.colouring does."
        )
    return Probing(np.unique(flat, return_inverse=True)[1])


def _concrete(leaf: Any) -> Int[np.ndarray, " n"]:
    traced = isinstance(leaf, Tracer)
    if traced or not np.issubdtype(np.asarray(leaf).dtype, np.integer):
        got = "a traced array" if traced else f"{np.asarray(leaf).dtype}"
        raise TypeError(
            "traceax.probing(colours=...) must be concrete integers, because their number "
            f"sets the shapes of arrays, but got {got}. Make the colouring outside of "
            "jax.jit, with traceax.colouring or NumPy."
        )
    return np.asarray(leaf).ravel()


def colouring(pattern: Any, power: int = 1) -> Int[np.ndarray, " n"]:
    """Colour the dimensions of a sparse operator so that neighbours differ.

    Dimensions at most `power` steps apart in the graph of the pattern get different
    colours: the pattern of A itself makes `probing` exact for A, and that of A^p nearly
    exact for inverses and functions of A whose entries decay within p steps. Greedy, on the
    host; nothing random.

    **Arguments**

    - `pattern`: where the operator may have entries, n x n: a sparse
      `jax.experimental.sparse.BCOO`, or anything that `scipy.sparse.coo_array` takes.
      Stored zeros count. Need not be symmetric.
    - `power`: a Python int of at least 1. Default 1.

    **Returns** n integers from 0, the colours, as a NumPy array: at most one more than
    the greatest number of dimensions within `power` steps of one.

    **Raises** `TypeError` if the pattern is traced, or `power` not a Python int;
    `ValueError` if the pattern is not a square matrix, or `power` is below 1.

    **Derivatives**: none.

    **Cost**: no applications; time and memory of the pattern of the power.

    **Example**

    ```python
    >>> import numpy as np, traceax as tx
    >>> ring = np.roll(np.eye(8), 1, axis=0)
    >>> print(tx.colouring(ring))
    [0 1 0 1 0 1 0 1]
    >>> print(tx.colouring(ring, power=3))
    [0 1 2 3 0 1 2 3]

    ```

    **Reference**: Tang and Saad (2012), A probing method for computing the diagonal of a
    matrix inverse, Numerical Linear Algebra with Applications 19(3), doi:10.1002/nla.779,
    section 3.
    """
    if not isinstance(power, int) or isinstance(power, bool):
        raise TypeError(
            "traceax.colouring(power=...) must be a Python int, because it counts steps in "
            f"a graph, but got {power!r}. Pass 1 for the pattern itself."
        )
    if power < 1:
        raise ValueError(
            "traceax.colouring(power=...) must be at least 1, the pattern itself, but got "
            f"{power}. One colour for all is numpy.zeros(n, int)."
        )
    step = _adjacency(pattern)
    reached = step
    for _ in range(power - 1):
        reached = reached @ step
    return _greedy(reached.indptr, reached.indices)


def _adjacency(pattern: Any) -> Any:
    """Symmetric, boolean, with a full diagonal, so that powers include shorter walks."""
    # Here, because they take longer to import than all of traceax.
    import scipy.sparse  # noqa: PLC0415
    from jax.experimental.sparse import BCOO  # noqa: PLC0415

    indices: Any
    shape: Any
    if isinstance(pattern, BCOO):
        if isinstance(pattern.indices, Tracer):
            raise TypeError(
                "traceax.colouring(pattern=...) must be concrete, because it is coloured "
                "on the host, but got a traced array. Colour it outside of jax.jit."
            )
        indices = np.asarray(pattern.indices).reshape(-1, pattern.indices.shape[-1])
        shape = pattern.shape
    else:
        matrix: Any = scipy.sparse.coo_array(pattern)
        indices, shape = np.stack(matrix.coords, axis=-1), matrix.shape
    if len(shape) != 2 or shape[0] != shape[1] or indices.shape[-1] != 2:
        raise ValueError(
            "traceax.colouring(pattern=...) must be a square matrix, because its rows and "
            f"columns are the dimensions to colour, but got shape {shape}. For a BCOO use "
            "n_batch=0 and n_dense=0."
        )
    n = shape[0]
    indices = indices[np.all(indices < n, axis=1)]  # a BCOO pads with out-of-bounds ones
    rows = np.concatenate([indices[:, 0], indices[:, 1], np.arange(n)])
    columns = np.concatenate([indices[:, 1], indices[:, 0], np.arange(n)])
    ones = np.ones(rows.size, bool)
    return scipy.sparse.csr_array((ones, (rows, columns)), shape=(n, n))


def _greedy(
    indptr: Int[np.ndarray, " _"], indices: Int[np.ndarray, " _"]
) -> Int[np.ndarray, " n"]:
    """In the order of the dimensions, the first colour that no neighbour has."""
    colours = np.full(indptr.size - 1, -1)
    for node, (start, end) in enumerate(itertools.pairwise(indptr)):
        taken = set(colours[indices[start:end]].tolist())
        colours[node] = next(c for c in range(len(taken) + 1) if c not in taken)
    return colours
