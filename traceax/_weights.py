"""Readouts: what an operator is read through, with frozen blocks. See `_rule`.

Each is a module whose blocks are constants, called on a `LinearMap` B.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._operator import LinearMap
from traceax._sketch import (
    column_dots,
    column_norms_squared,
    mean,
    row_dots,
    row_norms_squared,
)


class TraceWeight(eqx.Module):
    """tr B = E <B, L R*>, the sum over entries of conj(L) o (B R)."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        return jnp.sum(self.left.conj() * linear_map(self.right))


class DiagonalWeight(eqx.Module):
    """diag B = E of the row sums of conj(L) o (B R)."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, " n"]:
        return row_dots(linear_map(self.right), self.left)


class TwoSidedWeight(eqx.Module):
    """diag B = diag(P B + B P - P B P) + E[conj(w) o (I - P) B (I - P) w], P a projector.

    The mean over l pairs P_i, w_i with P_i = Q (I - s_i s_i*) Q*; `complement` holds
    mu_i = (I - P_i) w_i. (Where one P serves all, the s_i are 0.) What is left to chance is
    second order in what P misses. With one-sided projections, diag(P B) + conj(w) o
    (I - P) B w, it is first order: on tangents dA no better than no sketch at all.

    With H = Q* B Q and overlines for means over i, the first term is read as

        diag( Q K (Q* B) + (B Q K - Q E) Q* ),    K = I - mean s_i s_i*,
        E = mean (I - s_i s_i*) H (I - s_i s_i*).
    """

    basis: Inexact[Array, "n k"]
    directions: Inexact[Array, "k l"]
    probes: Inexact[Array, "n l"]
    complement: Inexact[Array, "n l"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, " n"]:
        image = linear_map(self.basis)
        hermitian = linear_map.is_hermitian
        coimage = image if hermitian else linear_map.adjoint(self.basis)
        return self.read(image, coimage, linear_map(self.complement))

    def read(
        self,
        image: Inexact[Array, "n k"],
        coimage: Inexact[Array, "n k"],
        remainder: Inexact[Array, "n l"],
    ) -> Inexact[Array, " n"]:
        """From B Q, B* Q and the columns B mu_i."""
        q, s, l = self.basis, self.directions, self.probes.shape[1]  # noqa: E741

        def kept(block: Inexact[Array, "_ k"]) -> Inexact[Array, "_ k"]:
            return block - (block @ s) @ s.conj().T / l

        h = q.conj().T @ image
        core = kept(h) - s @ (s.conj().T @ h) / l
        core = core + (s * column_dots(s, h @ s)[None, :]) @ s.conj().T / l
        known = row_dots(kept(q), coimage) + row_dots(kept(image) - q @ core, q)
        return known + row_dots(self.residual(remainder), self.probes / l)

    def residual(self, remainder: Inexact[Array, "n l"]) -> Inexact[Array, "n l"]:
        """(I - P_i) B (I - P_i) w_i."""
        inside = self.basis.conj().T @ remainder
        inside = inside - self.directions * column_dots(self.directions, inside)[None, :]
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

    def __call__(self, linear_map: LinearMap) -> Float[Array, " p"]:
        image = linear_map(self.basis)
        return mean(self.samples(image, linear_map(self.complement)))

    def samples(
        self, image: Inexact[Array, "p k"], remainder: Inexact[Array, "p k"]
    ) -> Float[Array, "p k"]:
        """From B Q and the columns B mu_i, one estimate for each i."""
        inside = row_norms_squared(image)[:, None]
        removed = jnp.abs(image @ self.directions) ** 2
        return inside - removed + self.resphering[None, :] * jnp.abs(remainder) ** 2


class AllRowNorms(eqx.Module):
    """|b_a|^2 from a whole basis: of all columns of B, or of all rows by the adjoint."""

    basis: Inexact[Array, "r r"]
    by_adjoint: bool

    def __call__(self, linear_map: LinearMap) -> Float[Array, " p"]:
        if self.by_adjoint:
            return column_norms_squared(linear_map.adjoint(self.basis))
        return row_norms_squared(linear_map(self.basis))


class SquaredNorm(eqx.Module):
    """||B||_F^2, the sum of row norms."""

    rows: AllRowNorms

    def __call__(self, linear_map: LinearMap) -> Float[Array, ""]:
        return jnp.sum(self.rows(linear_map))
