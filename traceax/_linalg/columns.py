"""Arithmetic of tall blocks by columns and rows, and sums over samples in columns.

**Moments.** Samples s have numerators P_s and weights Q_s >= 0. The estimate is v = sum P /
sum Q, and its spread comes from the residuals r_s = P_s - v Q_s. Each batch of samples
keeps S = sum |r|^2, C = sum r Q and W = sum Q^2 about its own estimate v'. About another v
these sums are, without cancellation (Chan, Golub and LeVeque 1983, for means),

    S + 2 Re conj(v' - v) C + |v' - v|^2 W,        C + (v' - v) W.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

Number = Float[Array, ""]
Block = Inexact[Array, "n k"]  # of vectors, which are its columns
OfProbes = Float[Array, " k"]  # a number for each column
Square = Inexact[Array, "k k"]
Matrix = Inexact[Array, "n n"]


def promoted(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays in one dtype, which is complex if one of them is.

    JAX does not promote dtypes itself if a user makes its promotion strict.
    """
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*arrays)
    return tuple(array.astype(dtype) for array in arrays)


def eps_of(x: Array) -> float:
    """Return the unit roundoff of an array's dtype."""
    return float(jnp.finfo(x.dtype).eps)


def times(a: Inexact[Array, ...], b: Inexact[Array, ...]) -> Inexact[Array, ...]:
    """Multiply two arrays of any two dtypes, entry by entry."""
    return jnp.multiply(*promoted(a, b))


def over(a: Inexact[Array, ...], b: Inexact[Array, ...]) -> Inexact[Array, ...]:
    """Divide two arrays of any two dtypes, entry by entry."""
    return jnp.divide(*promoted(a, b))


def positive(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return a divisor: x, with 1 in the place of entries that are not positive."""
    return jnp.where(x > 0, x, 1)


def dot(*factors: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """Multiply matrices, from left to right, in full precision.

    JAX's default rounds factors in single precision, to 10 bits on NVIDIA GPUs and to 7 on
    TPUs. traceax orthogonalises, factorises and subtracts products that nearly cancel, so
    every product of its own is made by this function or by `einsum`.
    """
    return reduce(partial(jnp.matmul, precision="highest"), factors)


def dot_columns(matrix: Inexact[Array, "n s"], block: Inexact[Array, "s t"]) -> Array:
    """Return matrix @ block, for a block of few columns.

    A single column is multiplied by sums. XLA compiles a product with it in ten times the
    time, and if the matrix is transposed, such a product takes ten times as long, too.
    """
    if block.shape[1] != 1:
        return dot(matrix, block)
    return jnp.sum(times(matrix, block.T), axis=1, keepdims=True)


def adjoint_dot_columns(matrix: Inexact[Array, "n s"], block: Block) -> Array:
    """Return matrix* @ block, in the same way."""
    if block.shape[1] != 1:
        return dot(matrix.conj().T, block)
    return jnp.sum(times(matrix.conj(), block), axis=0)[:, None]


def einsum(subscripts: str, *factors: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """Evaluate `jax.numpy.einsum` in full precision, as `dot` does."""
    return jnp.einsum(subscripts, *factors, precision="highest")


def summed(x: Inexact[Array, "..."], axis: int = -1) -> Inexact[Array, "..."]:
    """Return the sum over one axis."""
    return jnp.sum(_folded(x, jnp.add, axis), axis=axis)


def _folded(x: Array, fold: Callable[[Array, Array], Array], axis: int) -> Array:
    """Fold an axis to at most 32 entries, if the array is small.

    XLA's CPU compiler makes one loop of a reduction over so few entries and of what leads
    to it, and three loops of one over more, which take three times as long to compile.
    Large arrays are left to its library of reductions.
    """
    axis %= x.ndim
    size = x.shape[axis]
    if size <= 32 or size > 1024 or x.size >= 4096:
        return x
    parts = -(-size // 32)
    length = -(-size // parts)
    missing = [(0, parts * length - size if a == axis else 0) for a in range(x.ndim)]
    return reduce(fold, jax.lax.split(jnp.pad(x, missing), (length,) * parts, axis=axis))


def column_dots(a: Block, b: Block) -> Inexact[Array, " k"]:
    """Return <a_j, b_j> = a_j* b_j for every column j."""
    return summed(a.conj() * b, axis=0)


def column_norms_squared(a: Block) -> OfProbes:
    """Return |a_j|^2 for every column j."""
    return column_dots(a, a).real


def row_dots(a: Block, b: Block) -> Inexact[Array, " n"]:
    """Return the diagonal of a b*: the sum of a_j o conj(b_j) over columns j."""
    return summed(a * b.conj(), axis=1)


def row_norms_squared(a: Block) -> Float[Array, " n"]:
    """Return the squared norm of every row."""
    return row_dots(a, a).real


def frobenius_norm(matrix: Block) -> Number:
    """Return the root of the sum of all squares, which must not overflow."""
    return jnp.sqrt(summed(row_norms_squared(matrix)))


def squared_modulus(a: Inexact[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return |a|^2 with derivatives at 0.

    `abs(a)**2` has the same value, but its derivative goes through `abs`, which is singular
    at 0.
    """
    return (a * a.conj()).real


def diagonal_of(matrix: Square) -> Inexact[Array, " k"]:
    """Return the diagonal as a sum, which compiles faster than `jnp.diagonal`'s gather."""
    return summed(jnp.where(np.eye(len(matrix), dtype=bool), matrix, 0), axis=0)


def trace_of(matrix: Square) -> Inexact[Array, ""]:
    """Return the trace, which compiles faster than `jnp.trace`."""
    return summed(diagonal_of(matrix))


def largest_modulus(block: Inexact[Array, "..."]) -> Number:
    """Return the largest modulus in a block, or the nearest number that may be a divisor.

    It is at least the least normal number, so the block may be zero. It is at most an
    eighth of the largest one, because XLA multiplies by the inverse of a divisor, and the
    inverse of a larger number is flushed to zero.
    """
    sizes = jnp.abs(block)
    for axis in range(sizes.ndim):
        sizes = _folded(sizes, jnp.maximum, axis)
    limits = jnp.finfo(sizes.dtype)
    return jnp.clip(jnp.max(sizes), limits.tiny, limits.max / 8)


def largest_of_rows(x: Inexact[Array, "*values m"]) -> Float[Array, "*values"]:
    """Return `largest_modulus` of each row."""
    largest = jnp.max(_folded(jnp.abs(x), jnp.maximum, -1), axis=-1)
    return jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)


