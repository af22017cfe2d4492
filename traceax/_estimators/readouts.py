"""Targets, and the readouts of the derivative rule (`_core.rule`).

Traces, sums over the leaves of a pytree and diagonals are one estimate, read in three ways:
the rows of conj(L) o (B R), summed over all rows, over the rows of each leaf, or not at
all. Squared norms of rows, and their sum, are read of its squares. A `Target` says which.

A readout is a module whose blocks are constants. It is called on a `LinearMap` B, and what
it returns estimates the target of B without bias.

**Leaving one out** (`leave_one_out`; Epperly, Tropp and Webber 2024). Omega holds k probes
w_i, Y = A Omega = Q R is the sketch, P_i the orthogonal projector on the range of Y without
column i. With the directions s_i of `basis.downdate`,

    P_i = Q (I - s_i s_i*) Q*,    x_i = (I - s_i s_i*) Q* w_i,    mu_i = (I - P_i) w_i
                                                                      = w_i - Q x_i.

mu_i is formed explicitly, where the papers' k x k formulas cancel. w_i is independent of
P_i and isotropic, so that E[mu_i mu_i*] = I - P_i; for rotation-invariant probes it may be
rescaled to the length it should have, c_i = (n - k + 1)/|mu_i|^2 ("resphering"), which
removes the variance that comes from its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap, Operator
from traceax._core.vectors import Structure, common_dtype, in_rows
from traceax._linalg.basis import Basis, downdate, orthonormalise
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    dot,
    mean,
    over,
    row_dots,
    row_norms_squared,
    squared_modulus,
    times,
)
from traceax._linalg.jackknife import root_design_effect, standard_error
from traceax._probes.stream import SILENT, ProgressMeter, Stream


class LeaveOneOut(NamedTuple):
    """What sketch and probes alone give; columns, one a probe."""

    probes: Inexact[Array, "n k"]
    basis: Basis
    directions: Inexact[Array, "k k"]
    distances: Float[Array, " k"]
    x: Inexact[Array, "k k"]
    mu: Inexact[Array, "n k"]
    resphering: Float[Array, " k"]


def leave_one_out(
    sketch: Inexact[Array, "n k"], probes: Inexact[Array, "n k"], *, resphere: bool
) -> LeaveOneOut:
    return leave_one_out_of(orthonormalise(sketch), probes, resphere=resphere)


def leave_one_out_of(
    basis: Basis, probes: Inexact[Array, "n k"], *, resphere: bool
) -> LeaveOneOut:
    """`basis` is that of the sketch of `probes`."""
    n, k = probes.shape
    s, distances = downdate(basis)
    w = dot(basis.columns.conj().T, probes)
    x = w - s * column_dots(s, w)[None, :]
    mu = probes - dot(basis.columns, x)
    lengths = column_norms_squared(mu)
    resphering = (n - k + 1) / lengths if resphere else jnp.ones_like(lengths)
    return LeaveOneOut(probes, basis, s, distances, x, mu, resphering)


def outside(
    q: Inexact[Array, "n k"], s: Inexact[Array, "k l"] | None, block: Inexact[Array, "n l"]
) -> Inexact[Array, "n l"]:
    """(I - P_i) b_i for the columns b_i; without directions, (I - Q Q*) b_i."""
    inside = dot(q.conj().T, block)
    if s is not None:
        inside = inside - s * column_dots(s, inside)[None, :]
    return block - dot(q, inside)


class Samples(eqx.Module):
    """Estimates of a diagonal, one for each probe, over `scale`. Samples that share probes
    make the variance of their mean up to `sharing` times that of independent ones
    (`jackknife.shared_error`)."""

    values: Inexact[Array, "*values k"]
    rounding: Float[Array, "*values"]
    scale: Float[Array, ""]
    sharing: Float[Array, ""] | float = 2.0

    def reduced(self, fn: Callable[[Rows], Any]) -> Samples:
        """Reduce the rows of the diagonal, for example to sums over leaves."""
        return Samples(fn(self.values), fn(self.rounding), self.scale, self.sharing)

    def value_and_error(
        self, weights: Float[Array, " k"] | None = None
    ) -> tuple[Inexact[Array, "*values"], Float[Array, "*values"]]:
        """Return the mean and its error for each entry. `weights` sum to 1."""
        values, scale = self.values, self.scale
        error = standard_error(self.sharing**0.5 * values, self.rounding)
        if weights is None:
            return times(scale, mean(values)), scale * error
        error = root_design_effect(weights) * error
        return times(scale, dot(values, weights.astype(values.dtype))), scale * error


def independent(
    products: Inexact[Array, "n k"], scale: Float[Array, ""], eps: Any, hermitian: bool
) -> Samples:
    """Hutchinson's."""
    values = products.real if hermitian else products
    return Samples(values, 4 * eps * mean(jnp.abs(products)), scale, 1.0)


