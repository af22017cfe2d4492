"""Readouts of diagonals and norms, with frozen blocks. See `rule` and `_traces.weights`."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    mean,
    row_dots,
    row_norms_squared,
    squared_modulus,
)
from traceax._probes.meters import SILENT, ProgressMeter
from traceax._probes.stream import Stream
from traceax._traces.leave_one_out import LeaveOneOut


class MeanProduct(eqx.Module):
    """diag B = E conj(z) o B z, the sum over probes over `lengths`, that of |z|^2."""

    probes: Stream
    lengths: Float[Array, " n"]

    def __call__(
        self, linear_map: LinearMap, meter: ProgressMeter = SILENT
    ) -> Inexact[Array, " n"]:
        def products(z: Inexact[Array, "n b"]) -> Inexact[Array, " n"]:
            return row_dots(linear_map(z), z)

        return self.probes.reduce(products, meter=meter) / self.lengths


class TwoSidedWeight(eqx.Module):
    """diag B = diag(P B + B P - P B P) + E[conj(w) o (I - P) B (I - P) w], P a projector.

    The mean over l pairs P_i, w_i with P_i = Q (I - s_i s_i*) Q*, the s_i in `directions`
    (None where P = Q Q* serves all); `complement` holds mu_i = (I - P_i) w_i; `weights`, of
    sum 1, make it a weighted one. What is left to chance is second order in what P misses.
    With one-sided projections, diag(P B) + conj(w) o (I - P) B w, it is first order: on
    tangents no better than no sketch at all.

    With H = Q* B Q, the first term is

        diag( Q K (Q* B) + (B Q K - Q E) Q* ),    K = I - mean_i s_i s_i*,
        E = mean_i (I - s_i s_i*) H (I - s_i s_i*).
    """

    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k l"] | None
    probes: Inexact[Array, "n l"]
    complement: Inexact[Array, "n l"]
    weights: Float[Array, " l"] | None = None

    @staticmethod
    def of(loo: LeaveOneOut, weights: Float[Array, " k"] | None = None) -> TwoSidedWeight:
        q = loo.basis.columns
        return TwoSidedWeight(q, loo.directions, loo.probes, loo.mu, weights)

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, " n"]:
        image = linear_map(self.basis)
        hermitian = linear_map.is_hermitian
        coimage = image if hermitian else linear_map.adjoint(self.basis)
        return self.of_images(image, coimage, linear_map(self.complement))

    def of_images(
        self,
        image: Inexact[Array, "n k"],
        coimage: Inexact[Array, "n k"],
        remainder: Inexact[Array, "n l"],
    ) -> Inexact[Array, " n"]:
        """From B Q, B* Q and the columns B mu_i."""
        tested = row_dots(self.residual(remainder), self.probes * self.shares[None, :])
        return self.known(image, coimage) + tested

    @property
    def shares(self) -> Float[Array, " l"]:
        if self.weights is not None:
            return self.weights
        count = self.probes.shape[1]
        return jnp.full(count, 1 / count, self.probes.real.dtype)

    def known(
        self, image: Inexact[Array, "n k"], coimage: Inexact[Array, "n k"]
    ) -> Inexact[Array, " n"]:
        """The first term, from B Q and B* Q."""
        q, s = self.basis, self.directions
        h = q.conj().T @ image
        if s is None:
            return row_dots(q, coimage) + row_dots(image - q @ h, q)
        weighted = self.shares[:, None] * s.conj().T
        core = h - s @ (weighted @ h) - (h @ s) @ weighted
        core = core + (s * column_dots(s, h @ s)[None, :]) @ weighted
        kept, kept_image = q - (q @ s) @ weighted, image - (image @ s) @ weighted
        return row_dots(kept, coimage) + row_dots(kept_image - q @ core, q)

    def residual(self, remainder: Inexact[Array, "n l"]) -> Inexact[Array, "n l"]:
        """(I - P_i) b_i for the columns b_i."""
        s = self.directions
        inside = self.basis.conj().T @ remainder
        if s is not None:
            inside = inside - s * column_dots(s, inside)[None, :]
        return remainder - self.basis @ inside


class EitherWeight(eqx.Module):
    """Two-sided, or the mean of Hutchinson's over the same probes and over `fresh` ones, to
    which the adjoint is applied: of the two only the blocks of one are multiplied."""

    two_sided: TwoSidedWeight
    fresh: Inexact[Array, "n k"]
    sketches: Bool[Array, ""]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, " n"]:
        sketched = self.two_sided
        basis = jnp.where(self.sketches, sketched.basis, self.fresh)
        tested = jnp.where(self.sketches, sketched.complement, sketched.probes)
        coimage = linear_map.adjoint(basis)
        image = coimage if linear_map.is_hermitian else linear_map(basis)
        products = linear_map(tested)
        first = row_dots(products, sketched.probes * sketched.shares[None, :])
        sampled = (first + row_dots(self.fresh, coimage) / self.fresh.shape[1]) / 2
        two_sided = sketched.of_images(image, coimage, products)
        return jnp.where(self.sketches, two_sided, sampled)


class PartlyTwoSided(eqx.Module):
    """`share` of it two-sided, and of each probe what `rest` says Hutchinson's; the sum of
    `rest` is 1 - `share`. As w = mu + Q x, no product is of Hutchinson's alone."""

    two_sided: TwoSidedWeight
    x: Inexact[Array, "k k"]
    share: Float[Array, ""]
    rest: Float[Array, " k"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, " n"]:
        sketched = self.two_sided
        image = linear_map(sketched.basis)
        hermitian = linear_map.is_hermitian
        coimage = image if hermitian else linear_map.adjoint(sketched.basis)
        remainder = linear_map(sketched.complement)
        products = remainder + image @ self.x
        sampled = row_dots(products, sketched.probes * self.rest[None, :])
        return self.share * sketched.of_images(image, coimage, remainder) + sampled


