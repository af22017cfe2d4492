"""Arithmetic of tall blocks by columns and rows, and sums over samples in columns.

**Moments.** Samples s have numerators P_s and weights Q_s >= 0. The estimate is v = sum P /
sum Q, and its spread comes from the residuals r_s = P_s - v Q_s. Each batch of samples
keeps S = sum |r|^2, C = sum r Q and W = sum Q^2 about its own estimate v'. About another v
these sums are, without cancellation (Chan, Golub and LeVeque 1983, for means),

    S + 2 Re conj(v' - v) C + |v' - v|^2 W,        C + (v' - v) W.
"""

from __future__ import annotations

from functools import partial, reduce

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

HIGHEST = jax.lax.Precision.HIGHEST


def promoted(*arrays: Array) -> tuple[Array, ...]:
    """In one dtype, complex if one of them is; JAX does not if users make it strict."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*arrays)
    return tuple(array.astype(dtype) for array in arrays)


def times(a: Inexact[Array, ...], b: Inexact[Array, ...]) -> Inexact[Array, ...]:
    return jnp.multiply(*promoted(a, b))


def over(a: Inexact[Array, ...], b: Inexact[Array, ...]) -> Inexact[Array, ...]:
    return jnp.divide(*promoted(a, b))


def dot(*factors: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """Multiply matrices, from left to right, in full precision.

    JAX's default rounds factors in single precision, to 10 bits on NVIDIA GPUs and to 7 on
    TPUs. traceax orthogonalises, factorises and subtracts products that nearly cancel, so
    every product of its own is made by this function or by `einsum`.
    """
    return reduce(partial(jnp.matmul, precision=HIGHEST), factors)


def einsum(subscripts: str, *factors: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """Evaluate `jax.numpy.einsum` in full precision, as `dot` does."""
    return jnp.einsum(subscripts, *factors, precision=HIGHEST)


def column_dots(a: Inexact[Array, "n k"], b: Inexact[Array, "n k"]) -> Inexact[Array, " k"]:
    """<a_j, b_j> = a_j* b_j for every column j."""
    return jnp.sum(a.conj() * b, axis=0)


def column_norms_squared(a: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    return column_dots(a, a).real


def row_dots(a: Inexact[Array, "n k"], b: Inexact[Array, "n k"]) -> Inexact[Array, " n"]:
    """The diagonal of a b*: the sum of a_j o conj(b_j) over columns j."""
    return jnp.sum(a * b.conj(), axis=1)


def row_norms_squared(a: Inexact[Array, "n k"]) -> Float[Array, " n"]:
    return row_dots(a, a).real


def squared_modulus(a: Inexact[Array, "*shape"]) -> Float[Array, "*shape"]:
    """It replaces `abs(a)**2`, whose derivatives go through `abs`, singular at 0."""
    return (a * a.conj()).real


def diagonal(matrix: Inexact[Array, "k k"]) -> Inexact[Array, " k"]:
    """The diagonal as a sum, which compiles faster than the gather of `jnp.diagonal`."""
    return einsum("ii->i", matrix)


def largest_modulus(block: Inexact[Array, "..."]) -> Float[Array, ""]:
    """The largest modulus in a block, or the least normal number, so that it divides."""
    largest = jnp.max(jnp.abs(block))
    return jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)


def column_scales(block: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """The largest modulus in each column, or 1 for a zero column, so that it divides."""
    largest = jnp.max(jnp.abs(block), axis=0)
    return jnp.where(largest > 0, largest, 1)


def mean(samples: Inexact[Array, "*values k"]) -> Inexact[Array, "*values"]:
    """The samples are divided first, because their sum may overflow."""
    return jnp.sum(samples / samples.shape[-1], axis=-1)


class Moments(eqx.Module):
    """The sums of every entry: those of P, Q, |P|, |r|^2, r Q and Q^2. P and r are divided
    by `scale`, so that their squares do not overflow."""

    numerator: Inexact[Array, " n"]
    weight: Float[Array, " n"]
    size: Float[Array, " n"]
    squares: Float[Array, " n"]
    mixed: Inexact[Array, " n"]
    weight_squares: Float[Array, " n"]
    scale: Float[Array, ""]

    def value(self) -> Inexact[Array, " n"]:
        """The estimate v, divided by `scale`."""
        return _ratio(self.numerator, self.weight)

    def merged(self, other: Moments) -> Moments:
        scale = jnp.maximum(self.scale, other.scale)
        mine, others = self._divided_by(scale), other._divided_by(scale)
        value = jax.tree.map(jnp.add, mine, others).value()
        sums = jax.tree.map(jnp.add, mine._about(value), others._about(value))
        return eqx.tree_at(lambda m: m.scale, sums, scale)

    def _about(self, value: Inexact[Array, " n"]) -> Moments:
        moved = self.value() - value
        cross = 2 * (moved.conj() * self.mixed).real
        squares = self.squares + cross + squared_modulus(moved) * self.weight_squares
        new = jnp.maximum(squares, 0), self.mixed + times(moved, self.weight_squares)
        return eqx.tree_at(lambda m: (m.squares, m.mixed), self, new)

    def _divided_by(self, scale: Float[Array, ""]) -> Moments:
        factor = self.scale / scale
        linear = (times(x, factor) for x in (self.numerator, self.size, self.mixed))
        return eqx.tree_at(
            lambda m: (m.numerator, m.size, m.mixed, m.squares),
            self,
            (*linear, self.squares * factor**2),
        )


def _ratio(
    numerator: Inexact[Array, " n"], weight: Float[Array, " n"]
) -> Inexact[Array, " n"]:
    return over(numerator, jnp.where(weight > 0, weight, 1))


def moments(numerators: Inexact[Array, "n s"], weights: Float[Array, "n s"]) -> Moments:
    scale = largest_modulus(numerators)
    numerators = over(numerators, scale)
    numerator, weight = jnp.sum(numerators, axis=1), jnp.sum(weights, axis=1)
    residuals = numerators - times(_ratio(numerator, weight)[:, None], weights)
    return Moments(
        numerator,
        weight,
        jnp.sum(jnp.abs(numerators), axis=1),
        jnp.sum(squared_modulus(residuals), axis=1),
        jnp.sum(times(residuals, weights), axis=1),
        jnp.sum(weights**2, axis=1),
        scale,
    )
