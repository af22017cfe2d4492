"""Probing: probes that know which entries of a sparse operator can disturb each other.

What one repeat of probing tells of its own error: each entry between neighbours is seen
twice.

With s the signs, c(a) the colour of a, and P_ac the entry a of A times the probe of colour
c, the product P_bc(a) conj(s_a) reads A_ba for every b, as that of a reads A_aa, disturbed
by what else has the colour of a; and P_ac(b) conj(s_b) reads A_ab, disturbed by what else
has the colour of b. If A = A* (or is real and symmetric) the two should be each other's
conjugates, and the difference

    d_ab = P_ac(b) conj(s_b) - conj(P_bc(a) conj(s_a))

is disturbance only: that of the colour of a, as seen from b, and that of the colour of b,
as seen from a. If a and b are neighbours, these are what disturbs the diagonal entries a
and b, but for one step. So half of the mean of |d_ab|^2 over the neighbours b of a is about
the variance of a's estimate. Some of the others of a colour are a step nearer to the
neighbour, some a step further away, and entries decay convexly: the mean is no less. If A
is not Hermitian, |A_ab - conj(A_ba)|^2 comes on top.

Where no entry at all is seen one or two steps beyond what the colouring keeps apart, though
there are colours that would show it, the colouring is exact, and its error rounding.
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Inexact, Int, PRNGKeyArray, PyTree

from traceax._core.operator import Structure, common_dtype, dimension, unflatten
from traceax._linalg.columns import largest_modulus, row_norms_squared
from traceax._probes.colouring import Best, Sparse, coloured, one_further, within
from traceax._probes.samplers import rademacher

# Neighbours that are asked, of those that there are.
_MOST = 8

# Of the interval by one repeat. Measured: see `tests.benchmarks.probing`.
DEGREES = 5.0


class Witnesses(eqx.Module):
    """For each dimension: its colour; neighbours, in rows filled up with itself, their
    colours and their number; the colours that are one or two steps beyond what is kept
    apart, and whether there are any. Whatever can be is worked out here, on the host: the
    compiler would take longer."""

    colours: Int[Any, " n"]
    neighbours: Int[Any, "n m"]
    columns: Int[Any, "n m"]
    degrees: Int[Any, " n"]
    beyond: Bool[Any, "n c"]
    shown: Bool[Any, " n"]

    @property
    def num_colours(self) -> int:
        return self.beyond.shape[1]

    @staticmethod
    def of(colours: Int[np.ndarray, " n"], step: Sparse, power: int) -> Witnesses | None:
        """Of colours that keep `power` steps apart. A graph without edges has none."""
        if step.nnz == colours.size:
            return None
        nearby, beyond = _neighbours(step), _beyond(colours, step, power)
        degrees = np.sum(nearby != np.arange(colours.size)[:, None], axis=1)
        shown = beyond.any(axis=1)
        return Witnesses(colours, nearby, colours[nearby], degrees, beyond, shown)


def _neighbours(step: Sparse) -> Int[np.ndarray, "n m"]:
    """Evenly out of each row, itself left out."""
    n = step.shape[0]
    rows, columns = step.tocoo().coords
    order = np.lexsort((columns, rows != columns, rows))  # itself first
    columns, degrees = columns[order], np.bincount(rows, minlength=n) - 1
    starts = np.concatenate([[0], np.cumsum(degrees + 1)[:-1]])
    picks = np.arange(min(_MOST, int(degrees.max(initial=0))))[None, :]
    spread = picks * degrees[:, None] // _MOST
    places = 1 + np.where(degrees[:, None] > _MOST, spread, picks)
    there = picks < degrees[:, None]
    return columns[starts[:, None] + np.where(there, places, 0)]


def _beyond(
    colours: Int[np.ndarray, " n"], step: Sparse, power: int
) -> Bool[np.ndarray, "n c"]:
    """Of dimensions that have colours both one and two steps beyond: functions of bipartite
    graphs may miss every other step. Nowhere, where that is too much to work out."""
    import scipy.sparse  # noqa: PLC0415

    n, count = colours.size, int(colours.max()) + 1
    members = scipy.sparse.csr_array((np.ones(n), (np.arange(n), colours)))
    near = within(step, power)
    one = one_further(near, step)
    two = None if one is None else one_further(one, step)
    if one is None or two is None:
        return np.zeros((n, count), bool)
    first, second, third = (
        (reached @ members).astype(bool).toarray() for reached in (near, one, two)
    )
    second, third = second & ~first, third & ~second & ~first
    shown = second.any(axis=1) & third.any(axis=1)
    return (second | third) & shown[:, None]


def witnesses_of(sampler: Any) -> Witnesses | None:
    """Those of a `probing` sampler whose colours remember their graph."""
    found: Witnesses | None = getattr(sampler, "witnesses", None)
    return None if found is None else jax.tree.map(jnp.asarray, found)


class Account(eqx.Module):
    """Sums over repeats, entry by entry, in units of `scale`: of variances, and of what is
    seen beyond."""

    squares: Float[Array, " n"]
    beyond: Float[Array, " n"]
    size: Float[Array, " n"]
    scale: Float[Array, ""]

    def merged(self, other: Account) -> Account:
        scale = jnp.maximum(self.scale, other.scale)

        def moved(part: Account) -> Account:
            factor = part.scale / scale
            return Account(
                part.squares * factor**2, part.beyond * factor, part.size * factor, scale
            )

        sums = jax.tree.map(jnp.add, moved(self), moved(other))
        return eqx.tree_at(lambda t: t.scale, sums, scale)

    def error(self, witnesses: Witnesses, repeats: int, eps: float) -> Float[Array, " n"]:
        """Of the mean over repeats."""
        error = self.scale * jnp.sqrt(self.squares) / repeats
        shown = witnesses.shown
        none = self.beyond <= 4 * eps * self.size
        all_none = jnp.any(shown) & jnp.all(none | ~shown)
        return jnp.where(jnp.where(shown, none, all_none), 0, error)


def account(
    z: Inexact[Array, "n k"], products: Inexact[Array, "n k"], witnesses: Witnesses
) -> Account:
    """Of one or more repeats, each whole."""
    neighbours, own = witnesses.neighbours, witnesses.colours[:, None]
    n, count, scale = own.size, witnesses.num_colours, largest_modulus(products)
    degrees = witnesses.degrees
    there_are = jnp.arange(neighbours.shape[1]) < degrees[:, None]

    def of_one(z: Inexact[Array, "n c"], seen: Inexact[Array, "n c"]) -> Account:
        signs = jnp.sum(z, axis=1) / count**0.5
        here = jnp.take_along_axis(seen, witnesses.columns, axis=1)
        there = seen[neighbours, own]
        # The difference times s_a s_b, or its conjugate: of the same modulus.
        signed = signs[neighbours].conj() * here - signs[:, None] * there.conj()
        between = row_norms_squared(jnp.where(there_are, signed, 0))
        alone = row_norms_squared(jnp.where(z == 0, seen, 0)) / max(count - 1, 1)
        told = jnp.where(degrees > 0, between / (2 * jnp.maximum(degrees, 1)), alone)
        sizes = jnp.abs(seen)
        beyond = jnp.max(jnp.where(witnesses.beyond, sizes, 0), axis=1)
        return Account(told / count, beyond, jnp.max(sizes, axis=1), jnp.ones_like(scale))

    def cut(block: Inexact[Array, "n k"]) -> Inexact[Array, "r n c"]:
        return jnp.moveaxis(block.reshape(n, -1, count), 1, 0)

    each = jax.vmap(of_one)(cut(z), cut(products / scale))
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), each)
    return eqx.tree_at(lambda t: t.scale, total, scale)


def pooled(
    spread: Float[Array, " n"], told: Float[Array, " n"], repeats: int
) -> Float[Array, " n"]:
    """The standard error of a mean over repeats, by their spread and by what each tells. Of
    all entries together their spread is right: what is told is measured by it."""
    if repeats == 1:
        return told
    unit = jnp.maximum(largest_modulus(spread), largest_modulus(told))
    by_spread, by_word = (spread / unit) ** 2, (told / unit) ** 2
    total = jnp.sum(by_word)
    by_word = by_word * (jnp.sum(by_spread) / jnp.where(total > 0, total, 1))
    by_word = jnp.where(total > 0, by_word, by_spread)
    degrees = repeats - 1
    return unit * jnp.sqrt((degrees * by_spread + DEGREES * by_word) / (degrees + DEGREES))


class Probing:
    """A sampler of one signed probe a colour, times as often as the budget allows."""

    def __init__(self, colours: Int[np.ndarray, " n"], witnesses: Witnesses | None) -> None:
        self.colours = colours
        self.witnesses = witnesses
        self.num_colours = int(colours.max()) + 1

    def __call__(
        self, key: PRNGKeyArray, structure: Structure, num_probes: int
    ) -> PyTree[Array]:
        n, c = dimension(structure), self.num_colours
        if n != self.colours.size:
            raise ValueError(
                f"traceax.probing(pattern_or_colours=...) must have {n} rows or entries, "
                "one for each dimension of the operator, but got "
                f"{self.colours.size}. Pass the pattern of this operator."
            )
        if num_probes % c:
            raise ValueError(
                f"traceax.probing(pattern_or_colours=...) must draw a multiple of {c} "
                f"probes, one for each colour, but got num_probes={num_probes}. Draw {c} "
                f"or {2 * c}, say."
            )
        column = jax.ShapeDtypeStruct((n,), common_dtype(structure))
        signs = rademacher(key, column, num_probes // c)
        mine = self.colours == np.arange(c)[:, None]
        probes = math.sqrt(c) * jnp.where(mine, signs[:, None, :], 0)
        return jax.vmap(lambda probe: unflatten(probe, structure))(probes.reshape(-1, n))


def probing(
    pattern_or_colours: Any, *, power: int = 1, num_colours: int | None = None
) -> Probing:
    """Make a sampler for sparse structure from a colouring of the dimensions.

    One probe for each colour: random signs (phases, for complex operators) on the
    dimensions of that colour, zero on all others. An entry A_ab contributes to the error
    only if a and b have the same colour, so for operators whose entries decay with the
    distance in a graph this beats every unstructured sampler:

        error of entry a = sum of A_ab s_b conj(s_a) over b != a of the colour of a

    Unbiased. Exact if no two dimensions a, b of one colour have A_ab != 0. It is for
    `hutchinson_trace`, `hutchinson_diagonal` and `function_diagonal`, which spend a
    multiple of the number of colours; the others need independent probes. At equal budgets
    more colours are more accurate than more repeats.

    With a pattern one repeat has a standard error: each entry between neighbours in the
    graph is seen twice, and the difference of both is error, for Hermitian operators only
    error. It is 1.0 to 1.7 times the measured error for inverses of Laplacians plus 0.01 to
    1, and larger if entries decay faster or the operator is not Hermitian. With colours
    alone one repeat has none, `inf`, and two may agree by chance, entry by entry: take
    three or more for a diagonal.

    **Arguments**

    - `pattern_or_colours`: where the operator may have entries, as in `colouring`. Or
      colours: integers of at least 0, one for each dimension, as a one-dimensional array or
      a pytree with the operator's structure.
    - `power`, `num_colours`: of a pattern, as in `colouring`.

    **Returns** a sampler. Its attribute `num_colours` is the number of probes in one
    repeat. **Raises** what `colouring` raises; `TypeError` if the colours are not concrete
    integers; `ValueError` if a colour is negative, there are none, or `power` or
    `num_colours` come with colours; when it draws, if they do not fit the operator or the
    budget.

    **Cost**: one random number for every dimension and repeat.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> band = jnp.ones(299)
        >>> precision = lx.TridiagonalLinearOperator(3 * jnp.ones(300), band, band)
        >>> sampler = tx.probing(precision.as_matrix(), power=11)
        >>> variance = lx.invert(precision, solver=lx.Tridiagonal())
        >>> key = jax.random.key(0)
        >>> estimate = tx.hutchinson_diagonal(variance, key, 24, sampler=sampler)
        >>> bool(jnp.all(abs(estimate.value[50:250] - 5**-0.5) < 1e-4))
        True

    **Reference**: Tang and Saad (2012), A probing method for computing the diagonal of a
    matrix inverse, doi:10.1002/nla.779; Stathopoulos, Laeuchli and Orginos (2013),
    Hierarchical probing, doi:10.1137/120881452.
    """
    if hasattr(pattern_or_colours, "shape") and len(pattern_or_colours.shape) != 1:
        return of_graph(*coloured("probing", pattern_or_colours, power, num_colours))
    if power != 1 or num_colours is not None:
        raise ValueError(
            "traceax.probing(power=..., num_colours=...) must come with a pattern, because "
            f"colours are there already, but got power={power}, num_colours={num_colours}. "
            "Leave them out, or pass them to traceax.colouring."
        )
    leaves = [_concrete(leaf) for leaf in jax.tree.leaves(pattern_or_colours)]
    flat = np.concatenate(leaves) if leaves else np.zeros(0, int)
    if not flat.size or flat.min() < 0:
        raise ValueError(
            "traceax.probing(pattern_or_colours=...) must be integers of at least 0, "
            "because they number the probes, but got "
            f"{flat.min() if flat.size else 'none'}. Number the colours from 0; "
            "traceax.colouring does."
        )
    return Probing(np.unique(flat, return_inverse=True)[1], None)


def of_graph(step: Sparse, best: Best) -> Probing:
    """Its witnesses are the neighbours in the graph."""
    return Probing(best.colours, Witnesses.of(best.colours, step, best.power))


def _concrete(leaf: Any) -> Int[np.ndarray, " n"]:
    traced = isinstance(leaf, Tracer)
    if traced or not np.issubdtype(np.asarray(leaf).dtype, np.integer):
        got = "a traced array" if traced else f"{np.asarray(leaf).dtype}"
        raise TypeError(
            "traceax.probing(pattern_or_colours=...) must be concrete integers, because "
            f"their number sets the shapes of arrays, but got {got}. Make the colouring "
            "outside of jax.jit, with traceax.colouring, or with NumPy and .astype(int)."
        )
    return np.asarray(leaf).ravel()
