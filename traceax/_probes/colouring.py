"""Colourings: which dimensions may share a probe.

Colours are computed on the host, and nothing is random. The graph of a pattern has an edge
wherever the pattern has an entry. Dimensions within so many steps get different colours.

*Grids* are coloured by lattices (Korobov's, who used them for quadrature): dimension
(i, j, k) has the colour (i + s j + s^2 k) mod c. A grid is recognised by its pattern alone:
its strides are offsets of diagonals, and each step between neighbours occurs as often as in
a grid, where each axis is open or closed (a torus).

*Any graph* is coloured greedily. `improved` then uses colours to spare: it moves one
dimension at a time to the colour that disturbs it least. Two dimensions disturb each other
by the square of an entry of

    sum over k <= depth of (d T)^k,    T_ab = 1 / sqrt(degree of a, degree of b),

a truncated resolvent of the graph. Pairs that must not share a colour have a larger weight
than all others together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Int

from traceax._core.checks import check_count, invalid
from traceax._core.sparse import Pattern, own_pattern, places_of

# A sparse n x n matrix of SciPy. `scipy.sparse` is imported where it is used, because that
# takes longer than importing all of traceax.
Sparse = Any
Colours = Int[np.ndarray, " n"]

_MOST_PRODUCTS = 100_000_000  # for the entries of one power of a pattern: seconds
_MOST_OFFSETS = 130  # of diagonals: a stencil that reaches five steps in a plane
_MOST_IN_BOX, _MOST_WORK = 40_000, 400_000_000
_ROUNDS, _SWEEPS, _DAMPING = 6, 8, 0.9
_FURTHER = 2  # steps beyond the last that is kept apart, for which spare colours are used

# From so many dimensions on, moves at the edges of a lattice gain too little, and a lower
# bound for the number of colours is enough for the message, because it is less work.
_MANY = 20_000


def places(name: str, pattern: Any) -> Pattern:
    """Where it has entries, in its order."""
    if isinstance(pattern, Pattern):
        return pattern
    if (own := own_pattern(pattern)) is not None:
        return own
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(pattern)):
        must = "be concrete, because it is coloured on the host"
        cure = "Colour it outside of jax.jit."
        raise invalid(TypeError, name, "pattern", must, "a traced array", cure)
    shape = tuple(pattern.shape)
    batched = getattr(pattern, "n_batch", 0) or getattr(pattern, "n_dense", 0)
    if len(shape) != 2 or shape[0] != shape[1] or batched:
        must = "be a square matrix, a row and a column for each dimension"
        cure = (
            "Of a rectangular B take B.T @ B or B @ B.T, of a BCOO n_batch = n_dense = 0."
        )
        raise invalid(ValueError, name, "pattern", must, f"shape {shape}", cure)
    return Pattern(*places_of(pattern), shape[0])


def graph(name: str, pattern: Any) -> Sparse:
    """Symmetric, boolean, with a full diagonal, so that powers include shorter walks."""
    import scipy.sparse  # noqa: PLC0415

    known = places(name, pattern)
    n, kept = known.shape[0], np.maximum(known.rows, known.columns) < known.shape[0]
    one, other = known.rows[kept], known.columns[kept]  # a BCOO pads behind the last
    rows = np.concatenate([one, other, np.arange(n)])
    columns = np.concatenate([other, one, np.arange(n)])
    ones = np.ones(rows.size, bool)
    return scipy.sparse.csr_array((ones, (rows, columns)), shape=(n, n))


def within(step: Sparse, power: int) -> Sparse:
    """The pairs within so many steps of each other."""
    reached = step
    for _ in range(power - 1):
        further = reached @ step
        if further.nnz == reached.nnz:
            break
        reached = further
    return reached


def one_further(reached: Sparse, step: Sparse) -> Sparse | None:
    """The pairs within one step more; `None` if they are too many to compute."""
    products = np.sum(np.diff(step.indptr)[reached.indices], dtype=float)
    return None if products > _MOST_PRODUCTS else reached @ step


def keeps_apart(colours: Colours, reached: Sparse) -> bool:
    """Whether all pairs have different colours."""
    rows, columns = reached.tocoo().coords
    return bool(np.count_nonzero(colours[rows] == colours[columns]) == colours.size)


class Grid(NamedTuple):
    """Its sides, slowest first, and the steps from a dimension to its neighbours."""

    sides: tuple[int, ...]
    stencil: Int[np.ndarray, "steps axes"]


def as_grid(step: Sparse) -> Grid | None:
    """The grid of a pattern, if it is one of at most three axes."""
    n, edges = step.shape[0], np.stack(step.tocoo().coords)
    edges = edges[:, edges[0] != edges[1]]
    offsets = np.unique(np.abs(edges[1] - edges[0]))
    if not 0 < offsets.size <= _MOST_OFFSETS:
        return None
    near = np.unique([offsets, offsets + 1]).tolist()  # a closed axis has m - 1, too
    strides = [s for s in near if 1 < s < n and n % s == 0]
    for chosen in (c for axes in range(3) for c in itertools.combinations(strides, axes)):
        pairs = list(itertools.pairwise((1, *chosen, n)))
        if all(b % a == 0 for a, b in pairs):
            sides = tuple(b // a for a, b in pairs)[::-1]
            stencil = _stencil(sides, edges)
            if stencil is not None:
                return Grid(sides, stencil)
    return None


def _stencil(sides: tuple[int, ...], edges: Int[np.ndarray, "2 e"]) -> Any:
    """The steps of all edges, if they are short and each occurs wherever it can."""
    side, (rows, columns) = np.array(sides)[:, None], edges
    steps = np.stack(np.unravel_index(columns, sides)) - np.unravel_index(rows, sides)
    closed = np.max(np.abs(steps), axis=1, keepdims=True) > side / 2
    steps = np.where(closed, (steps + side // 2) % side - side // 2, steps)
    kinds, counts = np.unique(steps, axis=1, return_counts=True)
    most = np.prod(np.where(closed, side, side - np.abs(kinds)), axis=0)
    fits = np.all(4 * np.abs(kinds) <= side) and np.array_equal(most, counts)
    return kinds.T if fits else None


def best_lattice(grid: Grid, counts: range, power: int) -> tuple[Any, int] | None:
    """Colours, and how many steps they keep apart. Candidates are the lattices of so many
    colours that keep `power` steps apart, and at most one less than any other. The best one
    has the least sum of the box's weights over pairs of one colour."""
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
    """Differences of places in an infinite grid, within twice the distance of neighbours in
    a lattice; the number of steps of each; its weight, the square of a resolvent that
    reaches a third of that distance."""
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