Rows = Inexact[Array, "n ..."]


class Reduce(NamedTuple):
    """How the entries of a diagonal become a result: `fn` of its rows, which may have more
    axes, for example one of probes. `structure` is that of the result, None for a number.

    `fn` goes into compiled programs, so it is a plain function, or can be hashed and
    compared."""

    fn: Callable[[Rows], Inexact[Array, "..."]]
    structure: Structure | None = None


def total(rows: Rows) -> Inexact[Array, "..."]:
    """Sum over all rows."""
    return jnp.sum(rows, axis=0)


def each(rows: Rows) -> Rows:
    """Keep every row."""
    return rows


@dataclass(frozen=True)
class LeafSums:
    """Sums over the rows of each leaf, or of several leaves: leaf i, of `sizes[i]` rows, is
    added to the sum `places[i]`."""

    sizes: tuple[int, ...]
    places: tuple[int, ...]

    def __call__(self, rows: Rows) -> Inexact[Array, "sums ..."]:
        leaves = [jax.ShapeDtypeStruct((size,), rows.dtype) for size in self.sizes]
        place = in_rows(np.repeat(self.places, self.sizes), leaves)
        return jax.ops.segment_sum(rows, place, self.count)

    @property
    def count(self) -> int:
        """The number of sums."""
        return max(self.places) + 1


TOTAL = Reduce(total)


def by_row(operator: Operator) -> Reduce:
    """Every entry of the diagonal is a result."""
    return Reduce(each, operator.in_structure())


def by_leaf(operator: Operator, names: tuple[str, ...] = ()) -> Reduce:
    """Each leaf has a sum; or all leaves of the same name have one, in the order of the
    sorted names."""
    structure = operator.in_structure()
    leaves = jax.tree.leaves(structure)
    places = tuple(range(len(leaves)))
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), leaf.dtype), structure)
    if names:
        distinct = sorted(set(names))
        places = tuple(distinct.index(name) for name in names)
        number = jax.ShapeDtypeStruct((), common_dtype(structure))
        sums = dict.fromkeys(distinct, number)
    return Reduce(LeafSums(tuple(leaf.size for leaf in leaves), places), sums)


@dataclass(frozen=True)
class Forms:
    """Read the diagonal of an operator by probes, conj(z) o (B z), and reduce its
    rows, each of which is a sum over probes."""

    reduce: Callable[[Rows], Inexact[Array, "..."]]

    def __call__(
        self, linear_map: LinearMap, z: Inexact[Array, "n k"]
    ) -> Inexact[Array, "..."]:
        return self.reduce(row_dots(linear_map(z), z))