class RowNorms(eqx.Module):
    """|b_a|^2 = |b_a P|^2 + E[c |b_a (I - P) w|^2] for the rows b_a, p of them.

    Quadratic in B, so the derivative is taken of it as it stands. The mean over i as in
    `TwoSidedWeight`, `resphering` the factors c_i.
    """

    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k k"]
    complement: Inexact[Array, "n k"]
    resphering: Float[Array, " k"]

    @staticmethod
    def of(loo: LeaveOneOut) -> RowNorms:
        return RowNorms(loo.basis.columns, loo.directions, loo.mu, loo.resphering)

    def __call__(self, linear_map: LinearMap) -> Float[Array, " p"]:
        image = linear_map(self.basis)
        known = self.known(image)
        return mean(known + self.tested(linear_map(self.complement)))

    def known(self, image: Inexact[Array, "p k"]) -> Float[Array, "p k"]:
        """|b_a P_i|^2, from B Q."""
        removed = squared_modulus(image @ self.directions)
        return row_norms_squared(image)[:, None] - removed

    def tested(self, remainder: Inexact[Array, "p k"]) -> Float[Array, "p k"]:
        """c_i |b_a mu_i|^2, from the columns B mu_i."""
        return self.resphering[None, :] * squared_modulus(remainder)


class AllRowNorms(eqx.Module):
    """|b_a|^2 from a whole basis: of all columns of B, or of all rows by the adjoint."""

    basis: Inexact[Array, "r r"]
    by_adjoint: bool = eqx.field(static=True)

    def __call__(self, linear_map: LinearMap) -> Float[Array, " p"]:
        if self.by_adjoint:
            return column_norms_squared(linear_map.adjoint(self.basis))
        return row_norms_squared(linear_map(self.basis))


class SquaredNorm(eqx.Module):
    """||B||_F^2, the sum of row norms."""

    rows: AllRowNorms

    def __call__(self, linear_map: LinearMap) -> Float[Array, ""]:
        return jnp.sum(self.rows(linear_map))