def _first_fit(reached: Sparse, order: Iterable[int] | Colours) -> Colours:
    """Each dimension gets the first colour that no dimension within reach has."""
    colours = np.full(reached.shape[0], -1)
    for node in order:
        near = reached.indices[reached.indptr[node] : reached.indptr[node + 1]]
        taken = set(colours[near].tolist())
        colours[node] = next(c for c in itertools.count() if c not in taken)
    return colours


def disturbance(step: Sparse, forbidden: Sparse, reached: Sparse) -> Sparse:
    """How much two dimensions of one colour disturb each other: a sparse matrix of the
    pattern `reached`."""
    import scipy.sparse  # noqa: PLC0415

    n, degrees = step.shape[0], np.maximum(np.diff(step.indptr) - 1.0, 1)
    identity = scipy.sparse.eye_array(n, format="csr")
    scale = scipy.sparse.diags_array(np.sqrt(_DAMPING / degrees))
    hop, total = (scale @ (step.astype(float) - identity) @ scale).tocsr(), identity
    while total.nnz < reached.nnz:
        before = total.nnz
        total = (hop @ total + identity).tocsr()
        if total.nnz == before:
            break
    weights = total.multiply(total).tocsr()
    weights.setdiag(0)
    most = 1 + np.max(weights.sum(axis=1))
    weights = (weights + most * (forbidden.astype(float) - identity)).tocsr()
    weights.eliminate_zeros()
    return weights


def improved(colours: Colours, weights: Sparse, count: int) -> Colours:
    """Colours out of `count`, after moves that each reduce the disturbance."""
    import scipy.sparse  # noqa: PLC0415

    n, colours = colours.size, colours.copy()
    members = (np.ones(n), (np.arange(n), colours))
    cost = (weights @ scipy.sparse.csr_array(members, shape=(n, count))).toarray()
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


def colouring(
    pattern: Any, *, power: int = 1, num_colours: int | None = None
) -> Int[np.ndarray, " n"]:
    """Colour the dimensions of a sparse operator so that neighbours differ.

    Dimensions at most `power` steps apart in the graph of the pattern get different
    colours: power 1 makes `probing` exact for A itself, power p for A^p, and nearly exact
    for inverses and functions of A whose entries decay within p steps. It runs on the host.

    As few colours as are found: greedily, in several orders; on grids of up to three axes,
    which are recognised, by lattices, colours (i + s j + s^2 k) mod c. With `num_colours`,
    the best colouring found with at most so many: that of the largest power that fits (or
    one less, if a lattice is better spread); colours to spare separate more pairs.

    **Arguments**

    - `pattern`: where the operator may have entries, n x n: a sparse
      `jax.experimental.sparse.BCOO`, or anything that `scipy.sparse.coo_array` takes.
      Stored zeros count. It need not be symmetric.
    - `power`: how many steps are kept apart (with `num_colours`, at least), a Python int of
      at least 1. Default 1.
    - `num_colours`: at most how many colours, a Python int of at least 1. Default `None`,
      as few as the power needs.

    **Returns** n integers from 0, the colours, as a NumPy array: without `num_colours` at
    most one more than the greatest number of dimensions within `power` steps of one.
    **Cost**: no applications; time and memory of the pattern of the power, of each power up
    to two beyond the largest that fits with `num_colours`.

    **Example**

        >>> import numpy as np, traceax as tx
        >>> ring = np.roll(np.eye(8), 1, axis=0)
        >>> print(tx.colouring(ring), tx.colouring(ring, num_colours=4))
        [0 1 0 1 0 1 0 1] [0 1 2 3 0 1 2 3]

    **Reference**: Tang and Saad (2012), A probing method, doi:10.1002/nla.779, section 3;
    Korobov (1959), Doklady Akademii Nauk SSSR 124, for lattices of one parameter.
    """
    return colour_pattern("colouring", pattern, power, num_colours)[1].colours


