"""Colourings: which dimensions may share a probe.

Colours are computed on the host, and nothing is random. The graph of a pattern has an edge
wherever the pattern has an entry. Dimensions within a given number of steps of each other
get different colours.

*Grids* are coloured by lattices, which Korobov used for quadrature: dimension (i, j, k) has
the colour (i + s j + s^2 k) mod c. A grid is recognised by its pattern alone. Its strides
are offsets of diagonals, and each step between neighbours occurs as often as in a grid,
where each axis is open or closed (a torus).

*Any graph* is coloured greedily. If there are colours to spare, `improved` uses them: it
moves one dimension at a time to the colour that disturbs it least. Two dimensions disturb
each other by the square of an entry of

    sum over k <= depth of (d T)^k,    T_ab = 1 / sqrt(degree of a, degree of b),

a truncated resolvent of the graph. Pairs that must not share a colour have a larger weight
than all others together.

*Each pattern is coloured once.* Graphs, colourings and samplers depend on the set of edges
alone, so matrices of other formats, of other orders and with other data share them. Each
function here that is decorated with `memo` keeps its latest results.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from traceax._core.canonical import is_concrete
from traceax._core.checks import (
    check_array,
    check_count,
    invalid,
    require,
    require_type,
    with_library,
)
from traceax._core.sparse import Pattern, entries_of, is_of_jax, own_pattern

# A sparse n x n matrix of SciPy. `scipy.sparse` is imported where it is used, because that
# takes longer than importing all of traceax.
Sparse = Any
Colours = Int[np.ndarray, " n"]
Apart = tuple[Colours, int]  # and how many steps they keep apart

# Keeps the latest results of a function. The largest are samplers: they take two bytes for
# each dimension and colour.
memo = lru_cache(maxsize=8)

_MOST_PRODUCTS = 100_000_000  # for the entries of one power of a pattern: seconds
_MOST_OFFSETS = 130  # of diagonals: a stencil that reaches five steps in a plane
_MOST_IN_BOX, _MOST_WORK = 40_000, 400_000_000
_ROUNDS, _SWEEPS, _DAMPING = 6, 8, 0.9

# From so many dimensions on, moves at the edges of a lattice gain too little, and a lower
# bound for the number of colours is enough for the message, because it is less work.
_MANY = 20_000


@dataclass(frozen=True, eq=False)
class Coloured:
    """The edges of a graph, its colours, and how many steps they keep apart."""

    edges: Pattern
    colours: Colours
    power: int


class Grid(NamedTuple):
    """The sides of a grid, slowest first, and the steps to the neighbours of a place."""

    sides: tuple[int, ...]
    stencil: Int[np.ndarray, "steps axes"]


# Patterns and their graphs.


def places(name: str, pattern: Any) -> Pattern:
    """Return the places where a pattern has entries, in its order.

    This is the only function that reads the pattern that a user gives. A `Pattern` is
    returned as it is.
    """
    known = pattern if isinstance(pattern, Pattern) else own_pattern(pattern)
    if known is not None:
        return known
    must, got = "be concrete, because it is coloured on the host", "a traced array"
    cure = "Colour it outside of jax.jit."
    require_type(is_concrete(pattern), name, "pattern", must, got, cure)
    is_sparse = is_of_jax(pattern) or hasattr(pattern, "tocoo")
    matrix = pattern if is_sparse else check_array(name, "pattern", pattern) != 0
    shape = np.shape(matrix)
    batched = getattr(pattern, "n_batch", 0) or getattr(pattern, "n_dense", 0)
    fits = len(shape) == 2 and shape[0] == shape[1] and not batched
    must = "be a square matrix, a row and a column for each dimension"
    cure = "Pass a dense or sparse array, B.T @ B or B @ B.T of a rectangular B."
    got = f"shape {shape}" if shape else with_library(pattern)
    require(fits, name, "pattern", must, got, cure)
    return entries_of(matrix)[1]


@memo
def undirected(pattern: Pattern) -> Pattern:
    """Return the edges of a pattern's graph, each once and sorted, without loops.

    All that is kept of a pattern is found by them. So patterns share it if their graphs are
    equal, whatever the order of their entries and their data.
    """
    n, ends = pattern.shape[0], np.sort([pattern.rows, pattern.columns], axis=0)
    low, high = ends[:, ends[0] < ends[1]].astype(np.int64)
    return Pattern(np.divmod(np.unique(low * n + high), n), n)


@memo
def graph(edges: Pattern) -> Sparse:
    """Return a symmetric boolean matrix with a full diagonal.

    With the diagonal, its powers include shorter walks.
    """
    import scipy.sparse  # noqa: PLC0415

    own = np.arange(edges.shape[0])
    rows = np.concatenate([edges.rows, edges.columns, own])
    columns = np.concatenate([edges.columns, edges.rows, own])
    ones = np.ones(rows.size, bool)
    return scipy.sparse.csr_array((ones, (rows, columns)), shape=edges.shape)


def within(step: Sparse, power: int) -> Sparse:
    """Return the pairs within `power` steps of each other."""
    reached = step
    for _ in range(power - 1):
        further = reached @ step
        if further.nnz == reached.nnz:
            break
        reached = further
    return reached


def one_further(reached: Sparse | None, step: Sparse) -> Sparse | None:
    """Return the pairs within one step more, or None if they are too many to compute."""
    if reached is None:
        return None
    products = np.sum(np.diff(step.indptr)[reached.indices], dtype=float)
    return None if products > _MOST_PRODUCTS else reached @ step


def keeps_apart(colours: Colours, reached: Sparse) -> bool:
    """Whether all pairs have different colours."""
    rows, columns = reached.tocoo().coords
    return bool(np.count_nonzero(colours[rows] == colours[columns]) == colours.size)


# Grids.


def as_grid(step: Sparse) -> Grid | None:
    """Return the grid of at most three axes that a graph is, or None."""
    n, edges = step.shape[0], np.stack(step.tocoo().coords)
    edges = edges[:, edges[0] != edges[1]]
    offsets = np.unique(np.abs(edges[1] - edges[0]))
    if not 0 < offsets.size <= _MOST_OFFSETS:
        return None
    near = np.unique([offsets, offsets + 1]).tolist()  # a closed axis has m - 1, too
    strides = [s for s in near if 1 < s < n and n % s == 0]
    for chosen in (c for axes in range(3) for c in itertools.combinations(strides, axes)):
        pairs = list(itertools.pairwise((1, *chosen, n)))
        sides = tuple(b // a for a, b in pairs)[::-1]
        nested = all(b % a == 0 for a, b in pairs)
        if nested and (stencil := _stencil(sides, edges)) is not None:
            return Grid(sides, stencil)
    return None


def _stencil(sides: tuple[int, ...], edges: Int[np.ndarray, "2 e"]) -> Any:
    """Return the steps of all edges, if they are short and each occurs wherever it can."""
    side, (rows, columns) = np.array(sides)[:, None], edges
    steps = np.stack(np.unravel_index(columns, sides)) - np.unravel_index(rows, sides)
    closed = np.max(np.abs(steps), axis=1, keepdims=True) > side / 2
    steps = np.where(closed, (steps + side // 2) % side - side // 2, steps)
    kinds, counts = np.unique(steps, axis=1, return_counts=True)
    most = np.prod(np.where(closed, side, side - np.abs(kinds)), axis=0)
    fits = np.all(4 * np.abs(kinds) <= side) and np.array_equal(most, counts)
    return kinds.T if fits else None


def best_lattice(grid: Grid, counts: range, power: int) -> Apart | None:
    """Return the colours of the best lattice, or None if none keeps `power` steps apart.

    Candidates are the lattices of so many colours that keep `power` steps apart, and at
    most one less than any other. The best one has the least sum of the box's weights over
    pairs of one colour.
    """
    differences, distances, weights = _box(grid, counts[0])
    axes, most, found = len(grid.sides), counts[0] // 2 if len(grid.sides) > 1 else 1, []
    for count in counts[: max(1, _MOST_WORK // (weights.size * max(1, most)))]:
        for slope in range(1, max(1, min(most, count // 2)) + 1):
            generator = np.array([pow(slope, axis, count) for axis in range(axes)])
            same = differences @ generator % count == 0
            kept = int(np.min(distances[same], initial=np.max(distances) + 1)) - 1
            found.append((kept, np.sum(weights[same]), generator, count))
    power = max(power, max(kept for kept, *_ in found) - 1)
    fitting = [lattice for lattice in found if lattice[0] >= power]
    if not fitting:
        return None
    kept, _, generator, count = min(fitting, key=lambda lattice: lattice[1])
    return generator @ np.indices(grid.sides).reshape(axes, -1) % count, kept


def _box(grid: Grid, num_colours: int) -> tuple[Any, Any, Any]:
    """Return differences of places in an infinite grid, their steps and their weights.

    They reach twice the distance of neighbours in a lattice. The weight is the square of a
    resolvent that reaches a third of that distance.
    """
    axes, spacing = len(grid.sides), num_colours ** (1 / len(grid.sides))
    most = int((_MOST_IN_BOX ** (1 / axes) - 1) / 2)
    side = 2 * max(2, min(math.ceil(2.2 * spacing), most)) + 1
    kernel, reached = np.zeros((2, *(side,) * axes))
    kernel[tuple(grid.stencil.T % side)] = 1 / len(grid.stencil)
    kernel, reached[(0,) * axes] = np.fft.fftn(kernel), 1
    reach = np.mean(grid.stencil**2) / 2 * (3 / spacing) ** 2
    green = np.fft.ifftn(1 / (1 + reach - kernel.real)).real.ravel()
    steps = np.zeros(reached.shape, int)
    for _ in range(side * axes):
        steps += reached == 0
        reached = (np.fft.ifftn(np.fft.fftn(reached) * (1 + kernel)).real > 1e-6) * 1.0
        if np.all(reached):
            break
    places = np.indices(steps.shape).reshape(axes, -1).T
    differences = np.where(places > side // 2, places - side, places)
    return differences[1:], steps.ravel()[1:], green[1:] ** 2


# Any graph.


def fewest(reached: Sparse) -> Colours:
    """Return the best of some greedy colourings.

    The first takes the dimensions in their order, the second takes those with many
    neighbours first. The others take the classes of the latest colouring one by one, which
    never needs more colours (Culberson 1992, Iterated greedy graph colouring and the
    difficulty landscape).
    """
    degrees = np.diff(reached.indptr)
    orders = np.arange(degrees.size), np.argsort(-degrees, kind="stable")
    found = best = min((_first_fit(reached, order) for order in orders), key=np.max)
    for i in range(_ROUNDS):
        sizes = np.bincount(best)[best]
        first = (-best, -sizes, sizes)[i % 3]
        best = _first_fit(reached, np.lexsort((best, first)))
        found = min(found, best, key=np.max)
    return found


def _first_fit(reached: Sparse, order: Int[np.ndarray, " n"]) -> Colours:
    """Give each dimension the first colour that no dimension within reach has."""
    colours = np.full(reached.shape[0], -1)
    for node in order:
        near = reached.indices[reached.indptr[node] : reached.indptr[node + 1]]
        taken = set(colours[near].tolist())
        colours[node] = next(c for c in itertools.count() if c not in taken)
    return colours


def disturbance(step: Sparse, forbidden: Sparse, reached: Sparse) -> Sparse:
    """Return how much two dimensions of one colour disturb each other.

    It is a sparse matrix of the pattern `reached`.
    """
    import scipy.sparse  # noqa: PLC0415

    n, degrees = step.shape[0], np.maximum(np.diff(step.indptr) - 1.0, 1)
    identity = scipy.sparse.eye_array(n, format="csr")
    scale = scipy.sparse.diags_array(np.sqrt(_DAMPING / degrees))
    hop, total = (scale @ (step.astype(float) - identity) @ scale).tocsr(), identity
    before = 0
    while before < total.nnz < reached.nnz:
        before, total = total.nnz, (hop @ total + identity).tocsr()
    weights = total.multiply(total).tocsr()
    weights.setdiag(0)
    most = 1 + np.max(weights.sum(axis=1))
    weights = (weights + most * (forbidden.astype(float) - identity)).tocsr()
    weights.eliminate_zeros()
    return weights


def members(colours: Colours, count: int) -> Sparse:
    """Return the n x count matrix of ones where a dimension has a colour."""
    import scipy.sparse  # noqa: PLC0415

    n = colours.size
    return scipy.sparse.csr_array((np.ones(n), (np.arange(n), colours)), shape=(n, count))


def improved(colours: Colours, weights: Sparse, count: int) -> Colours:
    """Return colours out of `count`, after moves that each reduce the disturbance."""
    colours, nodes = colours.copy(), np.arange(colours.size)
    cost = (weights @ members(colours, count)).toarray()
    for _ in range(_SWEEPS):
        before = colours.copy()
        for node in np.argsort(-cost[nodes, colours], kind="stable"):
            best, now = int(np.argmin(cost[node])), colours[node]
            if cost[node, best] < cost[node, now] * (1 - 1e-9):
                row = slice(weights.indptr[node], weights.indptr[node + 1])
                cost[weights.indices[row], now] -= weights.data[row]
                cost[weights.indices[row], best] += weights.data[row]
                colours[node] = best
        if np.array_equal(before, colours):
            break
    return colours


# The choice.


def colouring(
    pattern: Any, *, power: int = 1, num_colours: int | None = None
) -> Int[np.ndarray, " n"]:
    """Colour the dimensions of a sparse operator so that neighbours differ.

    Dimensions at most `power` steps apart in the graph of the pattern get different
    colours. Power 1 makes `probing` exact for A itself. Power p makes it exact for A^p, and
    nearly exact for inverses and functions of A whose entries decay within p steps. The
    colouring runs on the host.

    A greedy search in several orders looks for the fewest colours. It recognises grids of
    up to three axes and colours them by lattices, with colours (i + s j + s^2 k) mod c.
    With `num_colours`, it is the best colouring found with at most that many colours. Its
    power is the largest that fits, or one less if a lattice is better spread. Colours that
    are left over separate more pairs.

    **Arguments**

    - `pattern`: the places at which the operator may have entries, as an n x n matrix. It
      is a sparse `jax.experimental.sparse.BCOO`, or anything that `scipy.sparse.coo_array`
      takes. Stored zeros count. It need not be symmetric.
    - `power`: the number of steps up to which dimensions get different colours, a Python
      int of at least 1. With `num_colours`, it is the least power. Default 1.
    - `num_colours`: the largest number of colours, a Python int of at least 1. Default
      `None`, which uses as few as the power needs.

    **Returns** the colours as a NumPy array of n integers from 0. Without `num_colours`,
    the number of colours is at most one more than the largest number of dimensions that one
    dimension has within `power` steps.

    **Cost**: no matvecs, but the time and memory to compute the pattern of the power, or
    with `num_colours`, of each power up to two beyond the largest that fits. The colourings
    of the latest few patterns are kept, and equal patterns share them.

    **Example**

        >>> import numpy as np, traceax as tx
        >>> ring = np.roll(np.eye(8), 1, axis=0)
        >>> print(tx.colouring(ring), tx.colouring(ring, num_colours=4))
        [0 1 0 1 0 1 0 1] [0 1 2 3 0 1 2 3]

    **Reference**: Tang and Saad (2012), A probing method,
    [doi:10.1002/nla.779](https://doi.org/10.1002/nla.779), section 3. Korobov (1959),
    Doklady Akademii Nauk SSSR 124, for lattices of one parameter.

    **See also**: `probing`, `selected_entries`.
    """
    return colour_pattern("colouring", pattern, power, num_colours).colours.copy()


def colour_pattern(name: str, pattern: Any, power: int, num_colours: Any) -> Coloured:
    """Return the colouring that `colouring` and `probing` are asked for.

    The message for too few colours says how many suffice.
    """
    power = check_count(name, "power", power, 1, "a step", "Pass 1 for the pattern itself.")
    edges = undirected(places(name, pattern))
    if num_colours is None:
        return _of_power(edges, power)
    cure = "Pass as many as there are matvecs to spend."
    most = check_count(name, "num_colours", num_colours, 1, "one for all dimensions", cure)
    found = best_colouring(edges, power, most)
    if found is not None:
        return found
    needed = _clique(graph(edges), power)
    if needed <= most or edges.shape[0] <= _MANY:
        needed = int(_of_power(edges, power).colours.max()) + 1
    must = f"be at least {needed}, the fewest found for a colouring that keeps {power} "
    must += "step apart" if power == 1 else "steps apart"
    cure = "Raise it, or lower the power." if power > 1 else "Raise it."
    raise invalid(ValueError, name, "num_colours", must, most, cure)


@memo
def best_colouring(edges: Pattern, power: int, num_colours: int) -> Coloured | None:
    """Return the colouring of the largest power with at most so many colours, improved.

    Return None if that power is less than `power`. A grid gets the best lattice with more
    than four fifths of the colours, if there is one.
    """
    step, n = graph(edges), edges.shape[0]
    if num_colours >= n:
        return Coloured(edges, np.arange(n), n)
    grid, least = as_grid(step), num_colours - math.ceil(num_colours / 5)
    lattice = grid and best_lattice(grid, range(num_colours, least, -1), power)
    # On a closed axis colours may be nearer to each other where the lattice meets itself.
    fits = lattice and keeps_apart(lattice[0], within(step, lattice[1]))
    found = lattice if fits else _greedily(step, power, num_colours)
    if found is None and _clique(step, power) <= num_colours:
        found = _of_power(edges, power).colours, power
    if found is None or found[0].max() >= num_colours:
        return None
    colours, power = found
    if not fits or n <= _MANY:
        # Spare colours are used for pairs up to two steps beyond those kept apart.
        near = within(step, power)
        further = one_further(one_further(near, step), step)
        if further is not None:
            colours = improved(colours, disturbance(step, near, further), num_colours)
    return Coloured(edges, np.unique(colours, return_inverse=True)[1], power)


def _clique(step: Sparse, power: int) -> int:
    """Return a lower bound for the number of colours.

    All dimensions within `power`/2 steps of one are within `power` steps of each other. The
    bound is cheap if a graph has hubs, while the pattern of the power may be full.
    """
    half = power // 2
    return int(np.diff(within(step, half).indptr).max()) if half else 1


@memo
def _of_power(edges: Pattern, power: int) -> Coloured:
    """Return a colouring of as few colours as are found."""
    reached = within(graph(edges), power)
    found, grid = fewest(reached), as_grid(graph(edges))
    counts = range(2, int(found.max()) + 1)
    lattices = (grid and best_lattice(grid, range(c, c + 1), power) for c in counts)
    fitting = (best[0] for best in lattices if best and keeps_apart(best[0], reached))
    return Coloured(edges, next(fitting, found), power)


def _greedily(step: Sparse, power: int, num_colours: int) -> Apart | None:
    """Return the greedy colouring of the largest power that fits.

    The search ends after two powers in a row that do not fit, because a greedy colouring
    may need fewer colours for the larger one. It also ends if a dimension and those within
    half of the steps are too many (see `_clique`).
    """
    best, failed, reached, balls = None, 0, step, [1]
    while failed < 2:
        colours, steps = fewest(reached), len(balls)
        fits = colours.max() < num_colours
        best, failed = ((colours, steps), 0) if fits else (best, failed + 1)
        balls.append(int(np.diff(reached.indptr).max()))
        further = one_further(reached, step)
        hopeless = balls[(steps + 1) // 2] > num_colours
        if further is None or hopeless or further.nnz == reached.nnz:
            break
        reached = further
    return best if best is not None and best[1] >= power else None