def column_scales(block: Block) -> OfProbes:
    """Return the largest modulus in each column, or 1 for a zero column.

    So each column may be divided by its scale.
    """
    return positive(jnp.max(jnp.abs(block), axis=0))


def mean(samples: Inexact[Array, "*values k"]) -> Inexact[Array, "*values"]:
    """Return the mean over the last axis. Samples are divided first: sums may overflow."""
    return summed(samples / samples.shape[-1])


class Moments(eqx.Module):
    """The sums over samples, for every entry: of P, |P|, r Q, |r|^2, Q and Q^2.

    P and r are divided by `scale`, so that their squares do not overflow.
    """

    numerator: Inexact[Array, "*n"]
    size: Float[Array, "*n"]
    mixed: Inexact[Array, "*n"]
    squares: Float[Array, "*n"]
    weight: Float[Array, "*n"]
    weight_squares: Float[Array, "*n"]
    scale: Number

    def value(self) -> Inexact[Array, "*n"]:
        """Return the estimate v, divided by `scale`; zero if no sample has a weight."""
        return over(self.numerator, positive(self.weight))

    def merged(self, other: Moments) -> Moments:
        """Return the sums over the samples of both."""
        return jax.tree.map(lambda *x: jnp.stack(x, axis=-1), self, other)._summed()

    def _summed(self) -> Moments:
        """Sum over the last axis, about the estimate v of all (module docstring)."""
        scale, weight, squares = jnp.max(self.scale), self.weight, self.weight_squares
        factor = jnp.broadcast_to(self.scale / scale, weight.shape)
        p, size, mixed = (times(x, factor) for x in (self.numerator, self.size, self.mixed))
        value = over(jnp.sum(p, axis=-1), positive(jnp.sum(weight, axis=-1)))
        moved = over(p, positive(weight)) - value[..., None]
        moved_squares = squared_modulus(moved) * squares + 2 * (moved.conj() * mixed).real
        whole = jnp.maximum(self.squares * factor**2 + moved_squares, 0)
        parts = p, size, mixed + times(moved, squares), whole, weight, squares
        return Moments(*jax.tree.map(partial(jnp.sum, axis=-1), parts), scale=scale)


def moments(numerators: Inexact[Array, "n s"], weights: Float[Array, "n s"]) -> Moments:
    """Sum over the samples of one batch, [entry, sample]."""
    scale = largest_modulus(numerators)
    p, none = over(numerators, scale), jnp.zeros_like(weights)
    # Each sample is its own estimate, without a residual.
    parts = p, jnp.abs(p), jnp.zeros_like(p), none, weights, weights**2
    return Moments(*parts, scale)._summed()