class Pairs(eqx.Module):
    """tr B = E <L, B R>, the sum over entries of conj(L) o (B R)."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        return jnp.sum(self.left.conj() * linear_map(self.right))


def trace_pairs(loo: LeaveOneOut, weights: Float[Array, " k"] | None = None) -> Pairs:
    """The mean of P_i + c_i mu_i mu_i*, in 2k columns; `weights`, of sum 1, weight it."""
    q, s, k = loo.basis.columns, loo.directions, loo.x.shape[0]
    weights = jnp.full(k, 1 / k) if weights is None else weights
    weights = weights.astype(loo.resphering.dtype)
    kept = q - dot(q, s, times(s, weights[None, :]).conj().T)
    left = [kept, times(loo.mu, (loo.resphering * weights)[None, :])]
    return Pairs(jnp.hstack(left), jnp.hstack([q, loo.mu]))


class Batches(eqx.Module):
    """The sum of `read(subject, block)` over batches of probes, divided by `lengths`: the
    number of probes, or for each row the sum of |z|^2. The subject is a `LinearMap`, or
    anything else of which blocks can be read."""

    probes: Stream
    lengths: Float[Array, "..."]
    read: Callable[[Any, Array], Array] = eqx.field(static=True)

    def __call__(
        self, subject: Any, meter: ProgressMeter = SILENT
    ) -> Inexact[Array, "..."]:
        total = self.probes.reduce(partial(self.read, subject), meter=meter)
        return over(total, self.lengths)


class TwoSided(eqx.Module):
    """diag B = diag(P B + B P - P B P) + E[conj(w) o (I - P) B (I - P) w], P a projector.

    The sum over l pairs P_i, w_i, weighted by `shares`, with P_i = Q (I - s_i s_i*) Q*, the
    s_i in `directions` (None where P = Q Q* serves all); `tested` holds mu_i = (I - P_i)
    w_i. What is left to chance is second order in what P misses. With one-sided
    projections, diag(P B) + conj(w) o (I - P) B w, it is first order: on tangents as bad as
    no sketch. With H = Q* B Q, and `forward` the sum of shares, the first term is

        diag( Q K (Q* B) + (B Q K - Q E) Q* ),    K = sum of shares (I - s_i s_i*),
        E = sum of shares (I - s_i s_i*) H (I - s_i s_i*).

    Where an estimate is partly Hutchinson's, `plain` are its weights of conj(w_i) o B w_i,
    with B w_i = B mu_i + B Q x_i. An estimate that is Hutchinson's alone has other probes
    in the place of Q, which `adjoint` weighs, and w_i in that of mu_i; then `forward` and
    `shares` are zero, and there is no x.
    """

    reduce: Callable[[Rows], Any] = eqx.field(static=True)
    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k l"] | None
    probes: Inexact[Array, "n l"]
    tested: Inexact[Array, "n l"]
    shares: Float[Array, " l"]
    forward: Float[Array, ""]
    adjoint: Float[Array, ""]
    plain: Float[Array, " l"] | None = None
    x: Inexact[Array, "k l"] | None = None

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, "..."]:
        coimage = linear_map.adjoint(self.basis)
        image = coimage if linear_map.is_hermitian else linear_map(self.basis)
        products = linear_map(self.tested)
        rows = self.known(image, coimage)
        remainder = outside(self.basis, self.directions, products)
        rows += row_dots(remainder, times(self.probes, self.shares[None, :]))
        if self.plain is not None:
            products = products if self.x is None else products + dot(image, self.x)
            rows += row_dots(products, times(self.probes, self.plain[None, :]))
        return self.reduce(rows)

    def known(
        self, image: Inexact[Array, "n k"], coimage: Inexact[Array, "n k"]
    ) -> Inexact[Array, " n"]:
        """The first term, from B Q and B* Q."""
        q, s = self.basis, self.directions
        h = dot(q.conj().T, image)
        if s is None:
            return row_dots(q, coimage) + row_dots(image - dot(q, h), q)
        weighted = times(self.shares[:, None], s.conj().T)
        core = times(self.forward, h) - dot(s, dot(weighted, h)) - dot(h, s, weighted)
        core = core + dot(s * column_dots(s, dot(h, s))[None, :], weighted)
        kept = times(self.adjoint, q) - dot(q, s, weighted)
        kept_image = times(self.forward, image) - dot(image, s, weighted)
        return row_dots(kept, coimage) + row_dots(kept_image - dot(q, core), q)


def two_sided(
    loo: LeaveOneOut,
    reduce: Callable[[Rows], Any] = each,
    shares: Float[Array, " k"] | None = None,
) -> TwoSided:
    """Each probe is left out of its own projector. `shares` are weights that sum to 1."""
    k, dtype = loo.probes.shape[1], loo.probes.real.dtype
    shares = jnp.full(k, 1 / k, dtype) if shares is None else shares.astype(dtype)
    one, q = jnp.ones((), dtype), loo.basis.columns
    return TwoSided(reduce, q, loo.directions, loo.probes, loo.mu, shares, one, one)


class Squares(eqx.Module):
    """|b_a|^2 = |b_a P|^2 + E[c |b_a (I - P) w|^2] for the rows b_a, p of them.

    Quadratic in B, so the derivative is taken of it as it stands. The mean over P_i and w_i
    as in `TwoSided`, `resphering` the factors c_i.
    """

    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k k"]
    tested: Inexact[Array, "n k"]
    resphering: Float[Array, " k"]

    def __call__(self, linear_map: LinearMap) -> Float[Array, " p"]:
        image = linear_map(self.basis)
        return mean(self.known(image) + self.remainders(linear_map(self.tested)))

    def known(self, image: Inexact[Array, "p k"]) -> Float[Array, "p k"]:
        """|b_a P_i|^2, from B Q."""
        removed = squared_modulus(dot(image, self.directions))
        return row_norms_squared(image)[:, None] - removed

    def remainders(self, products: Inexact[Array, "p k"]) -> Float[Array, "p k"]:
        """c_i |b_a mu_i|^2, from the columns B mu_i."""
        return self.resphering[None, :] * squared_modulus(products)
