"""Which entries of a matrix a whitening reads: those of each index with a few earlier ones.

All of this runs on the host, once for all values of hyperparameters. Points are put in a
maximin order, in which each is the farthest from all before it, so that the first ones
cover the whole set, and later ones lie between their neighbours (Schäfer, Katzfuss and
Owhadi 2021, arXiv:2004.14455). From MANY points on, the order is random behind the first
MANY points: in three dimensions, with 20 neighbours, this takes the condition number from
55 to 72 (Matérn 5/2), or from 10 to 12 (3/2), and the root of |W A W* - I|_F by 3 %.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from traceax._core.canonical import is_concrete
from traceax._core.checks import check_array, check_count, require, require_type
from traceax._probes.colouring import graph, places, undirected, within

MANY = 20_000
_MOST = 500  # neighbours of a row of a sparse matrix: a small factor takes 2 MB

Points = Float[np.ndarray, "n d"]
Order = Int[np.ndarray, " n"]
Earlier = Int[np.ndarray, "n m"]


@jax.tree_util.register_static
class Neighbours:
    """An order of the indices of a matrix, and for each a few earlier ones, for `vecchia`.

    It is made by `nearest_neighbours` or `graph_neighbours`, or by you. It is static:
    functions that get another one are compiled again.

    **Arguments**

    - `order`: the indices from 0 to n - 1 in some order, integers.
    - `earlier`: integers, n x m. Row i has the *places in the order* of the neighbours of
      `order[i]`, which are less than i. Where there are fewer than m, i itself fills up
      the row.

    **Example**

        >>> import traceax as tx
        >>> chain = tx.Neighbours([2, 0, 1], [[0], [0], [1]])
        >>> print(chain.order[chain.earlier[2]])  # the neighbours of index 1
        [0]

    **See also**: `vecchia`, `nearest_neighbours`, `graph_neighbours`.
    """

    def __init__(self, order: Any, earlier: Any) -> None:
        name, whole = "Neighbours", "because it sets the shapes of arrays"
        cure = "Make it outside of jax.jit."
        for argument, array in (("order", order), ("earlier", earlier)):
            must = f"be concrete, {whole}"
            require_type(is_concrete(array), name, argument, must, "a traced array", cure)
        self.order = np.array(order, np.int32)
        self.earlier = np.array(earlier, np.int32)
        n = self.order.size
        is_order = np.array_equal(np.sort(self.order, axis=None), np.arange(n))
        must, cure = "have each of 0, ..., n - 1 once", "Pass numpy.arange(n), for example."
        require(is_order, name, "order", must, f"shape {self.order.shape}", cure)
        own, shape = np.arange(n)[:, None], self.earlier.shape
        fits = len(shape) == 2 and shape[0] == n
        must, got = f"have a row for each of the {n} indices", f"shape {shape}"
        require(fits, name, "earlier", must, got, "Fill up short rows with their places.")
        fits = np.all((self.earlier >= 0) & (self.earlier <= own))
        must, got = "have places from 0 to that of the row", "later ones"
        cure = "Pass places in the order, which are less than i in row i, or i itself."
        require(bool(fits), name, "earlier", must, got, cure)
        self.digest = n, hashlib.blake2b(self.order.tobytes() + self.earlier.tobytes())
        self.digest = n, self.digest[1].digest()

    @property
    def is_neighbour(self) -> np.ndarray:
        """Which places of `earlier` are those of neighbours."""
        return self.earlier < np.arange(self.order.size)[:, None]

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Neighbours) and self.digest == other.digest

    def __repr__(self) -> str:
        count = int(self.is_neighbour.sum())
        return f"<Neighbours of {self.order.size} indices, {count} in all>"


def nearest_neighbours(
    points: Any, num_neighbours: int = 20, *, num_pivots: int = 0
) -> Neighbours:
    """Return a maximin order of points, and the nearest earlier points of each.

    These are the neighbours for `vecchia` of a kernel matrix. Scale each coordinate by its
    length scale, if they differ: what counts is which points have the largest correlations.

    **Arguments**

    - `points`: real numbers, n x d, or n on a line. They are read on the host.
    - `num_neighbours`: how many neighbours each point has, an int of at least 1. Twice as
      many make the factor four to eight times as expensive, and divide the error of smooth
      kernels by 2 to 5. Default 20.
    - `num_pivots`: the first points of the order that are neighbours of all others, too.
      They serve smooth kernels in high dimensions. Default 0.

    **Returns** `Neighbours`. Up to 20,000 points the order is exact. If there are more, it
    begins with 20,000 of them, and the others follow in a random order, which is always the
    same.

    **Cost**: no matvecs; 2 to 3 seconds for 20,000 points or more, and a search for the
    nearest neighbours by `scipy.spatial.KDTree`.

    **Example**

        >>> import numpy as np, traceax as tx
        >>> neighbours = tx.nearest_neighbours(np.linspace(0.0, 1.0, 5), 2)
        >>> print(neighbours.order)
        [2 0 4 1 3]

    **Reference**: Schäfer, Katzfuss and Owhadi (2021), section 4,
    [arXiv:2004.14455](https://arxiv.org/abs/2004.14455).

    **See also**: `vecchia`, `graph_neighbours`.
    """
    name = "nearest_neighbours"
    must, cure = "be concrete, because they are sorted on the host", "Pass NumPy's."
    require_type(is_concrete(points), name, "points", must, "a traced array", cure)
    found = check_array(name, "points", points)
    is_real = found.dtype.kind in "fiu" and found.ndim in (1, 2) and found.size
    must, got = "be real numbers, n x d", f"shape {found.shape} of {found.dtype}"
    require(bool(is_real), name, "points", must, got, "Pass an array of coordinates.")
    found = np.asarray(found, float).reshape(len(found), -1)
    must, got = "be finite", "one that is not"
    require(bool(np.all(np.isfinite(found))), name, "points", must, got, "Leave it out.")
    count = check_count(name, "num_neighbours", num_neighbours, 1, "a neighbour each")
    pivots = check_count(name, "num_pivots", num_pivots, 0, "none")
    n = len(found)
    count, pivots = min(count, n), min(pivots, n)
    order = np.arange(n) if n <= MANY else np.random.default_rng(0).permutation(n)
    order[:MANY] = order[_maximin(found[order[:MANY]])]
    places = np.arange(n)[:, None]
    first = np.minimum(np.arange(pivots), places)
    near = places + np.zeros(count, int)
    near[pivots:] = pivots + _nearest_earlier(found[order[pivots:]], count)
    return Neighbours(order, np.concatenate([first, near], axis=1))


def _maximin(points: Points) -> Order:
    """Return an order in which each point is the farthest from all points before it. The
    first one is the nearest to the mean."""
    coordinates, order = np.ascontiguousarray(points.T), np.zeros(len(points), int)
    distance = np.full(len(points), np.inf)
    place = int(np.argmin(np.sum((points - points.mean(axis=0)) ** 2, axis=1)))
    for step in range(len(points)):
        order[step] = place
        squares = sum((x - x[place]) ** 2 for x in coordinates)
        distance = np.minimum(distance, squares)
        distance[place] = -1
        place = int(np.argmax(distance))
    return order


def _nearest_earlier(points: Points, count: int) -> Earlier:
    """Return the places of the nearest points among all that come earlier.

    For the second half of each range of 2^k points, a tree of all of the range is asked for
    four times as many neighbours, about half of which come later. The few points for which
    that is not enough get their neighbours from the first half.
    """
    from scipy.spatial import KDTree  # noqa: PLC0415

    n = len(points)
    near = np.tile(np.arange(n)[:, None], count)
    start = min(n, 2 * count)
    squares = np.sum((points[:start, None] - points[:start]) ** 2, axis=-1)
    for place in range(1, start):
        found = np.argsort(squares[place, :place], kind="stable")[:count]
        near[place, : found.size] = found
    while start < n:
        end = min(2 * start, n)
        tree: Any = KDTree(points[:end])
        found = tree.query(points[start:end], min(4 * count + 1, end))[1]
        earlier = found < np.arange(start, end)[:, None]
        rank = np.cumsum(earlier, axis=1)
        enough = rank[:, -1] >= count
        chosen = earlier & (rank <= count) & enough[:, None]
        near[start:end][enough] = found[chosen].reshape(-1, count)
        if not enough.all():
            few, tree = points[start:end][~enough], KDTree(points[:start])
            near[start:end][~enough] = tree.query(few, count)[1].reshape(-1, count)
        start = end
    return near


def graph_neighbours(pattern: Any, *, power: int = 1) -> Neighbours:
    """Return the earlier neighbours of each index in the graph of a power of a matrix.

    These are the neighbours for `vecchia` of a sparse matrix, for example the precision of
    a Gaussian Markov random field. The order is that of the indices.

    **Arguments**

    - `pattern`: the places at which the matrix has entries, as in `colouring`.
    - `power`: the number of steps in the graph that neighbours are apart at most, an int of
      at least 1. Each additional step multiplies the condition number by about a third, and
      the number of neighbours by 2 to 3 in a plane. Default 1.

    **Returns** `Neighbours`.

    **Raises** `ValueError` if a row has more than 500 neighbours, as those of hubs have.

    **Cost**: no matvecs; the pattern of the power.

    **Example**

        >>> import numpy as np, traceax as tx
        >>> ring = np.roll(np.eye(5), 1, axis=0)
        >>> print(tx.graph_neighbours(ring).earlier.tolist())
        [[0, 0], [0, 1], [1, 2], [2, 3], [0, 3]]

    **Reference**: Kolotilina and Yeremin (1993),
    [doi:10.1137/0614004](https://doi.org/10.1137/0614004).

    **See also**: `vecchia`, `nearest_neighbours`.
    """
    name = "graph_neighbours"
    power = check_count(name, "power", power, 1, "a step", "Pass 1 for the pattern itself.")
    reached = within(graph(undirected(places(name, pattern))), power).tocoo()
    kept = reached.coords[1] < reached.coords[0]
    rows, columns = (x[kept] for x in reached.coords)
    rows, columns = (x[np.lexsort((columns, rows))] for x in (rows, columns))
    n = reached.shape[0]
    counts = np.bincount(rows, minlength=n)
    most = int(counts.max(initial=0))
    must, got = f"have at most {_MOST} earlier neighbours in a row", most
    require(most <= _MOST, name, "pattern", must, got, "Lower the power, or put hubs last.")
    earlier = np.tile(np.arange(n)[:, None], max(most, 1))
    slots = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    earlier[rows, slots] = columns
    return Neighbours(np.arange(n), earlier)