class Best(NamedTuple):
    """Colours, and how many steps they keep apart."""

    colours: Colours
    power: int


def colour_pattern(
    name: str, pattern: Any, power: int, num_colours: int | None
) -> tuple[Sparse, Best]:
    """The graph of a pattern, and its colouring."""
    check_count(name, "power", power, 1, "a step", "Pass 1 for the pattern itself.")
    step = graph(name, pattern)
    if num_colours is None:
        return step, Best(_of_power(step, power), power)
    cure = "Pass as many as there are matvecs to spend."
    check_count(name, "num_colours", num_colours, 1, "one for all dimensions", cure)
    found = best_colouring(step, power, num_colours)
    if found is None:
        needed = _clique(step, power)
        if needed <= num_colours or step.shape[0] <= _MANY:
            needed = int(_of_power(step, power).max()) + 1
        must = f"be at least {needed}, the fewest found for a colouring that keeps {power} "
        must += "step apart" if power == 1 else "steps apart"
        cure = "Raise it, or lower the power." if power > 1 else "Raise it."
        raise invalid(ValueError, name, "num_colours", must, num_colours, cure)
    return step, found


def best_colouring(step: Sparse, power: int, num_colours: int) -> Best | None:
    """With at most so many colours, the colouring of the largest power, then improved;
    `None` if that power is less than `power`."""
    if num_colours >= step.shape[0]:
        return Best(np.arange(step.shape[0]), step.shape[0])
    lattice = _by_lattice(step, power, num_colours)
    best = lattice or _greedily(step, power, num_colours)
    if best is None and _clique(step, power) <= num_colours:
        best = Best(_of_power(step, power), power)
    if best is None or best.colours.max() >= num_colours:
        return None
    if lattice is None or step.shape[0] <= _MANY:
        best = Best(_spread(best, step, num_colours), best.power)
    return Best(np.unique(best.colours, return_inverse=True)[1], best.power)


def _clique(step: Sparse, power: int) -> int:
    """A lower bound for the number of colours: all dimensions within `power`/2 steps of one
    are within `power` steps of each other. It is cheap if a graph has hubs, where the
    pattern of the power may be full."""
    half = power // 2
    return int(np.diff(within(step, half).indptr).max()) if half else 1


def _of_power(step: Sparse, power: int) -> Colours:
    """As few colours as are found."""
    reached = within(step, power)
    found, grid = fewest(reached), as_grid(step)
    if grid is None:
        return found
    for count in range(2, int(found.max()) + 1):
        lattice = best_lattice(grid, range(count, count - 1, -1), power)
        if lattice is not None and keeps_apart(lattice[0], reached):
            return lattice[0]
    return found


def _by_lattice(step: Sparse, power: int, num_colours: int) -> Best | None:
    """The best lattice with more than four fifths of the colours."""
    grid = as_grid(step)
    counts = range(num_colours, num_colours - math.ceil(num_colours / 5), -1)
    lattice = None if grid is None else best_lattice(grid, counts, power)
    # On a closed axis colours may be nearer to each other where the lattice meets itself.
    if lattice is None or not keeps_apart(lattice[0], within(step, lattice[1])):
        return None
    return Best(*lattice)


def _greedily(step: Sparse, power: int, num_colours: int) -> Best | None:
    """The search ends after two powers in a row that do not fit, because a greedy colouring
    may need fewer colours for the larger one. It also ends if a dimension and those within
    half of the steps are too many (see `_clique`)."""
    best, failed, reached, balls = None, 0, step, [1]
    while failed < 2:
        colours, steps = fewest(reached), len(balls)
        fits = colours.max() < num_colours
        best, failed = (Best(colours, steps), 0) if fits else (best, failed + 1)
        balls.append(int(np.diff(reached.indptr).max()))
        further = one_further(reached, step)
        hopeless = balls[(steps + 1) // 2] > num_colours
        if further is None or hopeless or further.nnz == reached.nnz:
            break
        reached = further
    return best if best is not None and best.power >= power else None


def _spread(best: Best, step: Sparse, num_colours: int) -> Colours:
    """Colours that use all of `num_colours`, improved."""
    near = further = within(step, best.power)
    for _ in range(_FURTHER):
        reached = one_further(further, step)
        if reached is None:
            return best.colours
        further = reached
    return improved(best.colours, disturbance(step, near, further), num_colours)
