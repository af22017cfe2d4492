"""Colourings of any graph: greedy ones, and what is made of colours to spare. On the host;
nothing random.

`improved` moves one dimension at a time to the colour that disturbs it least. How much two
dimensions disturb each other is the graph's to say: by the square of an entry of

    sum over k <= depth of (d T)^k,    T_ab = 1 / sqrt(degree of a, degree of b),

a resolvent of the graph, cut off. Pairs that must not share a colour weigh more than all
others together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from traceax._probes.graph import Sparse, neighbours

Colours = Int[np.ndarray, " n"]

_ROUNDS = 6
_SWEEPS = 8
_DAMPING = 0.9


def fewest(reached: Sparse) -> Colours:
    """The best of some greedy colourings: in the order of the dimensions, those with many
    neighbours first, and again by the classes of the best so far, which never takes more
    (Culberson 1992, Iterated greedy graph colouring and the difficulty landscape)."""
    best = _first_fit(reached, range(reached.shape[0]))
    other = _first_fit(reached, np.argsort(-np.diff(reached.indptr), kind="stable"))
    best = min(best, other, key=np.max)
    found = best
    for i in range(_ROUNDS):
        sizes = np.bincount(best)[best]
        first = (-best, -sizes, sizes)[i % 3]
        best = _first_fit(reached, np.lexsort((best, first)))
        found = min(found, best, key=np.max)
    return found


def _first_fit(reached: Sparse, order: Iterable[int]) -> Colours:
    """The first colour that nobody within reach has."""
    colours = np.full(reached.shape[0], -1)
    for node in order:
        taken = set(colours[neighbours(reached, node)].tolist())
        colours[node] = next(c for c in itertools.count() if c not in taken)
    return colours


def disturbance(step: Sparse, forbidden: Sparse, reached: Sparse) -> Sparse:
    """By how much two dimensions of one colour disturb each other, a sparse matrix of the
    pattern `reached`."""
    import scipy.sparse  # noqa: PLC0415

    n, degrees = step.shape[0], np.maximum(np.diff(step.indptr) - 1.0, 1)
    scale = scipy.sparse.diags_array(np.sqrt(_DAMPING / degrees))
    hop = scale @ (step.astype(float) - scipy.sparse.eye_array(n)) @ scale
    hop, total = hop.tocsr(), scipy.sparse.eye_array(n, format="csr")
    while total.nnz < reached.nnz:
        before = total.nnz
        total = (hop @ total + scipy.sparse.eye_array(n, format="csr")).tocsr()
        if total.nnz == before:
            break
    weights = total.multiply(total).tocsr()
    weights.setdiag(0)
    most = 1 + np.max(weights.sum(axis=1))
    weights = weights + most * (forbidden.astype(float) - scipy.sparse.eye_array(n))
    weights = weights.tocsr()
    weights.eliminate_zeros()
    return weights


def crowding(colours: Colours, weights: Sparse, count: int) -> Float[np.ndarray, "n c"]:
    """By how much each dimension would be disturbed in each of `count` colours."""
    import scipy.sparse  # noqa: PLC0415

    n = colours.size
    members = (np.ones(n), (np.arange(n), colours))
    return (weights @ scipy.sparse.csr_array(members, shape=(n, count))).toarray()


def improved(colours: Colours, weights: Sparse, count: int) -> Colours:
    colours, cost = colours.copy(), crowding(colours, weights, count)
    for _ in range(_SWEEPS):
        moved = False
        own = np.take_along_axis(cost, colours[:, None], axis=1)[:, 0]
        for node in np.argsort(-own, kind="stable"):
            best, now = int(np.argmin(cost[node])), colours[node]
            if cost[node, best] >= cost[node, now] * (1 - 1e-9):
                continue
            row = slice(weights.indptr[node], weights.indptr[node + 1])
            cost[weights.indices[row], now] -= weights.data[row]
            cost[weights.indices[row], best] += weights.data[row]
            colours[node], moved = best, True
        if not moved:
            break
    return colours
