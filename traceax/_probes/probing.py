"""Probing: probes for sparse operators, one for each colour of a colouring.

Each repeat of probing has an error indicator, because each entry between neighbours of the
graph is seen twice. Let s be the signs, c(a) the colour of a, and P_ac the entry a of A
times the probe of colour c. The number P_bc(a) conj(s_a) estimates A_ba for every b, as
P_ac(a) conj(s_a) estimates A_aa: it is disturbed by the other dimensions of the colour of
a. So P_ac(b) conj(s_b) estimates A_ab, and it is disturbed by the other dimensions of the
colour of b. If A = A* (or if A is real and symmetric) the two should be conjugates of each
other, and the neighbour residual

    d_ab = P_ac(b) conj(s_b) - conj(P_bc(a) conj(s_a))

contains disturbances only. They come from the colour of a, as seen from b, and from the
colour of b, as seen from a. If a and b are neighbours, these are the disturbances of the
diagonal entries a and b, except for one step. So half of the mean of |d_ab|^2 over the
neighbours b of a is about the variance of the estimate of A_aa. Some of the other
dimensions of a colour are a step nearer to the neighbour, and some are a step further away.
Entries decay convexly, so the mean is no less than the variance. If A is not Hermitian,
|A_ab - conj(A_ba)|^2 is added.

In a chain a has two neighbours, and a disturbance is a sum of two signs. Both residuals may
vanish by chance when the error does not. But dimensions that are near each other have about
the same variance. So the variance is averaged by a lazy random walk of eight steps from a:
with probability 1/2 a step stays where it is, else it goes along a row of `neighbours`. The
sum of the variances remains if no dimension has more neighbours than are used.

Neighbour residuals do not see entries between two dimensions of one colour if no entries
nearby have the same size, as happens if the pattern does not cover the operator. So one
more matvec tests the pattern with the colour C that has most dimensions. Let m(a) be the
dimension of C that is nearest to a in the graph. The test probe x has the entries s_b g_b
in C, with independent normal g_b. If no row has two entries in C, then

    t_a = (A x)_a - P_aC g_m(a)

is zero. Otherwise E|t_a|^2 is twice the sum of |A_ab|^2 over all b of C but m(a). For a in
C this is twice the variance of the estimate of A_aa. If its mean is more than `_MOST` times
the mean of the residuals, it takes their place. A colouring is exact if all t_a are zero
to rounding and other colours agree: all residuals are zero as well, or, if A is not known
to be Hermitian, no entry is seen at the distances of the next paragraph.

Distances tell as well whether a colouring is exact. If the operator has no entry at two
consecutive distances, it has none further away. If that is seen at the last two distances
that the colouring keeps apart, or at the next two, the error is rounding. If there is a
test probe, it must be seen for a sixteenth of all dimensions, and t_a must be zero to
rounding for those of C.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Inexact, Int, PRNGKeyArray, PyTree

from traceax._core.checks import require, require_type
from traceax._core.sparse import own_pattern
from traceax._core.vectors import (
    Structure,
    common_dtype,
    dimension,
    in_rows,
    unflatten_rows,
)
from traceax._linalg.columns import (
    Block,
    largest_modulus,
    mean,
    over,
    row_norms_squared,
    squared_modulus,
    times,
)
from traceax._probes.colouring import (
    Coloured,
    Colours,
    Sparse,
    colour_pattern,
    graph,
    members,
    memo,
    one_further,
    within,
)
from traceax._probes.samplers import Sampler, rademacher

ByRow = Float[Array, " n"]

_MOST_NEIGHBOURS = 8  # the most neighbours that are used for each dimension
_STEPS = 8  # the length of the random walks that average variances
_LEAST_SEEN = 1 / 16  # the least share of dimensions whose distances tell what is exact
_MOST = 2  # the largest mean that the test probe may see, over the one of residuals

# The degrees of freedom of the interval of one repeat. They were measured: see
# `tests.benchmarks.probing`.
DEGREES = 5.0


class Neighbourhood(eqx.Module):
    """The properties of the graph and its colouring that neighbour residuals need.

    For each dimension, `neighbours` is a row of neighbours, filled up with the dimension
    itself. `beyond` tells which colours lie at the last two distances that are kept apart,
    and which at the next two. `has_beyond` tells whether there are any; the compiler would
    take a second to compute it. `nearest` is m(a) for each dimension a, or n if there is
    none, and `in_test` marks the dimensions of C. `weights` has the g_b of the test probe,
    if there is one.
    """

    colours: Int[Any, " n"]
    neighbours: Int[Any, "n m"]
    beyond: Bool[Any, "n c 2"]
    has_beyond: Bool[Any, "n 2"]
    nearest: Int[Any, " n"]
    in_test: Bool[Any, " n"]
    weights: Float[Array, " n"] | None = None

    def tested(self, key: PRNGKeyArray, dtype: Any) -> Neighbourhood:
        """Return the same with the weights of a test probe."""
        fresh = jax.random.fold_in(key, self.colours.size)
        weights = jax.random.normal(fresh, self.colours.shape, jnp.finfo(dtype).dtype)
        return replace(self, weights=weights)

    def with_test(self, z: Inexact[Array, "n c"]) -> Inexact[Array, "n _"]:
        """Return the probes of one repeat, and after them the test probe, if any."""
        if self.weights is None:
            return z
        signs = jnp.where(self.in_test, jnp.sum(z, axis=1), 0)
        return jnp.hstack([z, times(signs, self.weights)[:, None]])


def _neighbours(step: Sparse) -> Int[np.ndarray, "n m"]:
    """Return neighbours chosen evenly from each row, without the dimension itself."""
    rows, columns = step.tocoo().coords
    columns = columns[np.lexsort((columns, rows != columns, rows))]  # itself first
    starts, degrees = step.indptr[:-1, None], np.diff(step.indptr)[:, None] - 1
    picks = np.arange(min(_MOST_NEIGHBOURS, int(degrees.max())))
    spread = picks * degrees // _MOST_NEIGHBOURS
    places = 1 + np.where(degrees > _MOST_NEIGHBOURS, spread, picks)
    return columns[starts + np.where(picks < degrees, places, 0)]


def _beyond(colours: Colours, step: Sparse, power: int) -> Bool[np.ndarray, "n c 2"]:
    """Return the colours at two consecutive distances, for dimensions that have both.

    There have to be two, because functions of bipartite graphs may miss every other step.
    They are the last two distances that the colouring keeps apart, and the next two. A
    distance with too many pairs to compute has no colours.
    """
    reached: Sparse | None = within(step, max(power - 2, 1))
    seen, own = [], members(colours, int(colours.max()) + 1)
    for _ in range(min(power, 3) + 2):
        none = np.zeros(own.shape, bool)
        seen.append(none if reached is None else (reached @ own).astype(bool).toarray())
        reached = one_further(reached, step)
    pairs = []
    for closer, one, two in (seen[:3], seen[-3:]):
        both = np.any(one & ~closer, axis=1) & np.any(two & ~one, axis=1)
        pairs.append((one | two) & ~closer & both[:, None])
    return np.stack(pairs, axis=2)


def _nearest(in_test: Bool[np.ndarray, " n"], step: Sparse) -> Int[np.ndarray, " n"]:
    """Return the nearest marked dimension of each dimension, or n if there is none."""
    n = in_test.size
    nearest, seen = np.where(in_test, np.arange(n), n), 0
    while seen != (seen := np.count_nonzero(nearest < n)):
        closest = np.minimum.reduceat(nearest[step.indices], step.indptr[:-1])
        nearest = np.where(nearest < n, nearest, closest)
    return nearest


def neighbourhood_of(sampler: Any, structure: Structure) -> Neighbourhood | None:
    """Return the neighbourhood of a `probing` sampler, if it has one, in order of rows."""
    near: Any = getattr(sampler, "neighbourhood", None)
    if near is not None and len(jax.tree.leaves(structure)) > 1:
        order = in_rows(np.arange(near.colours.size), structure)
        near = jax.tree.map(lambda rows: rows[order], near)
        place = np.append(np.argsort(order), order.size)
        near = replace(near, neighbours=place[near.neighbours], nearest=place[near.nearest])
    return jax.tree.map(jnp.asarray, near)


class NeighbourResiduals(eqx.Module):
    """Sums over repeats, entry by entry, in units of `scale`.

    They are sums of variances, of the largest entries seen at either pair of distances, and
    of the largest entries of all. If there is a test probe, `missed` is the mean of
    |t_a|^2 / 2 over C, and `is_exact` says whether all t_a are zero to rounding.
    """

    squares: ByRow
    beyond: Float[Array, "n 2"]
    size: ByRow
    scale: Float[Array, ""]
    missed: Float[Array, ""] | None = None
    is_exact: Bool[Array, ""] | None = None

    def merged(self, other: NeighbourResiduals) -> NeighbourResiduals:
        """Return the sums over the repeats of both."""
        scale = jnp.maximum(self.scale, other.scale)
        one, two = self.scale / scale, other.scale / scale
        squares = self.squares * one**2 + other.squares * two**2
        beyond = self.beyond * one + other.beyond * two
        size = self.size * one + other.size * two
        return NeighbourResiduals(squares, beyond, size, scale)

    def error(self, near: Neighbourhood, eps: float, *, hermitian: bool) -> ByRow:
        """Return the standard error of the sum over repeats."""
        variances = self.squares
        if self.missed is not None:
            sees_more = self.missed > _MOST * jnp.mean(variances)
            variances = jnp.where(sees_more, self.missed, variances)
        for _ in range(_STEPS):
            variances = (variances + mean(variances[near.neighbours])) / 2
        error = self.scale * jnp.sqrt(variances)
        none, has_beyond = self.beyond <= 4 * eps * self.size[:, None], near.has_beyond
        clear = jnp.all(none | ~has_beyond, axis=0)
        if self.is_exact is None or self.missed is None:
            everywhere = clear & jnp.any(has_beyond, axis=0)
            is_exact = jnp.any(jnp.where(has_beyond, none, everywhere[None]), axis=1)
            return jnp.where(is_exact, 0, error)
        # What a few dimensions at an end show may be false for others.
        counted = jnp.mean(has_beyond.astype(error.dtype), axis=0) > _LEAST_SEEN
        least = (64 * eps) ** 2 * jnp.mean(self.size**2)
        by_distance = jnp.any(clear & counted) & (self.missed <= least)
        # So may be what the colour C shows.
        agree = (jnp.mean(self.squares) <= least) | ((not hermitian) & jnp.any(clear))
        return jnp.where(by_distance | (self.is_exact & agree), 0, error)

    def error_in_sum(
        self, near: Neighbourhood, eps: float, *, real: bool, hermitian: bool
    ) -> ByRow:
        """Return the contribution of each entry of one repeat to the error of their sum.

        The error of the sum is the root of the sum of squares. With real signs an entry of
        A changes two entries of the diagonal by the same amount. So for a symmetric A the
        variance of the sum is twice as large as with independent changes. For others it is
        less.
        With phases the changes are independent.
        """
        return (2.0 if real else 1.0) ** 0.5 * self.error(near, eps, hermitian=hermitian)


def neighbour_residuals(z: Block, images: Array, near: Neighbourhood) -> NeighbourResiduals:
    """Return the residuals of one or more whole repeats.

    `images` has the image of the test probe in its last column, if there is one.
    """
    n, count, _ = near.beyond.shape
    products, image = images[:, : z.shape[1]], images[:, z.shape[1] :]
    neighbours, scale = near.neighbours, largest_modulus(products)
    is_neighbour = neighbours != jnp.arange(n)[:, None]
    degrees = jnp.sum(is_neighbour, axis=1, dtype=scale.dtype)

    def of_one(z: Inexact[Array, "n c"], seen: Inexact[Array, "n c"]) -> tuple[Array, ...]:
        signs = jnp.sum(z, axis=1) / count**0.5
        here = jnp.take_along_axis(seen, near.colours[neighbours], axis=1)
        there = seen[neighbours, near.colours[:, None]]
        # This is the residual times s_a s_b, or its conjugate, so it has the same modulus.
        signed = signs[neighbours].conj() * here - signs[:, None] * there.conj()
        between = row_norms_squared(jnp.where(is_neighbour, signed, 0))
        # A dimension without neighbours has the mean square of A times the probes of all
        # other colours instead.
        alone = row_norms_squared(jnp.where(z == 0, seen, 0)) / max(count - 1, 1)
        variance = jnp.where(degrees > 0, between / (2 * jnp.maximum(degrees, 1)), alone)
        sizes = jnp.abs(seen)
        beyond = jnp.max(jnp.where(near.beyond, sizes[:, :, None], 0), axis=1)
        return variance / count, beyond, jnp.max(sizes, axis=1)

    def by_repeat(block: Inexact[Array, "n k"]) -> Inexact[Array, "r n c"]:
        return jnp.moveaxis(block.reshape(n, -1, count), 1, 0)

    each = jax.vmap(of_one)(by_repeat(z), by_repeat(over(products, scale)))
    squares, beyond, size = (jnp.sum(part, axis=0) for part in each)
    if near.weights is None:
        return NeighbourResiduals(squares, beyond, size, scale)
    image, seen = over(image[:, 0], scale), over(products, scale)
    own = jnp.argmax(near.in_test)
    weights = jnp.append(near.weights, 0)[near.nearest]
    explained = times(seen[:, near.colours[own]], weights)
    missed, known = squared_modulus(image - explained), squared_modulus(explained)
    least = (16 * float(jnp.finfo(known.dtype).eps)) ** 2
    is_exact = jnp.sum(missed) <= least * jnp.sum(known)
    missed = jnp.mean(missed, where=near.in_test) / (2 * count)
    return NeighbourResiduals(squares, beyond, size, scale, missed, is_exact)


def combined_error(spread: ByRow, indicator: ByRow, repeats: int) -> ByRow:
    """Return the standard error of a mean over repeats, by spread and by residuals.

    The spread of all entries together is right, so it scales the error indicator.
    """
    if repeats == 1:
        return indicator
    unit = jnp.maximum(largest_modulus(spread), largest_modulus(indicator))
    by_spread, indicated = (spread / unit) ** 2, (indicator / unit) ** 2
    total = jnp.sum(indicated)
    indicated = indicated * (jnp.sum(by_spread) / jnp.where(total > 0, total, 1))
    indicated = jnp.where(total > 0, indicated, by_spread)
    weighted = (repeats - 1) * by_spread + DEGREES * indicated
    return unit * jnp.sqrt(weighted / (repeats - 1 + DEGREES))


class Probing(Sampler):
    """A sampler that draws one signed probe for each colour, once or several times."""

    def __init__(self, colours: Colours, neighbourhood: Neighbourhood | None) -> None:
        self.colours, self.neighbourhood = colours, neighbourhood
        self.num_colours = int(colours.max()) + 1
        super().__init__(self._drawn, independent=True, group=self.num_colours)

    def __reduce__(self) -> Any:
        return Probing, (self.colours, self.neighbourhood)

    def _drawn(self, key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree:
        n, c, argument = dimension(structure), self.num_colours, "pattern_or_colours"
        must = f"have {n} rows or entries, one for each dimension of the operator"
        got, cure = self.colours.size, "Pass the pattern of this operator."
        require(n == got, "probing", argument, must, got, cure)
        must = f"draw a multiple of {c} probes, one for each colour"
        got, cure = f"num_probes={num_probes}", f"Draw {c} or {2 * c}, for example."
        require(num_probes % c == 0, "probing", argument, must, got, cure)
        column = jax.ShapeDtypeStruct((n,), common_dtype(structure))
        signs = rademacher(key, column, num_probes // c)
        is_own = in_rows(self.colours, structure) == np.arange(c)[:, None]
        probes = math.sqrt(c) * jnp.where(is_own, signs[:, None, :], 0)
        return unflatten_rows(probes.reshape(-1, n), structure)


def probing(
    pattern_or_colours: Any, *, power: int = 1, num_colours: int | None = None
) -> Probing:
    """Make a sampler for sparse structure from a colouring of the dimensions.

    There is one probe for each colour. It has random signs (phases, for complex operators)
    on the dimensions of this colour and zeros on all others. If entries A_ab decay with the
    distance in a graph, probing is better than every unstructured sampler:

        error of entry a = sum of A_ab s_b conj(s_a) over b != a of the colour of a

    It is unbiased, and exact if no two dimensions a, b of one colour have A_ab != 0. More
    colours are more accurate than more repeats.

    With a pattern, even one repeat has a standard error, because each entry between
    neighbours in the graph is estimated twice, and the difference shows the error. For
    inverses of Laplacians plus 0.01 to 1, it is 1.0 to 1.7 times the measured error. It is
    larger if entries decay faster or if the operator is not Hermitian. With colours alone,
    the standard error of one repeat is `inf`, and two repeats may agree by chance. Use
    three or more repeats for a diagonal. All entries of a probe that are not zero have one
    modulus. So an operator that computes in bfloat16 internally may round all of them in
    the same direction, which the standard error of a sum does not show.

    **Arguments**

    - `pattern_or_colours`: the places at which the operator may have entries, as in
      `colouring`. It may also be the colours, one integer of at least 0 for each dimension,
      as a one-dimensional array or a pytree with the operator's structure.
    - `power`: the power of the colouring of a pattern, as in `colouring`. Default 1.
    - `num_colours`: the largest number of colours for a pattern, as in `colouring`.
      Default `None`.

    **Returns** a sampler, the same one for equal patterns. Its attribute `num_colours` is
    the number of probes in one repeat.

    **Cost**: one random number for every dimension and repeat.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> band = jnp.ones(299)
        >>> precision = lx.TridiagonalLinearOperator(3 * jnp.ones(300), band, band)
        >>> sampler = tx.probing(precision.as_matrix(), power=11)
        >>> variance, key = lx.invert(precision, solver=lx.Tridiagonal()), jax.random.key(0)
        >>> estimate = tx.hutchinson_diagonal(variance, key, 24, sampler=sampler)
        >>> bool(jnp.all(abs(estimate.value[50:250] - 5**-0.5) < 1e-4))
        True

    **Reference**: Tang and Saad (2012),
    [doi:10.1002/nla.779](https://doi.org/10.1002/nla.779). Stathopoulos, Laeuchli and
    Orginos (2013), [doi:10.1137/120881452](https://doi.org/10.1137/120881452).

    **See also**: `colouring`, `selected_entries`, `hutchinson_diagonal`.
    """
    is_matrix = hasattr(pattern_or_colours, "shape") and len(pattern_or_colours.shape) != 1
    if is_matrix or own_pattern(pattern_or_colours) is not None:
        return probing_of(colour_pattern("probing", pattern_or_colours, power, num_colours))
    must = "come with a pattern, because colours are there already"
    got, cure = f"power={power}, num_colours={num_colours}", "Leave them out."
    alone = power == 1 and num_colours is None
    require(alone, "probing", "power=..., num_colours", must, got, cure)
    leaves = jax.tree.leaves(pattern_or_colours)
    for leaf in leaves:
        got = "a traced array" if isinstance(leaf, Tracer) else np.asarray(leaf).dtype
        must = "be concrete integers, because their number sets the shapes of arrays"
        cure = "Colour outside jax.jit, with traceax.colouring or NumPy and .astype(int)."
        fits = not isinstance(leaf, Tracer) and np.issubdtype(got, np.integer)
        require_type(fits, "probing", "pattern_or_colours", must, got, cure)
    flat = np.concatenate(list(map(np.ravel, leaves))) if leaves else np.zeros(0, int)
    least: Any = flat.min() if flat.size else "none"
    must = "be integers of at least 0, because they number the probes"
    cure = "Number the colours from 0, as traceax.colouring does."
    require(flat.size and least >= 0, "probing", "pattern_or_colours", must, least, cure)
    return Probing(np.unique(flat, return_inverse=True)[1], None)


@memo
def probing_of(coloured: Coloured) -> Probing:
    """Return the sampler of a colouring. A graph without edges has no neighbourhood."""
    step, colours = graph(coloured.edges), coloured.colours
    if not coloured.edges.rows.size:
        return Probing(colours, None)
    beyond = _beyond(colours, step, coloured.power)
    in_test = colours == np.argmax(np.bincount(colours))
    rest = np.any(beyond, axis=1), _nearest(in_test, step), in_test
    return Probing(colours, Neighbourhood(colours, _neighbours(step), beyond, *rest))
