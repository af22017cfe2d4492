"""Quadratures: what the value of tr f(A) and its derivatives are read off.

A quadrature has nodes x with weights w, and pairs of vectors l, r, both made of A, so that

    tr f(A) ~ sum over nodes of w f(x),
    d tr f(A) = tr(f'(A) dA) ~ sum over pairs of l^T dA r.

The pairs depend on f and on A: a derivative freezes them, and a second one needs their own,
which whatever makes the pairs provides or refuses (`settled`). They are made by `split` for
Hermitian operators, `modes` for those that are not, and from the whole matrix where that is
small. What `fn` depends on moves the sum as another function would, d tr f(A) =
tr((df)(A)), so that its derivative is the same quadrature, of df.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._quadrature.scalar import Flat, MatrixFunction, Slope, moving

# Rows l and r for each of p values, s of them. One for `r` may serve all values; None
# stands for all n unit vectors, whose images are the columns of the matrix.
Pairs = tuple[Inexact[Array, "p s n"], Inexact[Array, "... s n"] | None]


class Nodes(eqx.Module):
    """A quadrature, called on f and the operator that is to be read: the readout of traces
    of functions. Its weights are the same for each value of f, or one row for each."""

    nodes: Inexact[Array, " m"]
    weights: Inexact[Array, "... m"]
    pairs: Callable[[MatrixFunction], Pairs]

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return read(subject, self)

    def total(self, fn: Flat) -> Inexact[Array, " p"]:
        values = jax.vmap(fn)(self.nodes).T
        # The Jacobian of f has several values for each one of f.
        weights = jnp.repeat(self.weights, len(values) // len(self.weights), axis=0)
        return weighed(weights, values)


@eqx.filter_custom_jvp
def read(subject: MatrixFunction, nodes: Nodes) -> Inexact[Array, " p"]:
    """tr f(A) by a quadrature, with its pairs for the derivative."""
    return nodes.total(subject.fn)


@read.def_jvp
def _read_jvp(
    primals: tuple[MatrixFunction, Nodes], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (subject, nodes), (tangent, _) = primals, tangents
    value = read(subject, nodes)
    moved = jnp.zeros_like(value)
    if jax.tree.leaves(tangent.fn):
        jacobian, numbers = moving(subject.fn, tangent.fn)
        rates = read(MatrixFunction(subject.linear_map, jacobian), nodes)
        moved = moved + rates.reshape(value.size, -1) @ numbers.astype(rates.dtype)
    if jax.tree.leaves(tangent.linear_map):
        pairs = nodes.pairs(subject)
        moved = moved + _paired(pairs, subject.linear_map, tangent.linear_map)
    moved = moved if jnp.iscomplexobj(value) else moved.real
    return value, moved.astype(value.dtype)


def _paired(pairs: Pairs, linear_map: LinearMap, tangent: Any) -> Inexact[Array, " p"]:
    """The sum of l^T dA r."""
    left, right = pairs

    def images(a: LinearMap) -> Inexact[Array, "... s n"]:
        if right is None:
            return a.dense().T[None]
        return a(right.reshape(-1, right.shape[-1]).T).T.reshape(right.shape)

    _, moved = eqx.filter_jvp(images, (linear_map,), (tangent,))
    if moved is None:
        return jnp.zeros(left.shape[0], left.dtype)
    return jnp.sum(left * moved.astype(left.dtype), axis=(1, 2))


def weighed(
    weights: Inexact[Array, "... m"], values: Inexact[Array, "... m"]
) -> Inexact[Array, ...]:
    """The sum over nodes of weights times values. A node of no weight does not count, even
    where its value is infinite."""
    dtype = weights.dtype if jnp.iscomplexobj(weights) else values.dtype
    counted = jnp.where(weights == 0, 0, values).astype(dtype)
    return jnp.sum(weights.astype(dtype) * counted, axis=-1)


def at_nodes(fn: Flat, nodes: Inexact[Array, "N m"]) -> Inexact[Array, "N m p"]:
    return jax.vmap(jax.vmap(fn))(nodes)


def slopes_at(
    fn: Flat, nodes: Float[Array, "N m"], values: Inexact[Array, "N m p"]
) -> Float[Array, "N m p"]:
    """|f'|, by which the rounding of nodes moves `values`, those of f. Where it is large
    (that of a square root at 0) what matters is how far f rises within the rounding."""
    slopes = jnp.abs(at_nodes(Slope(fn), nodes))
    step = 4 * jnp.finfo(nodes.dtype).eps * jnp.max(jnp.abs(nodes), axis=1, keepdims=True)
    beside, step = at_nodes(fn, nodes + step), step[..., None]
    secants = jnp.abs(beside - values) / jnp.where(step > 0, step, 1)
    # A value that is not finite shows in the estimate.
    secants = jnp.where(jnp.isfinite(secants), secants, 0)
    return jnp.where(jnp.isfinite(slopes), jnp.minimum(slopes, secants), secants)
