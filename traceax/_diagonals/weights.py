"""Readouts of diagonals and norms, with frozen blocks. See `rule` and `_traces.weights`."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

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
    (None where P = Q Q* serves all); `complement` holds mu_i = (I - P_i) w_i. What is left
    to chance is second order in what P misses. With one-sided projections, diag(P B) +
    conj(w) o (I - P) B w, it is first order: on tangents no better than no sketch at all.

    With H = Q* B Q, the first term is

        diag( Q K (Q* B) + (B Q K - Q E) Q* ),    K = I - mean_i s_i s_i*,
        E = mean_i (I - s_i s_i*) H (I - s_i s_i*).
    """

    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k l"] | None
    probes: Inexact[Array, "n l"]
    complement: Inexact[Array, "n l"]

    @staticmethod
    def of(loo: LeaveOneOut) -> TwoSidedWeight:
        return TwoSidedWeight(loo.basis.columns, loo.directions, loo.probes, loo.mu)

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, " n"]:
        image = linear_map(self.basis)
        hermitian = linear_map.is_hermitian
        coimage = image if hermitian else linear_map.adjoint(self.basis)
        residual = self.residual(linear_map(self.complement))
        count = self.probes.shape[1]
        return self.known(image, coimage) + row_dots(residual, self.probes / count)

    def known(
        self, image: Inexact[Array, "n k"], coimage: Inexact[Array, "n k"]
    ) -> Inexact[Array, " n"]:
        """The first term, from B Q and B* Q."""
        q, s = self.basis, self.directions
        h = q.conj().T @ image
        if s is None:
            return row_dots(q, coimage) + row_dots(image - q @ h, q)
        weighted = s.conj().T / s.shape[1]
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
