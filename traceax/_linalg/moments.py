"""Sums over samples that tell a ratio of means and its spread, batch by batch.

Samples s have numerators P_s and weights Q_s >= 0; the estimate is v = sum P / sum Q, and
its spread comes from residuals r_s = P_s - v Q_s. Of a batch, S = sum |r|^2, C = sum r Q
and W = sum Q^2 are kept, about its own v'; about another v they are, without cancellation
(as Chan, Golub and LeVeque 1983 do it for means),

    S + 2 Re conj(v' - v) C + |v' - v|^2 W,        C + (v' - v) W.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import magnitude, squared_modulus


class Moments(eqx.Module):
    """Entry by entry; all but the weights in units of `scale`, so that squares stay in
    range."""

    numerator: Inexact[Array, " n"]
    weight: Float[Array, " n"]
    size: Float[Array, " n"]
    squares: Float[Array, " n"]
    mixed: Inexact[Array, " n"]
    weight_squares: Float[Array, " n"]
    scale: Float[Array, ""]

    def value(self) -> Inexact[Array, " n"]:
        """In units of the scale."""
        return _ratio(self.numerator, self.weight)

    def merged(self, other: Moments) -> Moments:
        scale = jnp.maximum(self.scale, other.scale)
        mine, others = self._in_units(scale), other._in_units(scale)
        sums = jax.tree.map(jnp.add, mine, others)
        value = sums.value()
        squares, mixed = zip(mine._about(value), others._about(value), strict=True)
        total = squares[0] + squares[1], mixed[0] + mixed[1], scale
        return eqx.tree_at(lambda m: (m.squares, m.mixed, m.scale), sums, total)

    def _about(
        self, value: Inexact[Array, " n"]
    ) -> tuple[Float[Array, " n"], Inexact[Array, " n"]]:
        moved = self.value() - value
        cross = 2 * (moved.conj() * self.mixed).real
        squares = self.squares + cross + squared_modulus(moved) * self.weight_squares
        return jnp.maximum(squares, 0), self.mixed + moved * self.weight_squares

    def _in_units(self, scale: Float[Array, ""]) -> Moments:
        factor = self.scale / scale
        return Moments(
            self.numerator * factor,
            self.weight,
            self.size * factor,
            self.squares * factor**2,
            self.mixed * factor,
            self.weight_squares,
            scale,
        )


def _ratio(
    numerator: Inexact[Array, " n"], weight: Float[Array, " n"]
) -> Inexact[Array, " n"]:
    return numerator / jnp.where(weight > 0, weight, 1)


def moments(numerators: Inexact[Array, "n s"], weights: Float[Array, "n s"]) -> Moments:
    scale = magnitude(numerators)
    numerators = numerators / scale
    numerator, weight = jnp.sum(numerators, axis=1), jnp.sum(weights, axis=1)
    residuals = numerators - _ratio(numerator, weight)[:, None] * weights
    return Moments(
        numerator,
        weight,
        jnp.sum(jnp.abs(numerators), axis=1),
        jnp.sum(squared_modulus(residuals), axis=1),
        jnp.sum(residuals * weights, axis=1),
        jnp.sum(weights**2, axis=1),
        scale,
    )
