"""Arithmetic of tall blocks, by columns, by rows and as a whole."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


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


def squared_modulus(a: Inexact[Array, ...]) -> Float[Array, ...]:
    """Not `abs(a)**2`: its derivative at 0 is one, too."""
    return (a * a.conj()).real


def diagonal(matrix: Inexact[Array, "k k"]) -> Inexact[Array, " k"]:
    """As a sum, which compiles in a fraction of the time of `jnp.diagonal`, a gather."""
    return jnp.einsum("ii->i", matrix)


def magnitude(block: Inexact[Array, ...]) -> Float[Array, ""]:
    """The largest modulus in a block, or the least normal number: what to divide by."""
    largest = jnp.max(jnp.abs(block))
    return jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)


def column_sizes(block: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """The largest modulus in each column, or 1 where there is none: what to divide by."""
    largest = jnp.max(jnp.abs(block), axis=0)
    return jnp.where(largest > 0, largest, 1)


def mean(samples: Inexact[Array, "*values k"]) -> Inexact[Array, "*values"]:
    """Divided before they are summed: k times the mean may be out of range."""
    return jnp.sum(samples / samples.shape[-1], axis=-1)
