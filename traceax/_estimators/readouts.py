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

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, working_dtype
from traceax._core.rule import Outcome, estimate
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
from traceax._probes.stream import SILENT, ProgressMeter, Stream, unit_vectors


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

    def of(self, target: Any, linear_map: LinearMap) -> Samples:
        """Those of a target, sums over leaves say."""
        values = target.of(self.values, linear_map)
        rounding = target.of(self.rounding, linear_map)
        return Samples(values, rounding, self.scale, self.sharing)

    def value_and_error(
        self, weights: Float[Array, " k"] | None = None
    ) -> tuple[Inexact[Array, "*values"], Float[Array, "*values"]]:
        """Of each entry; `weights`, of sum 1, make the mean a weighted one."""
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


def _products(linear_map: LinearMap, z: Inexact[Array, "n k"]) -> Inexact[Array, " n"]:
    return row_dots(linear_map(z), z)


def _squares(linear_map: LinearMap, z: Inexact[Array, "r k"]) -> Float[Array, " p"]:
    """Rows of |B Z|^2; if B is wide, Z holds unit vectors of its rows' space."""
    if linear_map.operator.out_size() < linear_map.operator.in_size():
        return dot(z.real, column_norms_squared(linear_map.adjoint(z)))
    return row_norms_squared(linear_map(z))


@dataclass(frozen=True)
class Target:
    """What is estimated of an operator B, by default one number: the sum of the `rows`, n
    of them, of conj(Z) o (B Z), or of |B Z|^2."""

    rows: Callable[[LinearMap, Inexact[Array, "n k"]], Rows] = _products
    is_square: bool = True
    subject: Callable[[Operator], LinearMap] = LinearMap

    def structure(self, operator: Operator) -> Structure | None:
        """That of the result, None if it is one number."""
        del operator

    def of(self, rows: Rows, linear_map: LinearMap) -> Inexact[Array, "..."]:
        del linear_map
        return jnp.sum(rows, axis=0)

    def __call__(
        self, linear_map: LinearMap, block: Inexact[Array, "n k"]
    ) -> Inexact[Array, "..."]:
        """The sum over the columns of a block of probes."""
        return self.of(self.rows(linear_map, block), linear_map)

    def exact(self, operator: Operator, batch_size: int | None, meter: Any) -> Estimate:
        """From every unit vector: all columns of B, or the rows if these are fewer."""
        n, dtype = cost_of_exact(operator), working_dtype(operator)
        units = unit_vectors(n, dtype, batch_size or n)
        readout = Batches(units, jnp.ones((), jnp.finfo(dtype).dtype), self)
        structure = self.structure(operator)
        return exactly(self.subject(operator), readout, n, structure, meter)


class ByRow(Target):
    """Each row is a result."""

    def structure(self, operator: Operator) -> Structure:
        return operator.in_structure() if self.is_square else operator.out_structure()

    def of(self, rows: Rows, linear_map: LinearMap) -> Rows:
        del linear_map
        return rows

    def ratio(
        self, z: Inexact[Array, "n k"], products: Inexact[Array, "n k"], linear_map: Any
    ) -> tuple[Inexact[Array, "r k"], Float[Array, "r k"]]:
        """Numerators and weights of each probe; the result is the ratio of their sums."""
        forms = z.conj() * products
        forms = forms.real if linear_map.is_hermitian else forms
        return forms, squared_modulus(z)

    def error_by(self, rows: Float[Array, " n"], linear_map: Any) -> Float[Array, " r"]:
        """The error of the result from that of each row of the diagonal."""
        del linear_map
        return rows


@dataclass(frozen=True)
class ByLeaf(Target):
    """Sums over the rows of each leaf; with `groups`, a name for each leaf, over leaves."""

    groups: tuple[str, ...] = ()

    def structure(self, operator: Operator) -> Structure:
        structure = operator.in_structure()
        if self.groups:
            number = jax.ShapeDtypeStruct((), common_dtype(structure))
            return dict.fromkeys(sorted(set(self.groups)), number)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), leaf.dtype), structure)

    def of(self, rows: Rows, linear_map: LinearMap) -> Inexact[Array, "sums ..."]:
        structure = linear_map.operator.in_structure()
        sizes = [leaf.size for leaf in jax.tree.leaves(structure)]
        sums = self.sums(structure)
        leaf = in_rows(np.repeat(sums, sizes), structure)
        return jax.ops.segment_sum(rows, leaf, max(sums) + 1)

    def sums(self, structure: Structure) -> list[int]:
        """The sum that each leaf belongs to, in the order of the sorted names."""
        if not self.groups:
            return list(range(len(jax.tree.leaves(structure))))
        names = sorted(set(self.groups))
        return [names.index(name) for name in self.groups]


def cost_of_exact(operator: Operator) -> int:
    """How many applications an exact answer takes: by the adjoint if rows are fewer."""
    return min(operator.in_size(), operator.out_size())


def exactly(
    subject: Any,
    readout: Batches,
    num_matvecs: int,
    structure: Structure | None,
    meter: ProgressMeter = SILENT,
) -> Estimate:
    """The sum over probes of which nothing is random."""
    algorithm, degrees = partial(_exactly, meter=meter), float(num_matvecs)
    return estimate(algorithm, subject, readout, "exact", num_matvecs, degrees, structure)


def _exactly(subject: Any, readout: Batches, *, meter: ProgressMeter) -> Outcome:
    value = readout(subject, meter)
    return Outcome(value, jnp.zeros_like(value.real), readout)


TRACE, LEAVES, DIAGONAL = Target(), ByLeaf(), ByRow()
NORM, ROW_NORMS = Target(_squares, is_square=False), ByRow(_squares, is_square=False)


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

    target: Target = eqx.field(static=True)
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
        return self.target.of(rows, linear_map)

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
    target: Target, loo: LeaveOneOut, shares: Float[Array, " k"] | None = None
) -> TwoSided:
    """Of probes of which each is left out of its projector; `shares`, of sum 1, make the
    mean a weighted one."""
    k, dtype = loo.probes.shape[1], loo.probes.real.dtype
    shares = jnp.full(k, 1 / k, dtype) if shares is None else shares.astype(dtype)
    one, q = jnp.ones((), dtype), loo.basis.columns
    return TwoSided(target, q, loo.directions, loo.probes, loo.mu, shares, one, one)


class Squares(eqx.Module):
    """|b_a|^2 = |b_a P|^2 + E[c |b_a (I - P) w|^2] for the rows b_a, p of them.

    Quadratic in B, so the derivative is taken of it as it stands. The mean over P_i and w_i
    as in `TwoSided`, `resphering` the factors c_i.
    """

    target: Target = eqx.field(static=True)
    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k k"]
    tested: Inexact[Array, "n k"]
    resphering: Float[Array, " k"]

    def __call__(self, linear_map: LinearMap) -> Float[Array, "..."]:
        image = linear_map(self.basis)
        rows = mean(self.known(image) + self.remainders(linear_map(self.tested)))
        return self.target.of(rows, linear_map)

    def known(self, image: Inexact[Array, "p k"]) -> Float[Array, "p k"]:
        """|b_a P_i|^2, from B Q."""
        removed = squared_modulus(dot(image, self.directions))
        return row_norms_squared(image)[:, None] - removed

    def remainders(self, products: Inexact[Array, "p k"]) -> Float[Array, "p k"]:
        """c_i |b_a mu_i|^2, from the columns B mu_i."""
        return self.resphering[None, :] * squared_modulus(products)
